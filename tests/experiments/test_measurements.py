"""What is measured of adapters, on tiny models and by hand. Slow: experiments are no part of the package."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import measurements
from experiments.early_exit import EarlyExit
from experiments.measurements import (
    load_drafters,
    measure_acceptance,
    measure_coverage,
    measure_similarity,
    measure_speeds,
    measure_steps,
)
from experiments.studies import SpeedRow
from jaxspec.decoding.acceptance import Rejection
from jaxspec.decoding.method import Batch
from jaxspec.drafters.adapter import Adapter, save_adapter
from jaxspec.drafters.drafter import make_drafter
from jaxspec.methods import PPD, SPACE, HiddenTransfer
from jaxspec.model.attention import causal_context
from jaxspec.training.data import AnsweredPrompt
from jaxspec.trees import chain
from jaxspec.versions import code_version
from tests.helpers.methods import trained as perturbed
from tests.helpers.tiny import make_prompts

pytestmark = pytest.mark.slow

PROMPTS = ["question 1", "another"]


@pytest.fixture(scope="module")
def drafter(model):
    adapter = Adapter(PPD(), PPD().init(jax.random.key(0), model.base), model.fingerprint, {})
    return make_drafter(adapter, model, "chain:2")


def test_speeds_say_what_each_tree_costs_and_brings(model, tmp_path):
    weights = PPD().init(jax.random.key(0), model.base)
    save_adapter(tmp_path, Adapter(PPD(), weights, model.fingerprint, {"accuracy": [[0.1] * 10] * 3, "tree": [[0]]}))
    entries = {tree: SpeedRow(("a study", "a row"), tree) for tree in ("straightforward:3", "efficient:2")}
    drafters = load_drafters(entries, model, lambda study, label: tmp_path)
    figures = measure_speeds(drafters, PROMPTS, 12)
    assert [row["rows"] for row in figures.values()] == [1, 4 + 3, 7 + 21]
    assert all(row["identical"] == 2 and row["tokens_per_step"] >= 1 for row in figures.values())
    assert {row["code"] for row in figures.values()} == {code_version()}


def test_a_method_with_a_base_of_its_own_races_that(model, tmp_path):
    method = SPACE(distances=2, rank=2)
    weights = jax.tree.map(lambda x: x + 0.1, method.init(jax.random.key(0), model.base))
    save_adapter(tmp_path, Adapter(method, weights, model.fingerprint, {"tree": [[0]]}))
    entries = {str(m): SpeedRow(("a study", "a row"), chain(m)) for m in (1, 2)}
    figures = measure_speeds(load_drafters(entries, model, lambda study, label: tmp_path), PROMPTS, 12)
    assert [row["rows"] for row in figures.values()] == [1, 4, 9]
    assert all(row["identical"] == 2 for row in figures.values())


def test_steps_are_timed_by_method_and_rows(tiny, monkeypatch):
    monkeypatch.setattr(measurements, "TIMED", {"PPD": PPD(), "late": HiddenTransfer(layers=(1, 1, 2))})
    times = measure_steps(tiny, cache_length=64, rounds=2, nodes=(2,))
    assert list(times) == ["PPD", "late"] and all(seconds["8"] > 0 for seconds in times.values())


def test_coverage_by_hand():
    answers = [AnsweredPrompt([0], [19_999, 18_976, 18_975]), AnsweredPrompt([7], [19_999])]
    found = measure_coverage(np.arange(20_000)[::-1], answers)
    assert list(found) == ["1024", "2048", "4096", "8192", "16384"]
    assert found["1024"] == 0.75 and found["2048"] == 1


def test_every_lossless_rule_is_measured(drafter, monkeypatch):
    monkeypatch.setattr(measurements, "TEMPERATURES", (0.7,))
    rules = measure_acceptance("a chain", drafter, PROMPTS, 8)
    assert set(rules) == {"match", "rejection", "block"}
    assert all(cell["tokens_per_step"] > 1 and 0 < cell["accepted"] < 1 for [cell] in rules.values())


def test_rules_are_compared_in_pairs(drafter, monkeypatch):
    """By hand, for a rule that needs half the steps on every prompt."""
    asked = []

    def generate(drafter, prompts, max_new_tokens, *, acceptance, seed, **settings):
        asked.append((seed, len(prompts)))
        steps = (1 if type(acceptance) is Rejection else 2) * (seed + 1)
        return [SimpleNamespace(new_tokens=5, steps=steps, accepted=[1, 0], offered=[3, 1])] * len(prompts)

    monkeypatch.setattr(measurements, "generate", generate)
    found = measure_acceptance("", drafter, ["a prompt"] * 22, 8)
    assert asked == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4), (5, 2)] * (4 * 3)
    match, rejection = found["match"][0], found["rejection"][0]
    steps = 4 * (1 + 2 + 3 + 4 + 5) + 2 * 6
    assert match == {"prompts": 22, "tokens_per_step": pytest.approx(88 / (2 * steps)), "accepted": 0.25}
    assert rejection["tokens_per_step"] == pytest.approx(88 / steps)
    assert rejection["against_match"] == pytest.approx({"value": 2, "low": 2, "high": 2})
    assert found["block"][0]["against_match"]["value"] == pytest.approx(1)


def test_early_exit_reads_a_layer_through_a_projection_of_its_own(tiny):
    base, method = tiny.base, EarlyExit((1, 2))
    tokens, trainable = jnp.array(make_prompts(3)[-1:]), perturbed(method, base)
    length = tokens.shape[1]
    batch = Batch(tokens, jnp.array([length]), jnp.ones(1, jnp.int32), jnp.array([[4, 7]]))
    logits = jax.jit(method.predictions)(trainable, base, batch)
    assert jax.jit(method.loss)(trainable, base, batch)[0] > 0
    for d, layer in enumerate(method.layers):
        hidden, _ = base.rows(base.embed(tokens), causal_context(1, length), layers=(0, layer))
        wanted = base.normed(hidden)[0, jnp.array([4, 7])] @ trainable[f"head{d + 1}"]
        np.testing.assert_allclose(logits[0, :, d], wanted, rtol=1e-3, atol=1e-3)


def test_similarity_by_hand(tiny):
    """Figure 4: the second step's state against the real one of the token two further, layer by layer."""
    base, method, tokens, p = tiny.base, HiddenTransfer(distances=2, layers=(0, 1)), [3, 9, 2, 14, 7, 7, 1, 12, 4], 6
    weights = perturbed(method, base)
    adapter = Adapter(method, weights, tiny.fingerprint, {})
    curves = measure_similarity(
        adapter, base, [AnsweredPrompt(tokens[:6], tokens[6:])]
    )  # p is the only insertion point
    assert [list(curve) for curve in curves.values()] == [["1", "2", "3"], ["2", "3"]]

    def through(x, first, last):
        return base.rows(x, causal_context(1, x.shape[1]), layers=(first, last))[0]

    text = base.embed(jnp.array([tokens]))
    x = through(jnp.concatenate([text[:, : p + 1], text[:, p : p + 1] @ weights["step1"]], axis=1), 0, 1)
    x = jnp.concatenate([x, x[:, p : p + 1] @ weights["step2"]], axis=1)
    for last in (2, 3):
        x = through(x, last - 1, last)
        a, b = np.asarray(x[0, p + 2]), np.asarray(through(text, 0, last)[0, p + 2])
        assert curves["step 2"][str(last)] == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), abs=1e-4)
