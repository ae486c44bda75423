"""Measured accuracies and races, on a tiny model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.decoding.method import Facts, Method
from jaxspec.drafters import load_drafter
from jaxspec.drafters.adapter import Adapter, save_adapter
from jaxspec.drafters.choices import save_choice
from jaxspec.drafters.drafter import autoregressive, make_drafter
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate_many
from jaxspec.methods import PPD, Medusa
from jaxspec.model.rows import read_layers
from jaxspec.training.data import AnsweredPrompt
from jaxspec.training.evaluate import evaluate
from jaxspec.trees import chain
from jaxspec.tuning.latency import measure_latency
from jaxspec.tuning.race import race
from jaxspec.tuning.tune import TuneConfig, own_answers, tune
from tests.helpers.tiny import make_prompts, make_text_model


@dataclasses.dataclass(frozen=True)
class Oracle(Method):
    """Predicts what the base itself will say: its candidates can only be wrong if the noise is."""

    def facts(self, config):
        return Facts(3)

    def predictions(self, trainable, base, batch):
        B, T = batch.tokens.shape
        hidden, _, _ = read_layers(base, batch.tokens, ())
        source = jnp.minimum(batch.points[..., None] + np.arange(1, 4), T - 1)
        return base.logits(hidden[jnp.arange(B)[:, None, None], source])


@pytest.mark.parametrize(
    ("prompts", "message"), [(["one", " "], "prompt 2 is empty"), (["a " * 400], "exceeds the base's context of 256")]
)
def test_prompts_that_do_not_fit_are_refused(prompts, message):
    with pytest.raises(UserError, match=message):
        own_answers(make_text_model(num_layers=1), prompts, SamplingConfig(), 8)


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(SamplingConfig(), id="greedy", marks=pytest.mark.slow),
        pytest.param(SamplingConfig(1.2, top_k=6), id="sampling"),
    ],
)
def test_candidates_are_ranked_with_the_noise_that_draws_the_text(tiny, sampling):
    prompts = make_prompts(6)
    made = generate_many(autoregressive(tiny), prompts, 20, sampling=sampling, seed=3)
    answers = [AnsweredPrompt(prompts[index], tokens) for index, tokens in made]
    accuracy = evaluate(Oracle(), {}, tiny.base, answers, sampling=sampling, seed=3)
    assert accuracy.positions > 20
    np.testing.assert_allclose(accuracy.by_rank[:, 0], 1.0)
    if sampling.temperature:
        assert evaluate(Oracle(), {}, tiny.base, answers, sampling=sampling, seed=4).by_rank[0, 0] < 0.9


def adapter_of(method, model, frequent, **info):
    """As training begins with it."""
    trainable = method.init(jax.random.key(0), model.base)
    return Adapter(method, trainable, model.fingerprint, {"tree": [[0]]} | info, frequent)


@pytest.mark.slow
def test_latency_covers_the_sizes_and_a_race_is_lossless(capsys):
    model = make_text_model()
    adapter = adapter_of(PPD(ensemble=2), model, np.arange(model.config.vocab_size, dtype=np.int32))
    drafter = make_drafter(adapter, model, chain(2), 0)
    latency = measure_latency(drafter, 20, 2, 64, 6, rounds=2)
    assert latency.rows == (1, 6) and min(latency.seconds) > 0
    prompts = ["one", "two", "three", "four"]
    plain, trial = race(model, {"a chain": drafter}, prompts, 12, SamplingConfig(1.0), batch_size=2)
    assert (plain.name, trial.name) == ("autoregressive", "a chain")
    assert plain.identical == trial.identical == 4
    assert plain.tokens_per_step == plain.speedup == 1.0 <= trial.tokens_per_step
    assert "racing: 4/4 runs" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("equal_layouts")
def test_heads_are_tuned_with_what_depth_costs_and_with_draft_vocabularies(tmp_path):
    """Every tree is tried with every vocabulary; the choice remembers its own."""
    model = make_text_model()
    frequent = np.random.default_rng(0).permutation(model.config.vocab_size).astype(np.int32)
    accuracy = [[0.4, 0.2], [0.3, 0.1], [0.2, 0.1]]
    adapter = adapter_of(Medusa(heads=3), model, frequent, accuracy=accuracy, draft_vocabulary=40)
    drafter = make_drafter(adapter, model)
    config = TuneConfig(
        cache_length=64, max_new_tokens=8, num_prompts=2, max_rows=4, finalists=1, also=("chain:2",),
        draft_vocabularies=(0, 30),
    )  # fmt: skip
    tuning = tune(drafter, ["one", "two", "three"], config)
    assert len(tuning.latency.drafting) == 3 and tuning.latency.drafting[0] == 0
    names = [trial.name for trial in tuning.trials]
    assert len(names) == 5 and {"chain:2", "chain:2, 30 tokens"} <= set(names)
    assert all(trial.identical == 2 for trial in tuning.trials)
    choice = dataclasses.replace(tuning.choice, draft_vocabulary=30, tree=chain(2), name="chain:2, 30 tokens")
    save_adapter(tmp_path, adapter)
    save_choice(tmp_path, "medusa", choice)
    tuned = load_drafter("medusa", model, tmp_path, tree="auto")
    [source] = tuned.on_device.sources
    assert source.draft_vocabulary.ids.tolist() == frequent[:30].tolist() and "30 tokens" in tuned.note
    with pytest.raises(UserError, match="at most"):
        tune(drafter, ["one"] * 3, dataclasses.replace(config, draft_vocabularies=(10**6,)))
    default = dataclasses.replace(config, draft_vocabularies=(), also=())
    assert [t.name.endswith(", 40 tokens") for t in tune(drafter, ["one"] * 3, default).trials] == [False, True]
