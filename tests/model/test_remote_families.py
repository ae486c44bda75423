"""Families whose checkpoints came with code of their own: our logits against the reference of tests/helpers."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.model.base import Base
from jaxspec.model.decoder import Decoder
from jaxspec.weights.families import hf_config
from jaxspec.weights.hf import load_directory, save_directory
from tests.helpers.model import plain, random_tokens
from tests.helpers.remote_families import CONFIGS, LENGTH, V, logits, write

TOKENS = random_tokens((LENGTH,), seed=7, vocab_size=V)
TOLERANCE = 1e-4
# with the value of plain LLaMA instead, the logits must be others, or the figures prove nothing
OPTIONS = {
    "internlm": {"rope_scaling": None, "qkv_bias": False, "o_bias": False},
    "internlm2": {"rope_scaling": None, "rope_theta": 1e4},
    "chatglm": {"rotary_dim": None, "rope_theta": 1e4, "qkv_bias": False},
    "qwen": {"qkv_bias": False},
}
WRITTEN = {"internlm": "llama", "internlm2": "llama", "chatglm": "glm", "qwen": "qwen2"}


def logits_of(config, params):
    return np.asarray(plain(Base(params, Decoder(config)), TOKENS[None])[0])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """By family: the reference's logits, our config, parameters and fingerprint."""
    made = {}

    def load(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            expected = logits(family, write(folder, family), TOKENS)
            made[family] = (expected, *load_directory(folder, jnp.float32))
        return made[family]

    return load


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_those_of_the_reference(family, loaded):
    expected, config, params, _ = loaded(family)
    assert np.ptp(expected, axis=-1).mean() > 10
    assert np.abs(logits_of(config, params) - expected).max() < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("family", "option"), [(family, option) for family in OPTIONS for option in OPTIONS[family]])
def test_every_option_counts(family, option, loaded):
    expected, config, params, _ = loaded(family)
    without = dataclasses.replace(config, **{option: OPTIONS[family][option]})
    assert np.abs(logits_of(without, params) - expected).max() > 100 * TOLERANCE


@pytest.mark.parametrize("family", CONFIGS)
def test_export_has_a_form_that_transformers_knows(family, loaded, tmp_path):
    _, config, params, fingerprint = loaded(family)
    save_directory(tmp_path, config, params)
    assert hf_config(config)["model_type"] == WRITTEN[family]
    again, _, named = load_directory(tmp_path, jnp.float32)
    assert (again, named) == (config, fingerprint)


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_transformers_computes_the_same_from_an_export(family, loaded, tmp_path):
    """Within the original context: beyond it transformers turns all rows of a pass by its length."""
    pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    from tests.helpers.families import torch_logits

    expected, config, params, _ = loaded(family)
    save_directory(tmp_path, config, params)
    settings = dict(attn_implementation="eager", pad_token_id=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **settings).eval().float()
    length = config.rope_scaling.original_max_positions if config.rope_scaling else LENGTH
    assert np.abs(torch_logits(model, TOKENS[:length]) - expected[:length]).max() < TOLERANCE
