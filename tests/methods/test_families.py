"""What methods make of a base's own layers, over every family: it works, or the family's shape is refused by name."""

import dataclasses
import functools
import re

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.errors import UserError
from jaxspec.methods import SPACE, DFlash, DraftModel, Eagle, SelfSpeculative
from jaxspec.model.attention import causal_context
from jaxspec.model.base import Base
from jaxspec.model.blocks import merged
from jaxspec.model.decoder import Decoder, Skip, abstract_params
from jaxspec.weights.families import hf_config, parse_config
from jaxspec.weights.family_table import FAMILIES
from tests.helpers import remote_families
from tests.helpers.family_examples import EXAMPLES
from tests.helpers.model import plain, quick_jit, random_base, random_tokens

BASES = EXAMPLES | {name: parse_config(content) for name, content in remote_families.CONFIGS.items()}
LIKE_LLAMA = {"llama", "mistral", "qwen2", "qwen3", "phi3", "glm", "internlm", "internlm2", "chatglm", "qwen"}
WITHOUT_GATE = {"falcon"}
every_family = pytest.mark.parametrize("family", BASES)
TOKENS = random_tokens((1, 12))


def abstract_base(family):
    """A base of that family without weights."""
    return Base(abstract_params(BASES[family]), Decoder(BASES[family]))


def shapes_of(method, base):
    """What training of a method begins with, without weights."""
    return jax.eval_shape(functools.partial(method.init, jax.random.key(0)), base)


def test_no_family_is_forgotten():
    """MiMo has Qwen 2's shapes, and Gemma 3 with images those of Gemma 3."""
    assert BASES.keys() == FAMILIES.keys() - {"mimo", "gemma3"}


@every_family
@pytest.mark.parametrize("method", [Eagle(), DFlash(layers=2)], ids=lambda method: method.name)
def test_layers_start_as_the_bases_or_are_refused(method, family):
    base = abstract_base(family)
    random = shapes_of(dataclasses.replace(method, start="random"), base)
    if family in LIKE_LLAMA:
        assert jax.tree.map(jnp.shape, shapes_of(method, base)) == jax.tree.map(jnp.shape, random)
    else:
        with pytest.raises(UserError, match=f"{method.name}: its layers cannot start as this base's.*start random"):
            shapes_of(method, base)


@every_family
def test_a_draft_model_of_all_layers_is_the_base(family):
    base = abstract_base(family)
    method = DraftModel(layers=tuple(range(BASES[family].num_layers)))
    made = method.as_draft_model(shapes_of(method, base), base)
    assert made.decoder.config == BASES[family]
    assert jax.tree.map(jnp.shape, made.params) == jax.tree.map(jnp.shape, base.params)


@every_family
def test_draft_models_of_some_layers_are_bases_that_can_be_written(family):
    config = BASES[family]
    for layers in ((0,), (1,)):
        assert parse_config(hf_config(config.of_layers(layers))) == config.of_layers(layers)


@every_family
def test_every_matrix_of_a_layer_can_be_corrected(family):
    """A family has no gate, or all five."""
    corrected = shapes_of(SPACE(rank=2), abstract_base(family))["lora"]["layers_1"]
    names = {path[-2] for path in flax.traverse_util.flatten_dict(corrected)}
    assert names == {"qkv", "o", "gate", "up", "down"} - ({"gate"} if family in WITHOUT_GATE else set())


@pytest.mark.parametrize("family", WITHOUT_GATE)
def test_a_matrix_that_the_base_lacks_is_no_target_alone(family):
    with pytest.raises(UserError, match="space: this base has none of the targets gate"):
        shapes_of(SPACE(targets=("gate",)), abstract_base(family))


@pytest.mark.slow
@every_family
def test_corrections_count_and_are_added_to_the_base(family):
    """Logits of the tuned base are those of the base with the corrections in its matrices, and others than before."""
    base, method = random_base(BASES[family]), SPACE(rank=2)
    rng = np.random.default_rng(1)
    trainable = jax.tree.map(lambda x: jnp.float32(0.1 * rng.normal(size=x.shape)), shapes_of(method, base))
    tuned = method.tuned_base(trainable, base)
    logits = plain(tuned, TOKENS)
    np.testing.assert_allclose(logits, plain(base.replace(params=merged(tuned.params)), TOKENS), rtol=1e-3, atol=1e-3)
    assert np.abs(logits - plain(base, TOKENS)).max() > 0.05


@pytest.mark.slow
@every_family
def test_a_part_that_adds_nothing_can_be_left_out(family):
    """Self-speculative drafting leaves out halves of layers: what is left of one is what the whole layer computes."""
    base, skipped = random_base(BASES[family]), SelfSpeculative(skip_attention=(0,), skip_mlp=(1,)).skip
    silent = flax.traverse_util.flatten_dict(base.params, sep="/")
    halves = r"layers_0/attention(_out_norm/|/o/)|layers_1/mlp(_out_norm/|/down/)"
    silent = {path: jnp.zeros_like(x) if re.match(halves, path) else x for path, x in silent.items()}
    base = base.replace(params=flax.traverse_util.unflatten_dict(silent, sep="/"))
    np.testing.assert_allclose(hidden(base, skipped), hidden(base, Skip()), rtol=1e-4, atol=1e-4)


@functools.partial(quick_jit, static_argnums=1)
def hidden(base, skip):
    """Hidden states of the text by the base without some parts."""
    return base.rows(base.embed(TOKENS), causal_context(*TOKENS.shape), skip=skip)[0]
