"""The default model end to end. Slow: run by `make slow`."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxspec import SamplingConfig, autoregressive, generate, load_drafter, load_model
from jaxspec.cli import decode
from jaxspec.drafters.published.writing import write_published
from jaxspec.generation.divergence import NEAR_TIE, first_divergence
from jaxspec.training.examples import read_prompts

TOKENS = 40
ADAPTERS = Path(__file__).parents[1] / "adapters"
PUBLISHED = ADAPTERS / "published"
SHIPPED = sorted(file.parent.name.split("-")[0] for file in ADAPTERS.glob("*-smollm2-135m/adapter.json"))

pytestmark = [pytest.mark.slow, pytest.mark.optimized]


@pytest.fixture(scope="module")
def model():
    return load_model()


@pytest.fixture(scope="module")
def prompts(model):
    """Six whose buffers have one size, which saves compiling for others."""
    found = [prompt for prompt in read_prompts("") if len(model.encode(prompt)) <= 64]
    assert len(found) >= 6
    return found[:6]


@pytest.fixture(scope="module")
def plain(model, prompts):
    """Autoregressive answers of a base, made once for all methods that share it."""
    known = {}

    def answers(base, sampling):
        key = (base.fingerprint, sampling)
        if key not in known:
            known[key] = generate(autoregressive(base), prompts, TOKENS, sampling=sampling, seed=7)
        return known[key]

    return answers


def test_the_embedded_model_answers_a_question_and_stops(model):
    [answer] = generate(autoregressive(model), ["What is the capital of France?"], 30)
    assert "Paris" in answer.text and answer.tokens[-1] in model.eos


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        *((name, SamplingConfig()) for name in SHIPPED),
        ("hydra", SamplingConfig(0.8)),
        pytest.param("draft_model", SamplingConfig(0.8), marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: value if isinstance(value, str) else "sampling" if value.temperature else "greedy",
)
def test_adapters_that_ship_are_lossless_and_draft_well(model, prompts, plain, name, sampling):
    """Differences are allowed where two tokens tie to within rounding, and nowhere else."""
    drafter = load_drafter(name, model, tree="own")
    base = drafter.model
    ours = generate(drafter, prompts, TOKENS, sampling=sampling, seed=7)
    for prompt, a, b in zip(prompts, ours, plain(base, sampling), strict=True):
        divergence = first_divergence(base, model.encode(prompt), a.tokens, b.tokens, sampling, 7)
        assert divergence is None or divergence.gap < NEAR_TIE
    assert np.mean([a.tokens_per_step for a in ours]) > 1.15


@pytest.mark.parametrize(
    ("name", "form"), [("eagle", "speculators"), pytest.param("dflash", "dflash", marks=pytest.mark.exhaustive)]
)
def test_adapters_for_other_software_are_written_and_read(model, prompts, plain, tmp_path, name, form):
    """In 16 bits: some candidates change their places, no text does."""
    adapter = load_drafter(name, model, PUBLISHED / name, tree="medusa:8").source.adapter
    write_published(tmp_path / name, adapter, model, form)
    answers = [
        generate(load_drafter(name, model, folder, tree="medusa:8"), prompts, TOKENS, seed=7)
        for folder in (PUBLISHED / name, tmp_path / name)
    ]
    expected = [answer.tokens for answer in plain(model, SamplingConfig())]
    steps = [sum(answer.steps for answer in ours) for ours in answers]
    assert all([answer.tokens for answer in ours] == expected for ours in answers)
    assert steps[0] < 0.9 * sum(map(len, expected)) and abs(steps[1] - steps[0]) < 0.05 * steps[0]


def test_a_tree_of_many_rows_is_lossless(model, prompts, plain):
    """Its passes multiply plain kernels, those of autoregressive decoding kernels in blocks."""
    drafter = load_drafter("hidden_transfer", model, tree="sparse:16")
    ours = generate(drafter, prompts, TOKENS, seed=7)
    for prompt, a, b in zip(prompts, ours, plain(model, SamplingConfig()), strict=True):
        divergence = first_divergence(model, model.encode(prompt), a.tokens, b.tokens, SamplingConfig(), 7)
        assert divergence is None or divergence.gap < NEAR_TIE


def test_decode_prints_one_json_object(capsys):
    decode.main(["--method", "ppd", "--prompt", "Write a haiku.", "--max-new-tokens", "32", "--compare", "--json"])
    row = json.loads(capsys.readouterr().out)
    assert row["identical_to_autoregressive"] and row["tokens_per_step"] >= 1 and row["new_tokens"] <= 32


def test_the_chat_template_and_the_tokenizer_round_trip(model):
    text = "Numbers 12345, accents éü, code: x = {'a': [1, 2]}\n\ttabs 🙂"
    assert model.decode(model.tokenizer.encode(text)) == text
    ids = model.encode("hello")
    assert model.tokenizer.decode(ids).endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    assert ids.count(2) == 2  # <|im_end|> is one token
