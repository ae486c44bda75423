"""Predicted texts: lookups draft from them, and the answers stay what they are."""

import dataclasses

import numpy as np
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.drafters import load_drafter
from jaxspec.drafters.drafter import autoregressive
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate, stream
from jaxspec.methods import PPD, Suffix
from jaxspec.tuning.record import record
from jaxspec.tuning.replay import replay
from tests.helpers.methods import union
from tests.helpers.tiny import TINY, make_prompts, make_text_model, make_tiny

SAMPLING = SamplingConfig(1.5, top_k=5)


@pytest.fixture(scope="module")
def endless():
    return make_tiny(dataclasses.replace(TINY, num_layers=1), eos=())


def lookup(model, name="prompt_lookup", tree="chain:3"):
    return load_drafter(name, model, tree=tree)


@pytest.mark.parametrize(
    ("name", "tree", "sampling"),
    [("prompt_lookup", "chain:3", SamplingConfig()), ("suffix", "best:6", SAMPLING)],
    ids=["greedy", "sampling"],
)
def test_what_was_predicted_right_takes_few_steps(endless, name, tree, sampling):
    """Four rows: the answer itself, one that is wrong in two places, a wrong text, and none."""
    prompts, drafter = make_prompts(4), lookup(endless, name, tree)
    plain = generate(autoregressive(endless), prompts, 24, sampling=sampling)
    right, edited, wrong, _ = (answer.tokens for answer in plain)
    edited = [token if place not in (8, 15) else (token + 1) % 16 for place, token in enumerate(edited)]
    predictions = [right, edited, wrong[::-1], None]
    answers = generate(drafter, prompts, 24, batch_size=4, sampling=sampling, prediction=predictions)
    without = generate(drafter, prompts, 24, batch_size=4, sampling=sampling)
    assert [a.tokens for a in answers] == [a.tokens for a in without] == [a.tokens for a in plain]
    assert answers[0].steps < without[0].steps and answers[0].accepted_prediction > 8
    assert answers[1].accepted_prediction > 3 and answers[1].rejected_prediction > 0
    for answer in answers:
        assert answer.accepted_prediction <= sum(answer.drafted) and max(answer.drafted_by) <= 1
    assert answers[3].steps == without[3].steps
    assert {a.accepted_prediction + a.rejected_prediction for a in (answers[3], *without)} == {0}


def test_other_sources_are_not_counted(endless):
    """A union: only what the lookup has from the predicted text is predicted."""
    drafter, [prompt] = union([PPD(), Suffix()], endless, 6), make_prompts(1)
    plain = generate(autoregressive(endless), [prompt], 24)[0].tokens
    [answer] = generate(drafter, [prompt], 24, prediction=[plain[12:]])
    assert answer.tokens == plain
    assert 0 < answer.accepted_prediction <= sum(bits & 2 > 0 for bits in answer.drafted_by)


def test_a_text_may_stand_for_all_prompts_and_answers_may_be_streamed():
    model = make_text_model(num_layers=1)
    model, prompts = dataclasses.replace(model, eos=()), ["one", "two"]
    drafter, [first, second] = lookup(model), generate(autoregressive(model), prompts, 16, chat=False)
    answers = generate(drafter, prompts, 16, chat=False, prediction=first.text)
    assert [answer.tokens for answer in answers] == [first.tokens, second.tokens]
    *_, last = stream(drafter, "one", 16, chat=False, prediction=first.text)
    assert (last.tokens, last.steps, last.accepted_prediction) == (
        first.tokens,
        answers[0].steps,
        answers[0].accepted_prediction,
    )


def test_recorded_answers_are_replayed_with_their_predictions(endless):
    """As many steps as decoding takes."""
    prompts, drafter = make_prompts(3), lookup(endless, tree="best:6")
    answers = [answer.tokens for answer in generate(autoregressive(endless), prompts, 24)]
    predictions = [np.roll(answer, 5).tolist() for answer in answers]
    recordings = record(drafter, list(zip(prompts, answers, strict=True)), predictions=predictions, batch_size=2)
    decoded = generate(drafter, prompts, 24, prediction=predictions)
    assert replay(recordings, drafter).steps.tolist() == [answer.steps for answer in decoded]


@pytest.mark.parametrize(
    ("make", "prediction", "message"),
    [
        (autoregressive, "x", "prediction: autoregressive does not draft from a predicted text: add a lookup"),
        (lambda model: lookup(model, "token_recycling"), [[1]], "prediction: token_recycling does not draft"),
        (lookup, [[1], [2]], "give one text, or one per prompt: got 2 for 1 prompts"),
        (lookup, [[1, 99]], "a token id is outside the vocabulary of 16"),
    ],
)
def test_predictions_that_make_no_sense_are_refused(endless, make, prediction, message):
    with pytest.raises(UserError, match=message):
        generate(make(endless), make_prompts(1), 4, prediction=prediction)


def test_prediction_files_must_be_there(tmp_path):
    from jaxspec.cli.decode import main

    with pytest.raises(UserError, match="no such file"):
        main(["--prompt", "hi", "--prediction", str(tmp_path / "gone.py")])
