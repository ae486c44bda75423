"""Jobs that decode: they report what differs, and one failure does not take the others along."""

import dataclasses

import jax
import pytest

import experiments.lab.checks as checks
from experiments.lab.checks import check_equality, choose_prompts, race_unions
from jaxspec.errors import UserError
from tests.helpers.tiny import make_text_model

PROMPTS = ["one two one two", "red green red green", "what is it?", "it is what it is", "one, two, three"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A tiny model in the place of the default one, and short prompts."""
    model = make_text_model(num_layers=1)
    monkeypatch.setattr(checks, "default_model", lambda dtype: model)
    monkeypatch.setattr(checks, "read_prompts", lambda source: PROMPTS)
    return model


def test_a_drafter_writes_the_same_text():
    found = check_equality("suffix", "best:4", "float32", 0.0, 0, 12, 2)
    assert found["identical"] == "2 of 2" and found["differences"] == 0
    assert found["rows"] == 4 and found["tokens_per_step"] >= 1
    assert [answer["divergence"] for answer in found["answers"]] == [None, None]
    assert all(answer["steps"] > 0 for answer in found["answers"])


def test_another_text_is_reported_with_its_gap(small, monkeypatch):
    """A drafter whose second answer goes astray at its third token."""
    generate = checks.generate

    def astray(drafter, *arguments, **settings):
        answers = generate(drafter, *arguments, **settings)
        if drafter.name != "suffix":
            return answers
        first, second = answers
        tokens = [*second.tokens[:2], (second.tokens[2] + 1) % 256, *second.tokens[3:]]
        return [first, dataclasses.replace(second, tokens=tokens)]

    monkeypatch.setattr(checks, "generate", astray)
    found = check_equality("suffix", "best:4", "float32", 0.0, 0, 12, 2)
    assert found["identical"] == "1 of 2" and found["differences"] == 1
    same, other = (answer["divergence"] for answer in found["answers"])
    assert same is None and other["index"] == 2 and other["gap"] > 1e-3


def test_sampled_texts_are_compared_under_the_same_noise():
    found = check_equality("suffix", "best:4", "float32", 1.0, 0, 12, 2)
    assert found["identical"] == "2 of 2"


def test_float32_is_compared_at_full_precision(monkeypatch):
    seen, generate = [], checks.generate

    def spy(*arguments, **settings):
        seen.append(jax.config.jax_default_matmul_precision)
        return generate(*arguments, **settings)

    monkeypatch.setattr(checks, "generate", spy)
    with jax.default_matmul_precision("default"):
        check_equality("suffix", "best:4", "float32", 0.0, 0, 4, 1)
    assert seen == ["highest", "highest"]


def test_shipped_prompts_are_joined_until_they_are_long_enough(small):
    long = choose_prompts(small, 60, 4, 2, 3)
    assert len(long) == 2 and long[0] != long[1]
    assert all(60 <= len(prompt) < 60 + 2 * max(map(len, PROMPTS)) for prompt in long)
    found = check_equality("suffix", "best:4", "float32", 0.0, 60, 8, 1)
    assert found["identical"] == "1 of 1" and found["answers"][0]["prompt_tokens"] >= 60


def test_short_prompts_need_one_set_of_programs(small):
    sizes = {len(prompt) for prompt in choose_prompts(small, 0, 4, 9, 3)}
    assert len(sizes) > 1 and max(sizes) <= 32


def test_unions_are_raced_and_failures_named(monkeypatch):
    """Those that cannot be loaded, and those that break while they decode."""
    generate = checks.generate

    def broken(drafter, *arguments, **settings):
        if drafter.name == "prompt_lookup":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return generate(drafter, *arguments, **settings)

    monkeypatch.setattr(checks, "generate", broken)
    found = race_unions(["suffix+token_recycling", "prompt_lookup", "medusa"], "best:4", "float32", 2, 8)["drafters"]
    assert found["suffix+token_recycling"]["identical"] == found["autoregressive"]["identical"] == "2 of 2"
    assert found["autoregressive"]["speedup"] == 1 and found["suffix+token_recycling"]["rows"] == 4
    assert "Out of memory" in found["prompt_lookup"]["error"] and "adapter" in found["medusa"]["error"]


def test_an_unknown_drafter_is_an_error():
    with pytest.raises(UserError, match="unknown method"):
        check_equality("sufix", None, "float32", 0.0, 0, 4, 1)
