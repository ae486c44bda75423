"""Bases loaded in few bits: which parameters, whose fingerprint, and what GGUF files keep of their own."""

import dataclasses
import functools

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxspec.config import MeshConfig
from jaxspec.errors import UserError
from jaxspec.model.quantized import Quantized, dense, is_quantized, quantize
from jaxspec.parallel.sharding import make_mesh
from jaxspec.weights.checkpoint import load_checkpoint, save_checkpoint
from jaxspec.weights.gguf import GGUFFile
from jaxspec.weights.hf import load_directory, save_directory
from jaxspec.weights.load import load_model, save_model
from jaxspec.weights.params import parameter_count
from jaxspec.weights.parts import join_gates, join_parts, split_parts
from jaxspec.weights.quantizing import check_form, small, small_shapes
from tests.helpers.model import TOKENS, assert_same_params, random_params, tiny_config, write_gguf

V = len(TOKENS)
CONFIG = tiny_config(vocab_size=V, hidden_size=64, intermediate_size=96, qkv_bias=True)
TIED = dataclasses.replace(CONFIG, qkv_bias=False, tie_embeddings=True)


@pytest.fixture
def folder(tmp_path):
    save_directory(tmp_path / "hf", CONFIG, random_params(CONFIG))
    save_checkpoint(tmp_path / "orbax", CONFIG, random_params(CONFIG))
    return tmp_path


@pytest.fixture
def file(tmp_path):
    """Writes a GGUF file with its matrices in blocks of a kind."""

    def written(kind, config=TIED):
        kinds = gguf.GGMLQuantizationType
        return write_gguf(tmp_path / f"{kind}.gguf", config, random_params(config), quantization=kinds[kind])

    return written


@pytest.mark.parametrize(("load", "name"), [(load_directory, "hf"), (load_checkpoint, "orbax")])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_kernels_and_the_vocabulary_projection_are_quantized_and_nothing_else(folder, load, name, form):
    """The fingerprint is that of the floats: adapters are for the same base."""
    _, params, fingerprint = load(folder / name, jnp.float32, None, form)
    _, floats, wanted = load(folder / name, jnp.float32)
    assert fingerprint == wanted and parameter_count(params) == parameter_count(floats)
    for path, leaf in flatten_dict(params, sep="/").items():
        assert is_quantized(leaf) == (path.endswith("/kernel") or path == "lm_head")
    expected = jax.tree.map_with_path(
        lambda path, x: small(x, jax.tree_util.keystr(path, simple=True, separator="/"), form), floats
    )
    assert_same_params(params, expected)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_parts_lie_on_a_mesh(folder, form):
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2))
    _, params, _ = load_directory(folder / "hf", jnp.float32, mesh, form)
    up = params["layers_0"]["mlp"]["up"]["kernel"]
    rows = 64 if form == "int8" else 32
    assert up.values.shape == (rows, 96) and up.values.sharding.shard_shape(up.values.shape) == (rows // 2, 48)
    assert up.scales.sharding.shard_shape(up.scales.shape) == (1, 48)
    _, alone, _ = load_directory(folder / "hf", jnp.float32, None, form)
    assert_same_params(params, alone)


def test_the_model_says_what_it_was_loaded_in(file, tmp_path):
    path = str(file("F16"))
    model = load_model(path, "bfloat16", weights="int4")
    assert (model.weights, model.dtype, model.base.dtype) == ("int4", jnp.bfloat16, jnp.bfloat16)
    assert (model.precision, model.loaded_dtype) == ("bfloat16 int4", "bfloat16")
    assert load_model(path, "exact", weights="int8").precision == "exact int8"
    assert load_model(path).precision == "float32"
    assert load_model(str(file("Q8_0")), weights="int8").weights == "int8-32"
    with pytest.raises(UserError, match="a base with int4 weights is not written; load it without --weights"):
        save_model(model, tmp_path / "new")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("kind", "form"), [("Q8_0", "int8"), ("Q4_0", "int4"), ("Q4_1", "int4")])
