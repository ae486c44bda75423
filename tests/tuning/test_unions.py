"""Unions tuned by replay: every part with every number of rows, calibrated, and found again by decoding."""

import dataclasses

import numpy as np
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.decoding.draft import Offer
from jaxspec.drafters import choice_folder, choose_tree
from jaxspec.drafters.choices import TunedChoice, choice_name, save_choice
from jaxspec.drafters.drafter import Drafter, autoregressive
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate
from jaxspec.machine import this_machine
from jaxspec.methods import PPD, Medusa, PromptLookup, Suffix
from jaxspec.tuning import unions
from jaxspec.tuning.calibrate import fit_calibration
from jaxspec.tuning.hardware import RowLatency
from jaxspec.tuning.record import Recording, record
from jaxspec.tuning.replay import replay
from jaxspec.tuning.tune import TuneConfig, tune_union
from jaxspec.tuning.unions import Predictor, StepCosts, measure_costs
from tests.helpers.methods import source, union
from tests.helpers.tiny import make_prompts, make_text_model

COSTS = StepCosts(RowLatency((1, 4, 5), (1.0, 1.0, 9.0)), {("medusa", 0): 0.5, ("suffix", 0): 0.1})


@pytest.fixture(scope="module")
def recorded(tiny):
    """A union of two, and what its sources offer along answers of 40 tokens."""
    model, prompts = dataclasses.replace(tiny, eos=()), make_prompts(4)
    drafter = union([Medusa(heads=3), Suffix(length=4)], model, 9)
    answers = generate(autoregressive(model), prompts, 40)
    return drafter, record(drafter, [(p, a.tokens) for p, a in zip(prompts, answers, strict=True)])


@pytest.mark.slow
def test_every_part_is_ranked_by_tokens_over_seconds(recorded):
    """Four rows are free here and more are dear: no part takes more, and the fastest comes first."""
    drafter, recordings = recorded
    predict = Predictor(drafter, recordings, COSTS, batch_size=1, sampled=False)
    ranked = [option for option, _ in predict.rank(16)]
    assert len(ranked) == 2 * 3 and [o.predicted for o in ranked] == sorted((o.predicted for o in ranked), reverse=True)
    fixed = {option.name.split()[0]: option for option in ranked if "@" not in option.name}
    assert max(option.rows for option in fixed.values()) <= 4
    for name, extra in (("medusa", 0.5), ("suffix", 0.1), ("medusa+suffix", 0.6)):
        assert fixed[name].predicted == pytest.approx(fixed[name].tokens / (1 + extra), rel=1e-5)


@pytest.mark.slow
def test_a_batch_takes_the_steps_of_its_slowest_row(recorded):
    drafter, recordings = recorded
    alone, together = (replay(recordings, drafter, batch_size=size) for size in (1, 2))
    assert alone.steps.tolist() == together.steps.tolist() and alone.time == alone.steps.sum()
    assert together.time == alone.steps.reshape(2, 2).max(axis=1).sum()


@pytest.mark.slow
def test_steps_of_several_sizes_take_their_costs(recorded):
    """Where rows are free a step has all of them; where they are dear it has one."""
    drafter, recordings = recorded
    free = replay(recordings, drafter.with_tree("best:1@1,9@1"))
    assert free.steps.tolist() == replay(recordings, drafter).steps.tolist() and free.time == free.steps.sum()
    dear = replay(recordings, drafter.with_tree("best:1@1,9@100"))
    assert dear.time == dear.steps.sum() == 4 * 39


def test_calibration_finds_the_chances_that_came_true():
    """A source that is too sure: a chance of p comes true with p squared, at the second distance less often still."""
    answer, random = np.arange(2001) % 7, np.random.default_rng(0)
    log_p = -random.uniform(0.1, 1.5, (2000, 2, 1)).astype(np.float32)
    right = random.random((2000, 2)) < np.exp(2 * log_p[..., 0] + [0.0, -0.3])
    wanted = np.stack([np.roll(answer, -1)[:-1], np.roll(answer, -2)[:-1]], axis=1)
    tokens = np.where(right, wanted, 9)[..., None]
    recording = Recording(answer, [Offer(tokens, np.ones_like(tokens, bool), log_p, np.zeros_like(tokens))])
    known = [[1.0, 0.0], [1.0, 0.0], [0.5, -0.1]]  # at a third distance, which nothing is offered at
    np.testing.assert_allclose(
        fit_calibration([recording], 0, known), [[2.0, 0.0], [2.0, -0.3], [0.5, -0.1]], atol=0.25
    )


def test_costs_are_those_of_rows_and_of_what_each_source_adds(tiny, monkeypatch):
    drafter, timed = union([Medusa(heads=3), PromptLookup(length=4)], tiny, 8), []

    def step_times(drafters, *circumstances):
        timed.extend(drafters)
        return {key: 1.0 + 0.5 * made.num_nodes + (key == ("medusa", 0)) for key, made in drafters.items()}

    monkeypatch.setattr(unions, "step_times", step_times)
    costs = measure_costs([drafter], 1, 64, 6, SamplingConfig())
    assert costs.latency.rows == (1, 2, 3, 4, 5, 6) and len(timed) == 8
    assert costs.drafting == {("medusa", 0): 1.0, ("prompt_lookup", 0): 0.0}
    assert costs(drafter.sources, 4) == 1.0 + 0.5 * 4 + 1.0


