"""Bases with weights in few bits: every kind of method decodes what autoregressive decoding of such a base emits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.decoding.method import Method
from jaxspec.drafters import load_drafter
from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.drafter import autoregressive, finalized
from jaxspec.drafters.loading import _other_weights
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate
from jaxspec.methods import PPD, SPACE, DFlash, DraftModel, Eagle, Medusa
from jaxspec.model.blocks import Corrected
from jaxspec.training.data import cache_file
from jaxspec.training.settings import DataConfig, TrainConfig
from jaxspec.training.step import Update, first_state, train_step
from jaxspec.trees import chain
from jaxspec.weights.quantizing import small_tree
from tests.helpers.methods import batch_of, sequence, trained, union, untrained_drafter
from tests.helpers.tiny import TINY, make_prompts, make_tiny

SHAPES = dataclasses.replace(TINY, intermediate_size=64, num_layers=2)
FORMS = ("int8", "int4")


@functools.cache
def small_model(form, tied=False):
    model = make_tiny(dataclasses.replace(SHAPES, tie_embeddings=tied), seed=1)
    return dataclasses.replace(model, params=small_tree(model.params, form, "tiny"))


@pytest.mark.parametrize(
    ("form", "method", "temperature"),
    [
        ("int8", PPD(distances=2), 0.0),
        ("int4", PPD(distances=2), 1.0),
        ("int4", Medusa(heads=2), 0.0),
        pytest.param("int8", Eagle(), 0.0, marks=pytest.mark.slow),
    ],
)
def test_texts_are_those_of_autoregressive_decoding(form, method, temperature):
    """Greedy and sampled; with a projection of its own, and where embeddings project."""
    model, prompts = small_model(form, tied=temperature > 0), make_prompts(3)
    settings = {"sampling": SamplingConfig(temperature), "seed": 3, "batch_size": 3}
    reference = generate(autoregressive(model), prompts, 16, **settings)
    answers = generate(union([method], model, 6), prompts, 16, **settings)
    assert [a.tokens for a in answers] == [a.tokens for a in reference]


@pytest.mark.parametrize("form", FORMS)
def test_a_draft_vocabulary_keeps_the_form(form):
    base = small_model(form).base
    ids, x = jnp.array([3, 0, 11]), jax.random.normal(jax.random.key(0), (5, 32))
    drafting = base.drafting(ids)
    assert drafting.draft_vocabulary.columns.values.dtype == base.params["lm_head"].values.dtype
    np.testing.assert_allclose(drafting.draft_logits(x), base.project(x)[:, ids], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "method",
    [Medusa(heads=2, lm_head="full"), Eagle(start="base"), DFlash(layers=1), DraftModel(layers=(0, 1))],
    ids=lambda method: method.name,
)
def test_what_starts_as_a_copy_of_the_base_is_a_copy_of_floats(form, method):
    started = method.init(jax.random.key(0), small_model(form).base)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(started))


@pytest.mark.slow
def test_a_draft_model_in_few_bits_drafts_what_it_decodes():
    """As the draft model of itself it is always right; over a base of floats it stays in few bits."""
    model = dataclasses.replace(small_model("int4"), eos=())
    drafter = load_drafter("draft_model", model, draft_model=model, tree="chain:3")
    reference = generate(autoregressive(model), make_prompts(2), 13)
    answers = generate(drafter, make_prompts(2), 13, batch_size=2)
    assert [a.tokens for a in answers] == [a.tokens for a in reference]
    assert [a.steps for a in answers] == [3, 3]
    [source] = load_drafter("draft_model", make_tiny(SHAPES), draft_model=model, tree="chain:3").on_device.sources
    assert source.trainable["lm_head"].values.dtype == model.params["lm_head"].values.dtype


@pytest.mark.parametrize("form", FORMS)
def test_an_adapter_is_trained_over_it(form):
    """The loss falls, and the base stays what it was."""
    model, train = small_model(form), TrainConfig(steps=20, batch_size=1, insertions=4, learning_rate=0.1)
    update = Update.of(PPD(distances=2), model.config, train, 0, False)
    state, batch = first_state(update, 0, model.base), batch_of(sequence(model), [[3, 6, 9, 12]])
    losses = []
    for _ in range(10):
        state, metrics = train_step(update, model.base, state, batch, jnp.float32(0.1))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.9 * losses[0]


def test_low_rank_corrections_stay_beside_its_kernels():
    model, method = small_model("int4"), SPACE(distances=2, rank=2)
    final, tuned = finalized(method, trained(method, model.base), model)
    assert isinstance(tuned.params["layers_0"]["attention"]["o"]["kernel"], Corrected)
    assert tuned.fingerprint not in (model.fingerprint, "")
    prompts = make_prompts(2)
    reference = generate(autoregressive(tuned), prompts, 12)
    drafter = untrained_drafter(final.method, tuned, chain(2), final.trainable)
    assert [a.tokens for a in generate(drafter, prompts, 12)] == [a.tokens for a in reference]


def test_such_a_base_is_not_tuned_in_full():
    with pytest.raises(UserError, match="cannot be tuned in full; give tuning lora"):
        SPACE(tuning="full").init(jax.random.key(0), small_model("int8").base)


def test_answers_of_such_a_base_have_a_file_of_their_own():
    model = make_tiny(SHAPES, seed=1)
    files = {cache_file(each, DataConfig(), 8) for each in (model, small_model("int8"), small_model("int4"))}
    assert len(files) == 3


def test_an_adapter_of_other_weights_says_so():
    adapter = Adapter(Method(), {}, "", {"weights": "int4"})
    assert _other_weights("ppd", adapter, small_model("int4")) == ""
    line = "the adapter of ppd was trained on a base with int4 weights, and decodes with int8 weights"
    assert _other_weights("ppd", adapter, small_model("int8")) == line
    assert "weights as floats" in _other_weights("ppd", dataclasses.replace(adapter, info={}), small_model("int8"))