def test_files_keep_their_own_groups(file, kind, form, tied):
    """Numbers, scales and minima are the file's: what they stand for is exactly what the file says, in every head."""
    path = file(kind, dataclasses.replace(TIED, tie_embeddings=tied))
    _, params, fingerprint = GGUFFile(path).load(jnp.float32, None, form)
    _, floats, wanted = GGUFFile(path).load(jnp.float32)
    assert fingerprint == wanted
    kernels = [leaf for leaf in flatten_dict(params).values() if isinstance(leaf, Quantized)]
    assert len(kernels) == 1 + 5 * CONFIG.num_layers
    for kernel in kernels:
        assert kernel.group == 32 and (kernel.minima is not None) == (kind == "Q4_1")
        assert kernel.values.dtype == (jnp.int8 if form == "int8" else jnp.uint8)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), dense(params), floats)


@pytest.mark.parametrize(("kind", "form"), [("Q8_0", "int4"), ("Q4_0", "int8")])
def test_groups_of_other_bits_are_quantized_anew(file, kind, form):
    _, params, _ = GGUFFile(file(kind)).load(jnp.float32, None, form)
    kernel = params["layers_0"]["attention"]["qkv"]["kernel"]
    assert kernel.group == (64 if form == "int8" else 32) and kernel.minima is None


def test_parts_of_several_kinds_are_joined_as_floats():
    """As in files whose values have more bits than queries and keys."""
    rng = np.random.default_rng(0)
    widths = {"q": 64, "k": 32, "v": 32}
    floats = {f"layers_0/attention/{n}/kernel": rng.normal(size=(64, w)).astype(np.float32) for n, w in widths.items()}
    parts = {path: quantize(x, "int4" if "/v/" in path else "int8", "float32") for path, x in floats.items()}
    [joined] = join_parts(CONFIG, parts).values()
    [wanted] = join_parts(CONFIG, {path: np.asarray(x.dense(jnp.float32)) for path, x in parts.items()}).values()
    np.testing.assert_array_equal(joined, wanted)
    alike = {path: quantize(x, "int4", "float32") for path, x in floats.items()}
    [joined] = join_parts(CONFIG, alike).values()
    [wanted] = join_parts(CONFIG, {path: np.asarray(x.dense(jnp.float32)) for path, x in alike.items()}).values()
    np.testing.assert_array_equal(joined.dense(jnp.float32), wanted)
    split = split_parts(CONFIG, {"layers_0": {"attention": {"qkv": {"kernel": wanted}}}})
    np.testing.assert_array_equal(
        split["layers_0/attention/v/kernel"], alike["layers_0/attention/v/kernel"].dense(jnp.float32)
    )


def test_gate_and_up_lie_side_by_side():
    def kernel(seed):
        return quantize(jax.random.normal(jax.random.key(seed), (64, 96)), "int4", "float32")

    made = {f"mlp/{name}/kernel": kernel(seed) for seed, name in enumerate(("gate", "up"))}
    pair = join_gates(made)["mlp/gate_up/kernel"]
    assert pair.shape == (2, 64, 96)
    np.testing.assert_array_equal(pair.dense(jnp.float32)[1], made["mlp/up/kernel"].dense(jnp.float32))


def test_shapes_alone_are_those_of_weights(file):
    params = random_params(CONFIG)
    shapes = small_shapes(jax.eval_shape(lambda: params), "int4")
    _, loaded, _ = GGUFFile(file("F16", CONFIG)).load(jnp.float32, None, "int4")
    assert jax.tree.structure(shapes) == jax.tree.structure(loaded)
    jax.tree.map(lambda a, b: np.testing.assert_equal((a.shape, a.dtype), (b.shape, b.dtype)), shapes, loaded)


@pytest.mark.parametrize(
    ("form", "message"),
    [("int5", "weights 'int5' are unknown .did you mean 'int8'"), ("q4", "use one of int8, int4, int4-64")],
)
def test_unknown_forms_are_named(form, message):
    with pytest.raises(UserError, match=message):
        check_form(form)


def test_kernels_that_cannot_be_quantized_are_named():
    with pytest.raises(UserError, match=r"mlp/down/kernel has 40 rows, which are no whole groups of 32; .* int8"):
        small(jnp.ones((40, 8)), "mlp/down/kernel", "int4")
    with pytest.raises(UserError, match="lm_head holds weights that are not finite, or too large for int4"):
        small(jnp.full((64, 8), 1e9), "lm_head", "int4", "FILE")
    with pytest.raises(UserError, match="40 rows"):
        small_shapes({"mlp": {"kernel": jax.ShapeDtypeStruct((40, 8), jnp.float32)}}, "int4")
