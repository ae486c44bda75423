"""Greedy texts over every family: those of transformers, whoever drafts."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxspec.drafters.drafter import autoregressive
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate
from jaxspec.methods import PPD, DFlash, Eagle, Hydra, Medusa, PromptLookup
from jaxspec.weights.hf import load_directory
from jaxspec.weights.model import Model
from tests.helpers.families import FAMILIES, ORIGINAL, save_torch, torch_greedy
from tests.helpers.marks import slow_ones
from tests.helpers.methods import union

pytest.importorskip("torch")
pytestmark = pytest.mark.slow
PROMPT, COUNT = [7, 3, 11, 3, 11, 60, 5, 5, 2], 32


@functools.cache
def torch_and_model(name, folder):
    judge = save_torch(name, folder)
    return judge, Model(name, *load_directory(folder, jnp.float32))


@pytest.fixture
def loaded(tmp_path_factory):
    """transformers' model and ours, by name."""
    return lambda name: torch_and_model(name, tmp_path_factory.getbasetemp() / name)


# The logits of every family have a test.
@pytest.mark.parametrize(
    "name", slow_ones(FAMILIES, ("gemma3", "granite", "falcon_7b", "phi4_longrope", "qwen3_layers"), str)
)
def test_texts_are_those_of_transformers(name, loaded):
    """A method with probes, one with heads and a lookup draft together."""
    judge, model = loaded(name)
    [alone] = generate(autoregressive(model), [PROMPT], COUNT)
    if name != "phi4_longrope":  # transformers changes frequencies in the middle of a text
        assert alone.tokens == torch_greedy(judge, PROMPT, COUNT)
    [drafted] = generate(union([PPD(), Medusa(), PromptLookup()], model, 8), [PROMPT], COUNT)
    assert drafted.tokens == alone.tokens


def test_the_factors_of_longrope_are_chosen_per_text(loaded):
    """A row of a batch is long or short whatever the others are; the limit decides, not where the text has got to."""
    judge, model = loaded("phi4_longrope")
    drafter = union([PPD()], model, 6)
    short = [4, 9, 2]
    fits = ORIGINAL - len(short)
    [inside] = generate(drafter, [short], fits)
    assert inside.tokens == torch_greedy(judge, short, fits)
    [beyond] = generate(drafter, [short], COUNT)
    batch = generate(drafter, [short, PROMPT], COUNT, batch_size=2)
    assert batch[0].tokens == beyond.tokens
    assert beyond.tokens[:fits] != inside.tokens
    long = [*PROMPT, *range(20, 30)]  # transformers takes the long ones from the first pass on
    [ours] = generate(drafter, [long], COUNT)
    assert ours.tokens == torch_greedy(judge, long, COUNT)
    mixed = generate(drafter, [long, [3]], fits, batch_size=2)
    [alone] = generate(drafter, [[3]], fits)
    assert mixed[1].tokens == alone.tokens


@pytest.mark.parametrize("method", [Eagle(start="random"), DFlash(start="random"), Hydra(prefix_attention=True)])
def test_methods_with_layers_of_their_own_draft_over_other_shapes(method, loaded):
    _, model = loaded("gemma3")
    [alone] = generate(autoregressive(model), [PROMPT], COUNT)
    [drafted] = generate(union([method], model, 8), [PROMPT], COUNT)
    assert drafted.tokens == alone.tokens


@pytest.mark.parametrize("method", [Eagle(), DFlash()])
@pytest.mark.parametrize("name", ["gemma3", "olmo2", "falcon_7b", "granite"])
def test_layers_of_another_shape_are_not_copied(name, method, loaded):
    _, model = loaded(name)
    with pytest.raises(UserError, match=f"{method.name}: its layers cannot start as this base's.*use start random"):
        method.init(jax.random.key(0), model.base)
