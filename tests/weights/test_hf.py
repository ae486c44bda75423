"""Hugging Face directories: reading, writing, and what is wrong with them by name."""

import dataclasses
import json
import re

import flax.traverse_util
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxspec.config import RopeScaling
from jaxspec.errors import UserError
from jaxspec.model.base import Base
from jaxspec.model.decoder import Decoder
from jaxspec.weights.families import hf_config, parse_config
from jaxspec.weights.hf import eos_tokens, load_directory, save_directory
from jaxspec.weights.params import params_fingerprint
from tests.helpers.model import (
    VARIANTS,
    assert_same_params,
    plain,
    random_params,
    random_tokens,
    split_shards,
    tiny_config,
)

every_variant = pytest.mark.parametrize("variant", VARIANTS)
LLAMA = hf_config(tiny_config())


def saved(folder, variant="llama"):
    config = VARIANTS[variant]
    save_directory(folder, config, random_params(config))
    return config, random_params(config)


def refused(folder, message):
    with pytest.raises(UserError, match=message):
        load_directory(folder, jnp.float32)


@every_variant
@pytest.mark.parametrize("shards", [1, 3])
def test_directory_round_trip(variant, shards, tmp_path):
    config, params = saved(tmp_path, variant)
    if shards > 1:
        split_shards(tmp_path, shards)
    loaded_config, loaded, fingerprint = load_directory(tmp_path, jnp.float32)
    assert loaded_config == config
    assert_same_params(loaded, params)
    assert fingerprint == params_fingerprint(config, params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_large_bases_are_written_in_shards(tied, dtype, tmp_path):
    config = dataclasses.replace(tiny_config(), tie_embeddings=tied)
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), random_params(config))
    save_directory(tmp_path, config, params, shard_bytes=9000)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors" and len(files) > 2
    for name in files:
        tensors = safetensors.numpy.load_file(tmp_path / name)
        assert len(tensors) == 1 or sum(x.nbytes for x in tensors.values()) <= 9000
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(params))
    loaded = load_directory(tmp_path, jnp.dtype(dtype))[1]
    assert_same_params(jax.tree.map(lambda x: x.astype(dtype), loaded), params)  # which has norms in 32 bits


def test_bfloat16_file_loads(tmp_path):
    """Most published checkpoints hold bfloat16."""
    config, params = saved(tmp_path)
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    half = {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors.items()}
    safetensors.numpy.save_file(half, tmp_path / "model.safetensors")
    _, loaded, fingerprint = load_directory(tmp_path, jnp.float32)
    assert fingerprint == params_fingerprint(config, params)
    for path, leaf in flax.traverse_util.flatten_dict(params).items():
        got = flax.traverse_util.flatten_dict(loaded)[path]
        np.testing.assert_array_equal(got, leaf.astype(jnp.bfloat16).astype(jnp.float32))


def test_same_tensor_in_two_shards_is_named(tmp_path):
    saved(tmp_path)
    split_shards(tmp_path, 2)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    tensors = safetensors.numpy.load_file(first)
    name = next(iter(tensors))
    safetensors.numpy.save_file(safetensors.numpy.load_file(second) | {name: tensors[name]}, second)
    refused(tmp_path, f"'{re.escape(name)}' occurs twice")


def test_missing_shard_and_missing_weights_are_named(tmp_path):
    saved(tmp_path)
    split_shards(tmp_path, 2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refused(tmp_path, r"model-00002-of-00002\.safetensors is missing")
    (tmp_path / "model.safetensors.index.json").unlink()
    refused(tmp_path, r"model\.safetensors is missing")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}'])
