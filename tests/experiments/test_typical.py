"""Typical acceptance beside the base's own draw, on a tiny model."""

import json

import numpy as np
import pytest

from experiments import typical
from experiments.typical import FIGURES, Options, draw, measure, measure_all, report
from jaxspec.config import SamplingConfig
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate
from jaxspec.methods import PPD
from jaxspec.trees import from_paths
from tests.helpers.methods import untrained_drafter
from tests.helpers.model import log_probabilities
from tests.helpers.tiny import make_text_model

PROMPTS, TOKENS = ["a longer question", "another", "third"], 12


@pytest.fixture(scope="module")
def drafter():
    return untrained_drafter(PPD(), make_text_model(num_layers=1), from_paths([(0,), (1,), (0, 0)]))


@pytest.fixture
def same(monkeypatch):
    """A text has all or nothing in common with another: random ones are made of no words."""
    monkeypatch.setattr(typical, "rouge", lambda answer, other: {"ROUGE-L": float(answer == other)})


def values(figures):
    return {name: figures[name]["value"] for name in FIGURES if name != "speedup"}


@pytest.mark.slow
def test_greedy_texts_are_one_whatever_the_rule(drafter, same):
    found = measure(drafter, PROMPTS, 0.0, TOKENS, 2)
    assert values(found["match"]) == values(found["typical"])
    assert [figures["identical"] for figures in found.values()] == [3, 3]
    assert found["match"]["rouge_l"]["value"] == 1


@pytest.mark.slow
def test_figures_are_those_of_the_texts(drafter, same):
    model, sampling = drafter.model, SamplingConfig(0.7)
    found = measure(drafter, PROMPTS, 0.7, TOKENS, 2)
    for name, rule in typical.RULES.items():
        said = generate(drafter, PROMPTS, TOKENS, sampling=sampling, acceptance=rule)
        likely = np.concatenate([likelihoods(model, model.encode(a.prompt), a.tokens) for a in said])
        assert found[name]["log_likelihood"]["value"] == pytest.approx(likely.mean(), rel=1e-4)
        made, steps = sum(a.new_tokens - 1 for a in said), sum(a.steps for a in said)
        assert found[name]["tokens_per_step"]["value"] == pytest.approx(made / steps)
    assert found["match"]["identical"] == 3 and found["match"]["rouge_l"]["value"] == 0  # other seeds, other texts


def likelihoods(model, prompt, answer):
    """[n], log-probabilities of the tokens of an answer at temperature 1."""
    return log_probabilities(model, prompt + answer)[len(prompt) - 1 :][np.arange(len(answer)), answer]


def test_the_same_command_continues_and_another_is_refused(tmp_path, monkeypatch):
    figure = {"value": 1.5, "low": None, "high": None}
    measured = []

    def fake(drafter, prompts, temperature, tokens, samples):
        measured.append(temperature)
        return {rule: dict.fromkeys(FIGURES, figure) | {"identical": 0} for rule in typical.RULES}

    monkeypatch.setattr(typical, "measure", fake)
    file = tmp_path / "typical.json"
    measure_all(Options("a/q.jsonl", temperatures=(0.8,)), None, PROMPTS, file)
    found = measure_all(Options("b/q.jsonl", temperatures=(0.0, 0.8, 1.0)), None, PROMPTS, file)
    assert measured == [0.8, 0.0, 1.0] and list(found) == ["0.0", "0.8", "1.0"]
    assert "a/" not in file.read_text() and set(json.loads(file.read_text())["temperatures"]) == set(found)
    with pytest.raises(UserError, match="another --output"):
        measure_all(Options("a/q.jsonl", tokens=64), None, PROMPTS, file)
    assert "| 0.8 | `typical` | 1.50 | 1.50 | 1.50 | 1.50 | 0 |" in report(found)
    draw(found, tmp_path / "typical.png")
    assert (tmp_path / "typical.png").stat().st_size > 1000
