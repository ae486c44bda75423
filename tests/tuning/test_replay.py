"""Replaying recorded offers takes the steps that decoding takes."""

import dataclasses

import numpy as np
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.drafters.drafter import autoregressive
from jaxspec.generation.generate import generate
from jaxspec.methods import PPD, Hydra, Medusa, PromptLookup, Suffix
from jaxspec.trees import straightforward
from jaxspec.trees.plan import count_steps
from jaxspec.tuning.record import ranks_of, record
from jaxspec.tuning.replay import replay, slowest
from tests.helpers.marks import EXHAUSTIVE
from tests.helpers.methods import union
from tests.helpers.tiny import make_prompts


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [pytest.param(SamplingConfig(), marks=EXHAUSTIVE), SamplingConfig(1.2)],
    ids=["greedy", "sampling"],
)
def test_a_replay_takes_the_steps_that_decoding_takes(tiny, sampling):
    """A source alone and joined with another, at two sizes, from one recording of three."""
    model, prompts = dataclasses.replace(tiny, eos=()), make_prompts(6)
    sources = (Medusa(heads=3), PromptLookup(length=4), Suffix(length=4, occurrences=3))
    plain = generate(autoregressive(model), prompts, 40, sampling=sampling, seed=3)
    texts = [(prompt, answer.tokens) for prompt, answer in zip(prompts, plain, strict=True)]
    whole = union(sources, model, 9)
    recordings = record(whole, texts, sampling, 3, batch_size=4)
    assert [len(r.answer) for r in recordings] == [40] * 6
    for chosen, tree, batch_size in (((2,), "best:4", 1), ((0, 1), "best:6", 1), ((1, 2), "best:1@4,3@5,6@9", 3)):
        drafter = union([sources[i] for i in chosen], model, 8).with_tree(tree)
        replayed = replay(recordings, drafter, chosen, batch_size, sampling.temperature)
        batches = [prompts[i : i + batch_size] for i in range(0, 6, batch_size)]
        how = {"sampling": sampling, "seed": 3, "batch_size": batch_size}
        live = [answer for batch in batches for answer in generate(drafter, batch, 40, **how)]
        assert replayed.tokens.tolist() == [39] * 6
        ours, theirs = replayed.steps, np.array([a.steps for a in live])
        assert ours.tolist() == theirs.tolist() and ours.sum() < 6 * 39


@pytest.mark.slow
@pytest.mark.parametrize(
    "methods",
    [pytest.param([Medusa(heads=3)], marks=EXHAUSTIVE), [Medusa(heads=3), PromptLookup(length=4)]],
    ids=["one", "two"],
)
def test_drafters_rest_in_a_replay_as_in_decoding(tiny, methods):
    """Where a draft pays now and then, heads are asked again after 1, 2, 4 ... units of steps."""
    model, prompts = dataclasses.replace(tiny, eos=()), make_prompts(6)
    plain = generate(autoregressive(model), prompts, 40)
    texts = [(prompt, answer.tokens) for prompt, answer in zip(prompts, plain, strict=True)]
    drafter = union(methods, model, 5)
    recordings = record(drafter, texts, batch_size=4)
    drafter = drafter.with_tree("best:1@1,5@1.8")
    replayed, always = replay(recordings, drafter), replay(recordings, drafter, paced=False)
    assert replayed.steps.tolist() == [answer.steps for answer in generate(drafter, prompts, 40)]
    assert replayed.steps.tolist() != always.steps.tolist() and replayed.steps.sum() < 6 * 39


@pytest.mark.slow
def test_probes_that_nodes_borrow_are_replayed(tiny):
    """They know less of the text than a node's own, which are for the likeliest ends of a draft alone."""
    model, prompts = dataclasses.replace(tiny, eos=()), make_prompts(6)
    plain = generate(autoregressive(model), prompts, 40)
    texts = [(prompt, answer.tokens) for prompt, answer in zip(prompts, plain, strict=True)]
    drafter = union([PPD(), PromptLookup(length=4)], model, 9).with_tree("best:5@1,9@1.2")
    replayed = replay(record(drafter, texts, batch_size=4), drafter)
    assert replayed.steps.tolist() == [answer.steps for answer in generate(drafter, prompts, 40)]
    assert replayed.right[0].any()  # of the probes, too


@pytest.mark.slow
def test_heads_that_expand_a_tree_are_recorded_with_it(tiny):
    prompts = make_prompts(4)
    plain = generate(autoregressive(tiny), prompts, 30)
    texts = [(p, a.tokens) for p, a in zip(prompts, plain, strict=True) if len(a.tokens) > 1]
    drafter = union([Hydra(heads=3), PromptLookup(length=4)], tiny, 7)
    replayed = replay(record(drafter, texts), drafter)
    live = generate(drafter, [p for p, _ in texts], 30)
    assert abs(replayed.steps.sum() - sum(a.steps for a in live)) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("method", [Medusa(heads=3), PPD()], ids=["heads", "probes"])
def test_a_fixed_tree_is_replayed_too(tiny, method):
    """One tree, or with probes a stack of them that follow each other, whose nodes borrow their root's.

    The ranks of the tokens that come tell it, too.
    """
    model, prompts = dataclasses.replace(tiny, eos=()), make_prompts(6)
    plain = generate(autoregressive(model), prompts, 40)
    texts = [(prompt, answer.tokens) for prompt, answer in zip(prompts, plain, strict=True)]
    paths = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)]
    drafter = union([method], model, 8).with_tree(
        paths if not method.facts(model.config).probes else straightforward(2)
    )
    recordings = record(drafter, texts, batch_size=4)
    replayed = replay(recordings, drafter)
    assert replayed.steps.tolist() == [answer.steps for answer in generate(drafter, prompts, 40)]
    assert replayed.steps.sum() < replayed.tokens.sum() and not replayed.tried.any()
    ranks = ranks_of(recordings, 0).along_answers
    assert [count_steps(drafter.plan, of_answer) for of_answer in ranks] == replayed.steps.tolist()


@pytest.mark.slow
def test_parts_of_a_tree_are_replayed_from_what_was_recorded_with_it(tiny):
    """Of heads whose candidates depend on those before them."""
    model, prompts = dataclasses.replace(tiny, eos=()), make_prompts(6)
    plain = generate(autoregressive(model), prompts, 40)
    texts = [(prompt, answer.tokens) for prompt, answer in zip(prompts, plain, strict=True)]
    paths = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (1, 0, 0)]
    whole = union([Hydra(heads=3)], model, 8).with_tree(paths)
    ranks = ranks_of(record(whole, texts, batch_size=4, as_drafted=True), 0).along_answers
    for part in (paths, paths[:6], [(0,), (0, 0), (0, 0, 0)]):
        drafter = whole.with_tree(part)
        live = [answer.steps for answer in generate(drafter, prompts, 40)]
        assert [count_steps(drafter.plan, of_answer) for of_answer in ranks] == live and sum(live) < 6 * 39


def test_a_batch_takes_as_many_steps_as_its_slowest_answer():
    assert slowest(np.array([3, 5, 2, 4, 7]), 2) == 5 + 4 + 7 and slowest(np.array([3, 5]), 1) == 8
