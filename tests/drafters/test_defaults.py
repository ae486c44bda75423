"""The default of a drafter that was given no tree: sizes by what rows cost, down to none."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.decoding.loop import decode
from jaxspec.drafters import defaults, load_drafter
from jaxspec.drafters.adapter import Adapter, save_adapter
from jaxspec.drafters.costs import RowCosts
from jaxspec.drafters.defaults import cost_name, drafting_costs, has_default, with_default
from jaxspec.drafters.drafter import autoregressive
from jaxspec.generation.generate import generate
from jaxspec.generation.job import Job, Settings
from jaxspec.methods import PPD, Hydra, Lookahead, Medusa, Suffix
from tests.helpers.methods import union
from tests.helpers.tiny import make_prompts, make_text_model

CHEAP = RowCosts((1.0, 64.0), ((1.0, 1.0001), (1.0, 1.0002)))
DEAR = RowCosts((1.0, 64.0), ((1.0, 64.0), (1.0, 64.0)))
RARE = RowCosts((1.0, 8.0, 64.0), ((1.0, 1.2, 64.0),) * 2)  # trials are cheap, but random drafts hardly pay


@pytest.fixture(scope="module")
def model():
    return make_text_model(num_layers=1)


def rows_of(drafter):
    return [size.rows for size in drafter.shape.sizes]


def sizes_of(drafter):
    return [size.spec.partition("@")[0] for size in drafter.shape.sizes]


def test_more_rows_where_they_cost_less(model):
    drafter = union([Suffix()], model, 8)
    assert rows_of(with_default(drafter)) == [1, 4, 8]  # by typical costs of a CPU
    assert rows_of(with_default(drafter, costs=CHEAP)) == [1, 32, 64]
    assert rows_of(with_default(drafter, costs=DEAR)) == [1, 2]
    assert rows_of(with_default(drafter, batch_size=4)) == [1, 2]  # four texts have four times as many


def test_added_rows_are_part_of_every_size_but_the_smallest(model):
    assert sizes_of(with_default(union([PPD()], model, 8))) == ["1", "4", "6", "8"]
    window = with_default(union([Lookahead()], model, 16))
    assert rows_of(window)[:2] == [1, 7] and window.device_shape.alone == 1


def test_other_sources_draft_without_added_rows(model):
    """Where these cost something; elsewhere one program runs all of them."""
    drafter = union([PPD(), Suffix()], model, 8)
    shape = with_default(drafter).device_shape
    assert sizes_of(with_default(drafter)) == ["1", "4n", "8n", "4", "8"]
    assert shape.sizes == (1, 4, 8, 2, 6) and (shape.alone, shape.adding, shape.nodes, shape.trial_size) == (3, 1, 8, 3)


def test_nodes_are_free_where_rows_are(model, monkeypatch):
    monkeypatch.setattr(defaults, "FREE_ROWS", {jax.default_backend(): 8})
    assert sizes_of(with_default(union([PPD(), Suffix()], model, 8))) == ["1", "4", "6", "8"]


def test_sizes_cost_their_rows_and_their_drafting(model):
    drafter = union([Hydra(), Suffix()], model, 8)
    costs = RowCosts((1.0, 5.0), ((10.0, 14.0), (20.0, 28.0)), {cost_name(drafter): (3.0, 4.0)})
    one, *_, most = with_default(drafter, costs=costs).shape.sizes
    assert (one.greedy, one.sampled) == (10.0, 20.0)
    assert most.greedy == 10.0 + (most.rows - 1) + 3.0 and most.sampled == 20.0 + 2 * (most.rows - 1) + 4.0


def test_what_drafting_costs_is_guessed_by_the_weights_it_reads(model):
    assert drafting_costs(union([Suffix()], model, 8), CHEAP) == (0.0, 0.0)
    greedy, sampled = drafting_costs(union([Hydra()], model, 8), CHEAP)
    assert 0 < greedy == sampled


def test_what_drafts_nothing_stays_as_it_is(model):
    drafter = autoregressive(model)
    assert with_default(drafter) is drafter


@pytest.mark.parametrize(
    ("methods", "temperature", "costs"),
    [([PPD(), Suffix()], 0.8, CHEAP), ([PPD(), Suffix()], 0.8, RARE), ([Lookahead()], 0.0, RARE)],
    ids=["probes draft", "probes rest", "a window rests"],
)
def test_the_text_is_that_of_autoregressive_decoding(model, methods, costs, temperature):
    """Whether steps have drafts, or a root alone and probes now and then."""
    settings = {"sampling": SamplingConfig(temperature), "seed": 3, "batch_size": 2}
    drafter, prompts = union(methods, model, 16), make_prompts(3)
    drafter = with_default(drafter, costs=dataclasses.replace(costs, drafting={cost_name(drafter): (0.0, 0.0)}))
    ours, plain = (generate(each, prompts, 40, **settings) for each in (drafter, autoregressive(model)))
    assert [a.tokens for a in ours] == [a.tokens for a in plain]
    drafted = sum(sum(a.offered) for a in ours)
    assert drafted > 0 or costs is RARE


def test_probes_rest_and_are_tried_again(model):
    """Where no draft pays, probes are tried less and less, and what they offer is looked at in the step after."""
    drafter = union([PPD()], model, 8)
    costs = RowCosts((1.0, 4.0, 64.0), ((1.0, 1.2, 64.0),) * 2, {cost_name(drafter): (0.0, 0.0)})
    drafter = with_default(drafter, costs=costs)
    job = Job(drafter, Settings(), 1)
    state, sizes, offered = job.begin([[1, 2, 3]], 40, 1, *job.sizes(3, 40)).state, [], []
    for step in range(36):
        sizes += [step] if int(state.draft.size[0]) else []
        offered += [step] if bool(state.draft.log_p[0, 1] > -np.inf) else []
        state = decode(job.decoding, state, np.int32(1))
    assert sizes == [0, 1, 2, 4, 8, 16, 32] and offered == [1, 2, 3, 5, 9, 17, 33]


def test_drafts_that_rest_keep_resting_in_the_next_answer(model):
    """An answer that is a drafter's first tries several drafts."""
    drafter = union([PPD()], model, 8)
    costs = RowCosts((1.0, 4.0, 64.0), ((1.0, 1.2, 64.0),) * 2, {cost_name(drafter): (0.0, 0.0)})
    drafter, fresh = (with_default(drafter, costs=costs) for _ in range(2))
    early, late = generate(drafter, [[1, 2, 3]], 40) + generate(drafter, [[4, 5, 6]], 40)
    [alone] = generate(fresh, [[4, 5, 6]], 40)
    assert early.offered[0] == alone.offered[0] > late.offered[0]
    assert late.tokens == alone.tokens


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_lookup_drafts_while_probes_rest(model, temperature):
    """In steps of nodes alone, and the text is that of autoregressive decoding."""
    prompt, sampling = [1, 2, 3, 4] * 8, SamplingConfig(temperature)
    drafter = union([PPD(), Suffix()], model, 8)
    costs = RowCosts((1.0, 4.0, 64.0), ((1.0, 1.2, 64.0),) * 2, {cost_name(drafter): (0.0, 0.0)})
    job = Job(with_default(drafter, costs=costs), Settings(sampling), 1)
    run, sizes = job.begin([prompt], 40, 1, *job.sizes(len(prompt), 40)), []
    while not run.state.done.all():
        sizes.append(int(run.state.draft.size[0]))
        job.decode(run, 1)
    [plain] = generate(autoregressive(model), [prompt], 40, sampling=sampling)
    assert run.state.tokens[0, :40].tolist() == plain.tokens
    shape = job.decoding.drafter.shape
    assert {size >= shape.alone for size in sizes} == {True, False}
    assert any(0 < size < shape.alone for size in sizes) and len(sizes) < 39


