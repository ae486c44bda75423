"""The strict loader: every tensor in its place or an error that names it; fingerprints."""

import dataclasses
import re

import flax.traverse_util
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxspec.config import RopeScaling
from jaxspec.errors import UserError
from jaxspec.weights.params import GGUF_NAMES, HF_NAMES, load_params, parameter_table, params_fingerprint, tensor_names
from tests.helpers.model import VARIANTS, assert_same_params, named_tensors, random_params, tiny_config

both_formats = pytest.mark.parametrize("names", [HF_NAMES, GGUF_NAMES], ids=["hf", "gguf"])


def load(config, tensors, names=HF_NAMES, dtype=jnp.float32):
    return load_params(config, tensors.items() if isinstance(tensors, dict) else tensors, names, dtype, "some/file")


@both_formats
@pytest.mark.parametrize("variant", ["llama", "llama3", "qwen2", "qwen2_window", "qwen3"])
def test_named_tensors_become_the_parameters_they_came_from(variant, names):
    config = VARIANTS[variant]
    params = random_params(config)
    loaded, fingerprint = load(config, named_tensors(config, params, names), names)
    assert_same_params(loaded, params)
    assert fingerprint == params_fingerprint(config, params)


def test_table_and_names():
    """Shapes are [in, out]; tied models have one matrix under the embedding's name, untied ones two."""
    config = tiny_config(qkv_bias=True)
    table = parameter_table(config)
    assert table["layers_1/attention/q/kernel"] == (32, 64)
    assert table["layers_1/attention/k/bias"] == (32,)
    assert table["layers_0/mlp/down/kernel"] == (40, 32)
    assert table["lm_head"] == (32, 48) and table["embedding"] == (48, 32)
    assert len(table) == 2 + 1 + 2 * (2 + 4 + 3 + 3)
    names = tensor_names(config, HF_NAMES)
    assert names["model.layers.1.self_attn.k_proj.bias"] == "layers_1/attention/k/bias"
    assert names["model.norm.weight"] == "norm/scale"
    tied = tensor_names(dataclasses.replace(config, tie_embeddings=True), GGUF_NAMES)
    assert tied["token_embd.weight"] == "lm_head" and "output.weight" not in tied
    assert tied["blk.0.attn_output.weight"] == "layers_0/attention/o/kernel"


@both_formats
@pytest.mark.parametrize("tied", [False, True])
def test_every_missing_tensor_is_named(names, tied):
    config = tiny_config(tie_embeddings=tied)
    tensors = dict(named_tensors(config, random_params(config), names))
    for name in tensors:
        rest = {key: array for key, array in tensors.items() if key != name}
        with pytest.raises(UserError, match=f"some/file: 1 tensors are missing.*'{re.escape(name)}'"):
            load(config, rest, names)


@both_formats
def test_every_misshapen_tensor_is_named_with_both_shapes(names):
    config = tiny_config(qkv_bias=True)
    tensors = dict(named_tensors(config, random_params(config), names))
    for name, array in tensors.items():
        wrong = np.concatenate([array, array[:1]])
        message = f"tensor {name!r} has shape {list(wrong.shape)}, the configuration needs {list(array.shape)}"
        with pytest.raises(UserError, match=re.escape(message)):
            load(config, tensors | {name: wrong}, names)


def test_transposed_matrix_is_refused():
    config = tiny_config()
    tensors = dict(named_tensors(config, random_params(config)))
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(UserError, match=re.escape(f"{name!r} has shape [32, 40], the configuration needs [40, 32]")):
        load(config, tensors | {name: tensors[name].T})


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "lm_head.bias"]
)
def test_unknown_tensor_is_named(name):
    config = tiny_config()
    tensors = dict(named_tensors(config, random_params(config)))
    with pytest.raises(UserError, match=re.escape(f"unknown tensor {name!r} [5, 3]")):
        load(config, tensors | {name: np.zeros((5, 3), np.float32)})


def test_duplicate_tensor_is_named():
    config = tiny_config()
    tensors = list(named_tensors(config, random_params(config)))
    for name, array in tensors:
        with pytest.raises(UserError, match=re.escape(f"tensor {name!r} occurs twice")):
            load(config, [*tensors, (name, array)])


def test_buffers_and_second_copies_of_tied_embeddings_are_skipped():
    config = tiny_config(tie_embeddings=True)
    tensors = dict(named_tensors(config, random_params(config)))
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32),
        "lm_head.weight": np.zeros((48, 32), np.float32),
    }
    assert_same_params(load(config, extra | tensors)[0], random_params(config))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_of_the_parameters_and_float32_norms(dtype):
    config = VARIANTS["qwen2_window"]
    params, _ = load(config, named_tensors(config, random_params(config)), dtype=jnp.dtype(dtype))
    for path, leaf in flax.traverse_util.flatten_dict(params, sep="/").items():
        assert leaf.dtype == ("float32" if "norm" in path else dtype), path


def test_fingerprint_does_not_depend_on_precision():
    """Of the parameters in memory, or of the file."""
    config = VARIANTS["qwen2_window"]
    params = random_params(config)
    full = params_fingerprint(config, params)
    assert re.fullmatch(r"[0-9a-f]{16}", full)
    for dtype in ("float32", "bfloat16", "float16"):
        assert load(config, named_tensors(config, params), dtype=jnp.dtype(dtype))[1] == full
    half, _ = load(config, named_tensors(config, params), dtype=jnp.bfloat16)
    assert params_fingerprint(config, half) == full
    stored = [(name, array.astype(ml_dtypes.bfloat16)) for name, array in named_tensors(config, params)]
    assert load(config, stored)[1] == full


def test_fingerprint_changes_with_every_weight_and_with_the_shape_of_the_model():
    config = VARIANTS["qwen2_window"]
    flat = flax.traverse_util.flatten_dict(random_params(config), sep="/")

    def of(config, changed):
        return params_fingerprint(config, flax.traverse_util.unflatten_dict(flat | changed, sep="/"))

    variants = [of(config, {path: leaf * 1.02}) for path, leaf in flat.items()]
    variants.append(of(config, {"layers_0/mlp/up/kernel": flat["layers_1/mlp/up/kernel"]}))
    variants.append(of(dataclasses.replace(config, rope_theta=5e5), {}))
    variants.append(of(dataclasses.replace(config, rope_scaling=RopeScaling("linear", 2.0)), {}))
    assert len({of(config, {}), *variants}) == 1 + len(variants)
