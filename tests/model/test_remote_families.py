"""Families whose checkpoints came with code of their own: our logits against the reference of tests/helpers."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxspec.drafters.drafter import autoregressive
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate
from jaxspec.methods import PPD, Medusa, PromptLookup
from jaxspec.weights.families import hf_config, parse_config
from jaxspec.weights.hf import load_directory, save_directory
from jaxspec.weights.model import Model
from tests.helpers.marks import slow_ones
from tests.helpers.methods import union
from tests.helpers.model import logits_of, random_tokens
from tests.helpers.remote_families import CONFIGS, LENGTH, V, greedy, logits, write

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
    assert np.abs(logits_of(config, params, TOKENS) - expected).max() < TOLERANCE


@pytest.mark.parametrize("family", slow_ones(CONFIGS, ("chatglm", "qwen"), str))
def test_texts_are_those_of_the_reference(family, tmp_path):
    """A method with probes, one with heads and a lookup draft together."""
    tensors, prompt, count = write(tmp_path, family), [7, 3, 11, 3, 11, 60, 5, 2], 32
    model = Model(family, *load_directory(tmp_path, jnp.float32))
    [alone] = generate(autoregressive(model), [prompt], count)
    assert alone.tokens == greedy(family, tensors, prompt, count)
    [drafted] = generate(union([PPD(), Medusa(), PromptLookup()], model, 8), [prompt], count)
    assert drafted.tokens == alone.tokens


@pytest.mark.slow
@pytest.mark.parametrize(("family", "option"), [(family, option) for family in OPTIONS for option in OPTIONS[family]])
def test_every_option_counts(family, option, loaded):
    expected, config, params, _ = loaded(family)
    without = dataclasses.replace(config, **{option: OPTIONS[family][option]})
    assert np.abs(logits_of(without, params, TOKENS) - expected).max() > 100 * TOLERANCE


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


@pytest.mark.parametrize(
    ("family", "key", "value", "message"),
    [
        ("internlm", "rotary", {"base": 10000, "type": "other"}, "rotary: type .other. is not supported"),
        (
            "internlm",
            "rotary",
            {"base": 1, "type": "dynamic"},
            "rotary: base must be a positive number from 1.001 to 1e",
        ),
        (
            "internlm",
            "rotary",
            {"base": 10000, "type": "dynamic", "scaling_factor": 1e300},
            "rotary: scaling_factor must be a positive number from 1 to 1e",
        ),
        ("internlm2", "rope_scaling", {"type": "other"}, "rope scaling 'other' is not supported"),
        ("chatglm", "position_encoding_2d", True, "position_encoding_2d True is not supported for chatglm"),
        ("chatglm", "multi_query_attention", False, "multi_query_attention False is not supported"),
        ("chatglm", "interleaved_qkv", True, "interleaved_qkv True is not supported"),
        ("chatglm", "quantization_bit", 4, "quantization_bit 4 is not supported"),
        ("chatglm", "_name_or_path", "THUDM/chatglm2-6b-32k", "rope_ratio 50 of ChatGLM2 is not supported"),
        ("qwen", "rotary_pct", 0.25, "rotary_pct 0.25 is not supported"),
        ("qwen", "intermediate_size", 49, "intermediate_size must be an even number"),
    ],
)
def test_what_the_files_do_not_decide_is_refused(family, key, value, message):
    with pytest.raises(UserError, match=message):
        parse_config(CONFIGS[family] | {key: value})


@pytest.mark.parametrize("key", ["use_dynamic_ntk", "use_logn_attn"])
def test_the_context_of_qwen_ends_where_its_formula_changes(key):
    """Its code turns by a larger base, or scales queries, beyond `seq_length`."""
    plainly = CONFIGS["qwen"] | {"use_dynamic_ntk": False, "use_logn_attn": False}
    assert parse_config(plainly).max_positions == 4 * LENGTH
    assert parse_config(plainly | {key: True}).max_positions == LENGTH


@pytest.mark.parametrize("family", CONFIGS)
def test_tables_of_names_are_strict(family, tmp_path):
    """A tensor that no name of the family fits, and one that is missing, are refused by name."""
    tensors = write(tmp_path, family)
    last = next(name for name in tensors if "layers.2" in name or "h.2" in name)
    file = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(tensors | {"model.other.weight": np.ones(3, np.float32)}, file)
    with pytest.raises(UserError, match=r"model\.other\.weight"):
        load_directory(tmp_path, jnp.float32)
    safetensors.numpy.save_file({name: x for name, x in tensors.items() if name != last}, file)
    with pytest.raises(UserError, match=re.escape(last.rpartition(".")[0].rpartition(".")[0])):
        load_directory(tmp_path, jnp.float32)
