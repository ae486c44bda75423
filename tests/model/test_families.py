"""Our logits against those of transformers on tiny random models, for every family that is not in test_golden.py."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.weights.hf import load_directory, save_directory
from tests.helpers.families import FAMILIES, LENGTH, save_torch, torch_logits
from tests.helpers.model import logits_of, random_tokens

pytest.importorskip("torch")
pytestmark = pytest.mark.slow
TOKENS = random_tokens((LENGTH,), seed=7, vocab_size=64)
TOLERANCE = 1e-4
# what sets a family apart; with the value of LLaMA instead the logits must be others, or the figures prove nothing
OPTIONS = {
    "llama_biases": {"qkv_bias": False, "o_bias": False, "mlp_bias": False},
    "llama_yarn": {"rope_scaling": None},
    "qwen2_layers": {"full_layers": (), "sliding_window": None},
    "qwen3_layers": {"full_layers": (), "sliding_window": None, "head_norms": False},
    "gemma2": {
        "score_cap": None,
        "logit_cap": None,
        "score_scale": None,
        "embedding_scale": 1.0,
        "activation": "silu",
        "full_layers": (),
        "norms": "before",
    },
    "gemma3": {"local_rope_theta": None, "rope_theta": 1e4, "head_norms": False, "sliding_window": None},
    "gemma3_linear": {"rope_scaling": None},
    "phi3": {"sliding_window": None},
    "phi4_longrope": {"rope_scaling": None},
    "glm": {"rotary_dim": None, "qkv_bias": False},
    "olmo2": {"joint_norms": False},
    "granite": {"embedding_scale": 1.0, "residual_scale": 1.0, "score_scale": None, "logit_scale": 1.0},
    "falcon_7b": {"activation": "silu", "shared_norm": False, "parallel": False},
    "falcon_40b": {"parallel": False},
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """By name: folder, transformers' logits, our config, parameters and fingerprint."""
    made = {}

    def load(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            expected = torch_logits(save_torch(name, folder), TOKENS)
            made[name] = (folder, expected, *load_directory(folder, jnp.float32))
        return made[name]

    return load


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name, loaded):
    _, expected, config, params, _ = loaded(name)
    assert np.ptp(expected, axis=-1).mean() > 10
    assert np.abs(logits_of(config, params, TOKENS) - expected).max() < TOLERANCE


@pytest.mark.parametrize(("name", "option"), [(name, option) for name in OPTIONS for option in OPTIONS[name]])
def test_every_option_counts(name, option, loaded):
    _, expected, config, params, _ = loaded(name)
    without = dataclasses.replace(config, **{option: OPTIONS[name][option]})
    if option == "shared_norm":
        layers = {
            key: value | {"mlp_norm": {"scale": jnp.ones(32), "bias": jnp.zeros(32)}}
            for key, value in params.items()
            if key.startswith("layers")
        }
        params = params | layers
    assert np.abs(logits_of(without, params, TOKENS) - expected).max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_export_is_read_again_and_by_transformers(name, loaded, tmp_path):
    _, expected, config, params, fingerprint = loaded(name)
    save_directory(tmp_path, config, params)
    again, same, named = load_directory(tmp_path, jnp.float32)
    assert (again, named) == (config, fingerprint)
    np.testing.assert_allclose(logits_of(again, same, TOKENS), logits_of(config, params, TOKENS), atol=1e-5)
    from transformers import AutoModelForCausalLM

    settings = dict(attn_implementation="eager", pad_token_id=0)  # Phi's default is beyond this vocabulary
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **settings).eval().float()
    assert np.abs(torch_logits(model, TOKENS) - expected).max() < TOLERANCE


def test_the_next_token_module_of_mimo_is_left_aside(tmp_path):
    """MiMo is Qwen 2 with more: the tensors of the module that predicts further tokens belong to no layer."""
    import safetensors.numpy

    expected = torch_logits(save_torch("qwen2_layers", tmp_path), TOKENS)
    file, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "mimo", "num_nextn_predict_layers": 1}))
    more = {"model.mtp_layers.0.input_proj.weight": np.ones((32, 64), np.float32)}
    safetensors.numpy.save_file(safetensors.numpy.load_file(weights) | more, weights)
    config, params, _ = load_directory(tmp_path, jnp.float32)
    assert np.abs(logits_of(config, params, TOKENS) - expected).max() < TOLERANCE