def test_costs_are_on_the_device_greedy_and_sampled(model):
    drafter = with_default(union([Suffix()], model, 8), costs=CHEAP)
    costs = np.asarray(jax.device_get(drafter.on_device.shape.costs))
    assert costs.shape == (2, 3) and (costs[1, 1:] > costs[0, 1:]).all()


def test_a_vocabulary_alone_keeps_the_default(tmp_path, model):
    method = Medusa(heads=3)
    info = {"tree": [[0]], "base": "tiny"}
    weights = {"trainable": method.init(jax.random.key(0), model.base), "frequent_tokens": np.arange(20)}
    save_adapter(tmp_path, Adapter(method, fingerprint=model.fingerprint, info=info, **weights))
    drafter = load_drafter("medusa vocabulary=20", model, tmp_path)
    assert drafter.source.draft_vocabulary == 20 and has_default(drafter)


def test_the_costs_of_drafting_are_of_its_weights(model):
    """Adapters of one method may stop early, or not."""
    one = union([Medusa(heads=3), Suffix()], model, 8)
    heads, suffix = one.sources
    other = dataclasses.replace(heads.adapter, trainable=jax.tree.map(lambda x: x + 1, heads.adapter.trainable))
    another = dataclasses.replace(one, sources=(suffix, dataclasses.replace(heads, adapter=other)))
    assert cost_name(one) != cost_name(another)
    assert cost_name(one) == cost_name(dataclasses.replace(one, sources=(suffix, heads)))


@pytest.mark.parametrize(("tree", "default"), [("best:1@1,4@1,8@1", True), ("best:4@1,8@1", False), ("best:8", False)])
def test_sizes_by_hand_are_not_the_default(model, tree, default):
    assert has_default(load_drafter("suffix", model, tree=tree)) == default
    assert not has_default(autoregressive(model))