def test_index_without_a_weight_map_is_named(content, tmp_path):
    saved(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    refused(tmp_path, r"index\.json")


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_weights_of_pytorch(shards, tmp_path):
    """In 16 bits, as Vicuna's are; a file that holds more than weights, or less, is refused."""
    torch = pytest.importorskip("torch")
    config, file = tiny_config(), tmp_path / "model.safetensors"
    save_directory(tmp_path, config, random_params(config))
    tensors = {n: torch.tensor(x).bfloat16() for n, x in safetensors.numpy.load_file(file).items()}
    safetensors.numpy.save_file({n: t.float().numpy() for n, t in tensors.items()}, file)
    _, expected, fingerprint = load_directory(tmp_path, jnp.float32)
    file.unlink()
    names = ["pytorch_model.bin"] if shards == 1 else [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    parts = [dict(list(tensors.items())[i::shards]) for i in range(shards)]
    for name, part in zip(names, parts, strict=True):
        torch.save(part, tmp_path / name)
    if shards > 1:
        where = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    _, params, found = load_directory(tmp_path, jnp.float32)
    assert_same_params(params, expected)
    assert found == fingerprint
    content = (tmp_path / names[0]).read_bytes()
    (tmp_path / names[0]).write_bytes(content[: len(content) // 2])
    refused(tmp_path, r"\.bin: not a complete file of PyTorch weights")
    for other in (parts[0] | {"more": tmp_path}, parts[0] | {"more": 3}, [1]):
        torch.save(other, tmp_path / names[0])
        refused(tmp_path, r"\.bin: not a complete file of PyTorch weights")


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_weights_are_named(keep, tmp_path):
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(tmp_path, r"model\.safetensors: not a complete safetensors file")


@pytest.mark.parametrize("content", [None, "", "{", "[1]", b"\xff\xfe"])
def test_unreadable_config_is_named(content, tmp_path):
    saved(tmp_path)
    file = tmp_path / "config.json"
    file.unlink()
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(tmp_path, r"config\.json")


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_missing_config_key_is_named(key):
    with pytest.raises(UserError, match=f"where.json: key '{key}' is missing"):
        parse_config({k: v for k, v in LLAMA.items() if k != key}, "where.json")


def test_missing_rope_factor_is_named():
    with pytest.raises(UserError, match="key 'factor' is missing"):
        parse_config(LLAMA | {"rope_parameters": {"rope_type": "linear"}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported: llama, mistral, qwen2, qwen3, mimo"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ],
)
def test_unsupported_settings_are_named(change, message):
    with pytest.raises(UserError, match=message):
        parse_config(LLAMA | change)


def test_older_style_of_rope_settings():
    """rope_theta at the top level and rope_scaling with `type`, as checkpoints of 2023 have them."""
    old = {k: v for k, v in LLAMA.items() if k != "rope_parameters"}
    old |= {"rope_theta": 5e5, "rope_scaling": {"type": "dynamic", "factor": 3.0}, "max_position_embeddings": 128}
    config = parse_config(old)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling("dynamic", 3.0, 128) and config.max_positions == 384
    assert parse_config(old | {"rope_scaling": None}).rope_scaling is None


def test_defaults_of_left_out_keys():
    kept = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = parse_config({key: LLAMA[key] for key in kept})
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 8, 10000.0)
    assert (config.rms_norm_eps, config.tie_embeddings, config.sliding_window) == (1e-6, False, None)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_sliding_window_counts_only_where_it_is_used(family):
    qwen = LLAMA | {"model_type": family, "sliding_window": 8, "max_window_layers": 1}
    assert parse_config(qwen | {"use_sliding_window": False}).sliding_window is None
    used = parse_config(qwen | {"use_sliding_window": True})
    assert (used.window(0), used.window(1)) == (None, 8)
    mistral = {k: v for k, v in LLAMA.items() if k != "use_sliding_window"} | {"model_type": "mistral"}
    assert parse_config(mistral | {"sliding_window": 8}).window(0) == 8
    assert parse_config(mistral | {"sliding_window": None}).window(0) is None


def test_dynamic_rope_counts_from_max_position_embeddings():
    """transformers never looks at original_max_position_embeddings for this kind."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
    parsed = parse_config(LLAMA | {"rope_parameters": rope, "max_position_embeddings": 64})
    assert parsed.rope_scaling.original_max_positions == 64


def test_linear_rope_may_say_beside_it_how_long_the_context_becomes():
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    stretched = LLAMA | {"rope_parameters": rope, "max_position_embeddings": 64}
    assert parse_config(stretched).max_positions == 64
    assert parse_config(stretched | {"max_sequence_length": 256}).max_positions == 256
    assert parse_config(stretched | {"max_sequence_length": None}).max_positions == 64


def test_ends_of_text_are_those_of_both_configs(tmp_path):
    """One id, several, or none; what is written holds them in both."""
    save_directory(tmp_path, tiny_config(), random_params(tiny_config()), eos=(3, 0))
    assert eos_tokens(tmp_path) == (3, 0)
    generation = tmp_path / "generation_config.json"
    assert json.loads(generation.read_text()) == {"eos_token_id": [3, 0]}
    generation.write_text(json.dumps({"eos_token_id": 7}))
    assert eos_tokens(tmp_path) == (7, 3, 0)
    generation.write_text("{}")
    assert eos_tokens(tmp_path) == (3, 0)
    save_directory(tmp_path, tiny_config(), random_params(tiny_config()))
    assert eos_tokens(tmp_path) == ()


@pytest.mark.parametrize("eos", ["</s>", [1, None], True, -1, [[2]]])
def test_ends_of_text_that_are_no_ids_are_named(eos, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(UserError, match=r"config\.json: eos_token_id must be one token id or several, got"):
        eos_tokens(tmp_path)


TIED = tiny_config(tie_embeddings=True)
GEMMA = {"norms": "around", "head_norms": True, "activation": "gelu_tanh", "local_rope_theta": 1e4}
GEMMA |= {"embedding_scale": TIED.hidden_size**0.5}


def saved_with_head(folder, change):
    """A tied base, and in its file a head as well: what `change` makes of the embedding."""
    save_directory(folder, TIED, random_params(TIED))
    file = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    tensors["lm_head.weight"] = np.ascontiguousarray(change(tensors["model.embed_tokens.weight"]))
    safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})
    return tensors["lm_head.weight"]


@pytest.mark.parametrize("shards", [1, 3])
def test_a_head_that_differs_from_the_embedding_is_used_though_the_config_ties_them(shards, tmp_path):
    head = saved_with_head(tmp_path, lambda embedding: embedding[::-1])
    if shards > 1:
        split_shards(tmp_path, shards)
    config, params, fingerprint = load_directory(tmp_path, jnp.float32)
    assert config == dataclasses.replace(TIED, tie_embeddings=False)
    np.testing.assert_array_equal(params["lm_head"], head.T)
    np.testing.assert_array_equal(params["embedding"], head[::-1])
    assert fingerprint == params_fingerprint(config, params) != params_fingerprint(TIED, random_params(TIED))


@pytest.mark.parametrize("decoder, head", [("language_model.model.", "language_model."), ("model.language_model.", "")])
def test_a_head_that_differs_is_used_in_files_with_images_too(decoder, head, tmp_path):
    gemma = dataclasses.replace(TIED, **GEMMA)
    save_directory(tmp_path, gemma, random_params(gemma))
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": content}))
    file = tmp_path / "model.safetensors"
    tensors = {name.replace("model.", decoder, 1): x for name, x in safetensors.numpy.load_file(file).items()}
    another = np.ascontiguousarray(tensors[f"{decoder}embed_tokens.weight"][::-1])
    safetensors.numpy.save_file(tensors | {f"{head}lm_head.weight": another}, file, metadata={"format": "pt"})
    config, params, _ = load_directory(tmp_path, jnp.float32)
    assert not config.tie_embeddings
    np.testing.assert_array_equal(params["lm_head"], another.T)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_head_that_is_the_embedding_stays_tied(dtype, tmp_path):
    saved_with_head(tmp_path, lambda embedding: embedding.astype(dtype))
    config, params, fingerprint = load_directory(tmp_path, jnp.float32)
    assert config == TIED and "embedding" not in params
    assert fingerprint == params_fingerprint(TIED, random_params(TIED))


@pytest.mark.slow
@pytest.mark.parametrize("change", [lambda x: x[::-1], lambda x: x], ids=["another", "the_same"])
def test_a_second_head_is_what_transformers_makes_of_it(change, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    saved_with_head(tmp_path, change)
    tokens = random_tokens((1, 24))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").float()
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    config, params, _ = load_directory(tmp_path, jnp.float32)
    np.testing.assert_allclose(plain(Base(params, Decoder(config)), tokens), expected, atol=1e-4)


def test_written_files_may_be_read_alike(tmp_path):
    saved(tmp_path)
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1