def test_a_number_of_rows_is_replayed_with_just_that_many(tiny):
    """Even where more would be certain to pay, though several numbers are one program."""
    answer = np.arange(60) % 10
    ahead = (np.arange(59)[:, None] + 1 + np.arange(8)) % 10
    certain = np.full((59, 8, 1), -1e-4, np.float32)
    offer = Offer(ahead[..., None].astype(np.int32), certain < 0, certain, np.zeros_like(ahead)[..., None])
    predict = Predictor(union([Suffix(length=8)], tiny, 8), [Recording(answer, [offer])], COSTS, 1, False)
    found = {option.rows: option.tokens for option, _ in predict.of_each_size((0,), 8)}
    assert found == {rows: pytest.approx(59 / -(-59 // rows)) for rows in (2, 3, 4, 5, 6, 8)}


@pytest.mark.slow
def test_all_probes_are_part_of_the_smallest_of_several_sizes(tiny):
    """With sixteen rows two nodes carry probes, with eight one."""
    prompts = make_prompts(1)
    [answer] = generate(autoregressive(tiny), prompts, 30)
    drafter = union([PPD()], tiny, 16)
    costs = StepCosts(RowLatency((1, 16), (1.0, 1.0)), {("ppd", 0): 0.0})
    recordings = record(drafter, [(prompts[0], answer.tokens)])
    best = Predictor(drafter, recordings, costs, 1, False).rank(16)
    [several] = [made for _, made in best if made.shape.sizes]
    assert several.shape.sizes[0][0] > several.shape.rows - several.num_nodes


def text_union(model, *methods):
    """A union on a model with text, with adapters that know which tokens are frequent."""
    frequent = np.arange(model.config.vocab_size, dtype=np.int32)
    sources = []
    for each in (source(method, model) for method in methods):
        if each.adapter:
            each = dataclasses.replace(each, adapter=dataclasses.replace(each.adapter, frequent_tokens=frequent))
        sources.append(each)
    return Drafter(tuple(sources), model, None).with_tree(None)


@pytest.mark.slow
@pytest.mark.usefixtures("equal_layouts")
def test_a_union_is_tuned_with_a_draft_vocabulary_and_a_budget_of_ones_own():
    config = TuneConfig(
        cache_length=64, max_new_tokens=8, num_prompts=2, accuracy_prompts=2, max_rows=4, finalists=2,
        also=("best:4",), draft_vocabularies=(20,),
    )  # fmt: skip
    drafter = text_union(make_text_model(), Medusa(heads=3), Suffix(length=4))
    tuning = tune_union(drafter, ["one", "two", "three", "four"], config)
    names = [trial.name for trial in tuning.trials]
    assert names[0] == "autoregressive" and "medusa+suffix best:4, 20 tokens" in names and len(names) <= 4
    assert all(trial.identical == 2 for trial in tuning.trials)


def test_what_was_chosen_is_what_decodes(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    drafter, table = text_union(make_text_model(), Medusa(heads=3), Suffix(length=4)), [[1.0, -0.5]] * 3
    assert "never tuned" in choose_tree(drafter).note
    folder = choice_folder(drafter)
    folder.mkdir(parents=True)
    circumstances = (this_machine(), "float32", drafter.digest, 1, 64, 0.0)
    choice = TunedChoice(*circumstances, "best:3", "medusa best:3", {}, 20, ["medusa"], {"medusa": table})
    save_choice(folder, choice_name(drafter), choice)
    chosen = choose_tree(dataclasses.replace(drafter, sources=drafter.sources[::-1]))  # in whatever order
    assert (chosen.name, chosen.shape.spec, chosen.sources[0].draft_vocabulary) == ("medusa", "best:3", 20)
    np.testing.assert_allclose(chosen.sources[0].calibrations()[0], table)
    assert "tuned for this machine: medusa best:3" in chosen.note
    assert "never tuned" in choose_tree(drafter, temperature=0.8).note
    save_choice(folder, choice_name(drafter), dataclasses.replace(choice, tree=None))
    assert choose_tree(drafter).name == "autoregressive"
    save_choice(folder, choice_name(drafter), dataclasses.replace(choice, calibration={"medusa": [[1.0]]}))
    with pytest.raises(UserError, match="medusa: calibration must be two numbers for 3 distances"):
        choose_tree(drafter)


def test_settings_of_a_union_that_cannot_be_tuned(tiny):
    drafter = union([PPD(ensemble=2), Suffix(length=4)], tiny, 8)
    for config, message in (
        (TuneConfig(cache_length=64, max_rows=7), "max-rows must be at least 8"),
        (TuneConfig(cache_length=512), "at most the base's 256, got 512"),
        (TuneConfig(cache_length=64), "need at least 17 prompts, there are 2"),
    ):
        with pytest.raises(UserError, match=message):
            tune_union(drafter, ["one", "two"], config)
