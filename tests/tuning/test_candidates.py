"""What is predicted by replay: fixed trees of a source, and every part of a union with every number of rows."""

import dataclasses

import numpy as np
import pytest

from jaxspec.decoding.draft import Offer
from jaxspec.drafters.drafter import autoregressive
from jaxspec.generation.generate import generate
from jaxspec.methods import PPD, Medusa, Suffix
from jaxspec.trees import expected
from jaxspec.tuning.candidates import Predictor, best_of_kinds
from jaxspec.tuning.latency import RowLatency, StepCosts, fit_latency
from jaxspec.tuning.record import Ranks, Recording, record
from jaxspec.tuning.replay import replay
from tests.helpers.methods import union
from tests.helpers.tiny import make_prompts

COSTS = StepCosts(RowLatency((1, 4, 5), (1.0, 1.0, 9.0)), {("medusa", 0): {0: 0.5}, ("suffix", 0): {0: 0.1}})


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
    predict = Predictor(drafter, recordings, {}, COSTS, batch_size=1, temperature=0.0)
    ranked = best_of_kinds(predict.options(16))
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


@pytest.mark.slow
def test_steps_of_the_root_alone_pay_for_the_drafts_that_were_tried(recorded):
    """Where nothing pays heads draft once for all answers, in vain, for a trial is dear; lookups draft always."""
    drafter, recordings = recorded
    predict = Predictor(drafter, recordings, {}, COSTS, batch_size=1, temperature=0.0)
    steps, tried = 4 * 39, 1
    for numbers, seconds in (((0,), 0.5 * tried), ((1,), 0.1 * steps), ((0, 1), 0.5 * tried + 0.1 * steps)):
        found = predict.expect(numbers, "best:1@1000,9@100000")
        assert found.tokens == 1 and found.predicted == pytest.approx(steps / (steps + seconds), rel=1e-4)


def test_a_number_of_rows_is_replayed_with_just_that_many(tiny):
    """Even where more would be certain to pay, though several numbers are one program."""
    answer = np.arange(60) % 10
    ahead = (np.arange(59)[:, None] + 1 + np.arange(8)) % 10
    certain = np.full((59, 8, 1), -1e-4, np.float32)
    offer = Offer(ahead[..., None].astype(np.int32), certain < 0, certain, np.zeros_like(ahead)[..., None])
    predict = Predictor(union([Suffix(length=8)], tiny, 8), [Recording(answer, [offer])], {}, COSTS, 1, 0.0)
    found = {option.rows: option.tokens for option in predict.budgets((0,), 8)}
    assert found == {rows: pytest.approx(59 / -(-59 // rows)) for rows in (2, 3, 4, 5, 6, 8)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("others", "written"), [((), ["1", "7", "8", "12", "16"]), ((Suffix(),), ["1", "2n", "6n", "16n", "7", "16"])]
)
def test_sizes_have_all_probes_or_are_nodes_alone(tiny, others, written):
    """Nodes alone where a source drafts without probes."""
    prompts = make_prompts(1)
    [answer] = generate(autoregressive(tiny), prompts, 30)
    drafter = union([PPD(), *others], tiny, 16)
    costs = StepCosts(RowLatency((1, 16), (1.0, 1.0)), {(name, 0): {0: 0.0} for name in ("ppd", "suffix")})
    recordings = record(drafter, [(prompts[0], answer.tokens)])
    best = [option.drafter for option in Predictor(drafter, recordings, {}, costs, 1, 0.0).options(16)]
    sizes = [made.shape.sizes for made in best if made.shape.sizes and len(made.sources) == len(drafter.sources)]
    assert [[size.spec.partition("@")[0] for size in each] for each in sizes] == [written]


ACCURACY = np.array([[0.5, 0.2, 0.1, 0.05], [0.3, 0.15, 0.1, 0.05], [0.2, 0.1, 0.05, 0.02]])


def trees_of(tiny, method, measured, max_rows=12):
    """The fixed trees of a method that is as often right as `ACCURACY` says, independently, on a machine of our own."""
    rng, count = np.random.default_rng(0), 4000
    chances = np.column_stack([ACCURACY, 1 - ACCURACY.sum(axis=1)])
    ranks = np.stack([rng.choice([0, 1, 2, 3, -1], count, p=p) for p in chances], axis=1)
    costs = StepCosts(fit_latency(measured), {(method.name, 0): {0: 0.0, 1: 0.0, 3: 0.0}})
    known, recordings = {0: Ranks([ranks], ACCURACY)}, [Recording(np.zeros(count + 1, int), [])]
    drafter = union([method], tiny, 16)
    options = list(Predictor(drafter, recordings, known, costs, 1, 0.0).fixed_trees(0, max_rows))
    return sorted(options, key=lambda option: -option.predicted)


@pytest.mark.parametrize("method", [PPD(), PPD(ensemble=4), Medusa(heads=3)], ids=["probes", "ensemble", "heads"])
def test_fixed_trees_count_what_a_step_costs(tiny, method):
    measured, probe_rows = {1: 1.0, 64: 3.0}, method.facts(tiny.config).probe_rows
    options = trees_of(tiny, method, measured)
    assert options and len({option.drafter.shape.states for option in options}) == len(options)
    for option in options:
        plan = option.drafter.shape
        assert option.rows == plan.num_nodes + plan.num_probes * probe_rows <= 12
        assert option.tokens == pytest.approx(expected(plan, ACCURACY).expected_tokens, rel=0.05)
        assert option.predicted == pytest.approx(option.tokens / fit_latency(measured)(option.rows))


@pytest.mark.slow
def test_free_rows_call_for_the_largest_trees_and_dear_ones_for_the_smallest(tiny):
    free, dear = (trees_of(tiny, PPD(), at)[0] for at in ({1: 1.0, 64: 1.0}, {1: 1.0, 2: 2.0, 64: 64.0}))
    assert free.rows > 9 and dear.rows <= 4
    assert dear.predicted < 1.0  # autoregressive decoding would be faster, and the tuner can see it


def test_states_that_are_never_reached_are_left_out(tiny):
    for option in trees_of(tiny, PPD(), {1: 1.0, 64: 2.0}):
        plan = option.drafter.shape
        followers = {plan.next_state(n) for state in plan.states for n in state.probes}
        assert followers == set(range(len(plan.states)))
