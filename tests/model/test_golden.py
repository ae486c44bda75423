"""Our logits against those of transformers, for every family of the decoder."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.model.base import Base
from jaxspec.model.decoder import Decoder
from jaxspec.weights.hf import load_directory, save_directory
from jaxspec.weights.load import load_model
from tests.helpers.golden import GOLDEN, LENGTH, POSITIONS, hf_logits, live_logits, save_variant
from tests.helpers.model import VARIANTS, plain, random_base, random_tokens

every_variant = pytest.mark.parametrize("variant", VARIANTS)
# what a variant adds; without it the logits must be others, or its golden figures prove nothing
FEATURES = {
    "llama3": {"rope_scaling": None},
    "linear": {"rope_scaling": None},
    "dynamic": {"rope_scaling": None},
    "mistral": {"sliding_window": None},
    "qwen2": {"qkv_bias": False},
    "qwen2_window": {"first_window_layer": 0},
    "qwen3": {"head_norms": False},
}


def golden(variant):
    """Logits [positions, V] from the file."""
    rows = json.loads(GOLDEN.read_text())[variant]
    assert tuple(map(int, rows)) == POSITIONS
    return np.array(list(rows.values()))


def loaded_logits(folder, tokens):
    """Our logits [T, V] of a directory."""
    config, params, _ = load_directory(folder, jnp.float32)
    return np.asarray(plain(Base(params, Decoder(config)), tokens[None])[0])


@every_variant
def test_logits_are_those_of_transformers(variant, tmp_path):
    _, tokens = save_variant(variant, tmp_path)
    logits = loaded_logits(tmp_path, tokens)[list(POSITIONS)]
    np.testing.assert_allclose(logits, golden(variant), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("variant", FEATURES)
def test_golden_logits_depend_on_what_sets_the_variant_apart(variant):
    config = dataclasses.replace(VARIANTS[variant], **FEATURES[variant])
    base = Base(random_base(VARIANTS[variant]).params, Decoder(config))
    logits = plain(base, random_tokens((LENGTH,), seed=7)[None])[0]
    assert np.abs(np.asarray(logits)[list(POSITIONS)] - golden(variant)).max() > 1e-2


@pytest.mark.slow
@every_variant
def test_logits_are_those_of_transformers_live(variant, tmp_path):
    expected = live_logits(variant, tmp_path)
    logits = loaded_logits(tmp_path, random_tokens((LENGTH,), seed=7))
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(expected[list(POSITIONS)], golden(variant), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_short_dynamic_sequences_need_no_cache_to_agree(tmp_path):
    """Within the original context transformers' one pass over the sequence and ours coincide."""
    config, tokens = save_variant("dynamic", tmp_path)
    tokens = tokens[: config.rope_scaling.original_max_positions]
    np.testing.assert_allclose(loaded_logits(tmp_path, tokens), hf_logits(tmp_path, tokens), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.optimized
def test_embedded_model_gives_the_logits_of_transformers(tmp_path):
    """The GGUF weights, written as safetensors and read by transformers."""
    model = load_model(dtype="float32")
    tokens = np.array(model.encode("Why is the sky blue?"), np.int32)
    save_directory(tmp_path, model.config, model.params, model.eos)
    expected = hf_logits(tmp_path, tokens)
    logits = np.asarray(plain(Base(model.params, model.decoder), tokens[None])[0])
    assert (logits.argmax(axis=-1) == expected.argmax(axis=-1)).all()
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
