"""Accuracies of sampled text, races, and whole tunings, on a tiny model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.decoding.method import Facts, Method
from jaxspec.decoding.sampling import make_sampler
from jaxspec.drafters import choice_folder, choose_tree, load_drafter
from jaxspec.drafters.adapter import Adapter, save_adapter
from jaxspec.drafters.choices import TunedChoice, Use, as_chosen, choice_name, save_choice
from jaxspec.drafters.drafter import Drafter, autoregressive, make_drafter
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate_many
from jaxspec.machine import this_machine
from jaxspec.methods import PPD, Hydra, Medusa, Suffix
from jaxspec.model.rows import read_layers
from jaxspec.training.data import AnsweredPrompt
from jaxspec.training.evaluate import evaluate
from jaxspec.trees import chain
from jaxspec.tuning.race import race
from jaxspec.tuning.tune import TuneConfig, own_answers, tune
from tests.helpers.methods import source, union
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
def test_a_race_is_lossless(capsys):
    model = make_text_model(num_layers=1)
    adapter = adapter_of(PPD(ensemble=2), model, np.arange(model.config.vocab_size, dtype=np.int32))
    drafter = make_drafter(adapter, model, chain(2), 0)
    prompts = ["one", "two", "three", "four"]
    plain, trial = race(model, {"a chain": drafter}, prompts, 12, SamplingConfig(1.0), batch_size=2)
    assert (plain.name, trial.name) == ("autoregressive", "a chain")
    assert plain.identical == trial.identical == 4
    assert plain.tokens_per_step == plain.speedup == 1.0 <= trial.tokens_per_step
    assert "racing: 4/4 runs" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("equal_layouts")
def test_heads_are_tuned_with_draft_vocabularies(tmp_path):
    """A tree of one's own is tried with every vocabulary; the choice remembers its own."""
    model = make_text_model(num_layers=1)
    frequent = np.random.default_rng(0).permutation(model.config.vocab_size).astype(np.int32)
    accuracy = [[0.4, 0.2], [0.3, 0.1], [0.2, 0.1]]
    adapter = adapter_of(Medusa(heads=3), model, frequent, accuracy=accuracy, draft_vocabulary=40)
    drafter = make_drafter(adapter, model)
    config = TuneConfig(
        cache_length=64, max_new_tokens=8, num_prompts=2, accuracy_prompts=1, max_rows=4, finalists=2,
        also=("chain:2",), draft_vocabularies=(0, 30),
    )  # fmt: skip
    tuning = tune(drafter, ["one", "two", "three"], config)
    drafting = tuning.choice.info["drafting_milliseconds"]
    assert drafting.keys() == {"medusa", "medusa, 30 tokens"} and drafting["medusa"].keys() == {0, 1, 3}
    names = [trial.name for trial in tuning.trials]
    assert 3 <= len(names) <= 5 and {"medusa chain:2", "medusa chain:2, 30 tokens"} <= set(names)
    kinds = {option.kind for option in tuning.options}
    assert {"medusa chain", "medusa sparse", "medusa best", "medusa best of several sizes, 30 tokens"} <= kinds
    assert all(trial.identical == 2 for trial in tuning.trials)
    choice = dataclasses.replace(tuning.choice, draft_vocabulary=30, tree=chain(2), name="chain:2, 30 tokens")
    save_adapter(tmp_path, adapter)
    save_choice(tmp_path, "medusa", choice)
    tuned = load_drafter("medusa", model, tmp_path, tree="auto", temperature=0.0)
    [source] = tuned.on_device.sources
    assert source.draft_vocabulary.ids.tolist() == frequent[:30].tolist() and "30 tokens" in tuned.note
    with pytest.raises(UserError, match="at most"):
        tune(drafter, ["one"] * 3, dataclasses.replace(config, draft_vocabularies=(10**6,)))
    default = dataclasses.replace(config, draft_vocabularies=(), also=())
    assert [t.name.endswith(", 40 tokens") for t in tune(drafter, ["one"] * 3, default).trials] == [False, True, True]


def text_union(model, *methods):
    """A union on a model with text, with adapters that know which tokens are frequent."""
    frequent = np.arange(model.config.vocab_size, dtype=np.int32)
    sources = []
    for each in (source(method, model) for method in methods):
        if each.adapter:
            each = dataclasses.replace(each, adapter=dataclasses.replace(each.adapter, frequent_tokens=frequent))
        sources.append(each)
    return Drafter(tuple(sources), model, None).with_tree(None)


@pytest.mark.slow
@pytest.mark.usefixtures("equal_layouts")
def test_a_union_is_tuned_with_a_draft_vocabulary_and_a_budget_of_ones_own():
    config = TuneConfig(
        cache_length=64, max_new_tokens=8, num_prompts=2, accuracy_prompts=2, max_rows=4, finalists=2,
        also=("best:4",), draft_vocabularies=(20,), temperature=0.7,
    )  # fmt: skip
    drafter = text_union(make_text_model(num_layers=1), Medusa(heads=3), Suffix(length=4))
    tuning = tune(drafter, ["one", "two", "three", "four"], config)
    names = [trial.name for trial in tuning.trials]
    assert names[0] == "autoregressive" and "medusa+suffix best:4, 20 tokens" in names and len(names) <= 4
    assert all(trial.identical == 2 for trial in tuning.trials)
    tried = [option.drafter for option in tuning.options if option.name == "medusa+suffix best:4, 20 tokens"]
    assert all(list(source.calibration) == ["0.7"] for drafter in tried for source in drafter.sources)


GREEDY = Use(temperature=0.0)


def test_what_was_chosen_is_what_decodes(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    drafter, table = text_union(make_text_model(num_layers=1), Medusa(heads=3), Suffix(length=4)), [[1.0, -0.5]] * 3
    assert choose_tree(drafter, GREEDY).shape.sizes
    folder = choice_folder(drafter)
    folder.mkdir(parents=True)
    circumstances = (this_machine(), "float32", drafter.digest, 1, 64, 0.0)
    choice = TunedChoice(*circumstances, "best:3", "medusa best:3", {}, 20, ["medusa"], {"medusa": table})
    save_choice(folder, choice_name(drafter), choice)
    chosen = choose_tree(dataclasses.replace(drafter, sources=drafter.sources[::-1]), GREEDY)  # in whatever order
    assert (chosen.name, chosen.shape.spec, chosen.sources[0].draft_vocabulary) == ("medusa", "best:3", 20)
    np.testing.assert_allclose(chosen.sources[0].calibrations().tables, [table])
    assert "tuned for this machine: medusa best:3" in chosen.note
    assert choose_tree(drafter, Use(temperature=0.8)).shape.sizes  # tuned for greedy decoding alone
    save_choice(folder, choice_name(drafter), dataclasses.replace(choice, tree=None))
    assert choose_tree(drafter, GREEDY).name == "autoregressive"
    save_choice(folder, choice_name(drafter), dataclasses.replace(choice, calibration={"medusa": [[1.0]]}))
    with pytest.raises(UserError, match=r"medusa: calibration must hold .*; run `jaxspec tune` again"):
        choose_tree(drafter, GREEDY)


def test_a_choice_calibrates_for_its_temperature():
    """In place of what lies between the values of the drafter's own, which stay."""
    drafter, table = text_union(make_text_model(num_layers=1), Medusa(heads=3)), [[2.0, -0.5]] * 3
    own = {"0": [[1.0, 0.0]] * 3, "0.5": [[3.0, 0.0]] * 3, "0.8": [[4.0, 0.0]] * 3}
    drafter.source.adapter.info["calibration"] = own
    circumstances = (this_machine(), "float32", drafter.digest, 1, 64, 0.6)
    choice = TunedChoice(*circumstances, "best:3", "medusa best:3", {}, 20, ["medusa"], {"medusa": table})
    calibrations = as_chosen(drafter, choice).source.calibrations()
    for temperature, wanted in {0: own["0"], 0.5: own["0.5"], 0.6: table, 0.7: [[3.0, -0.25]] * 3}.items():
        found = calibrations.at(make_sampler(SamplingConfig(temperature)))
        np.testing.assert_allclose(found, [wanted], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("equal_layouts")
@pytest.mark.exhaustive
def test_what_drafts_along_paths_is_recorded_with_the_largest_tree():
    """Whose depth and ranks a part of it may have, though the adapter's own tree has one candidate."""
    model = make_text_model()
    accuracy = [[0.4, 0.2], [0.3, 0.1], [0.2, 0.1]]
    adapter = adapter_of(Hydra(heads=3), model, np.arange(model.config.vocab_size, dtype=np.int32), accuracy=accuracy)
    config = TuneConfig(
        cache_length=64, max_new_tokens=12, num_prompts=1, accuracy_prompts=2, max_rows=8, finalists=1
    )  # fmt: skip
    tuning = tune(make_drafter(adapter, model), ["one", "two", "three"], config)
    trees = [option.drafter.shape for option in tuning.options if option.kind == "hydra sparse"]
    assert max(plan.depth for plan in trees) == 3 and max(plan.num_nodes for plan in trees) == 8


def test_settings_of_a_union_that_cannot_be_tuned(tiny):
    drafter = union([PPD(ensemble=2), Suffix(length=4)], tiny, 8)
    for config, message in (
        (TuneConfig(cache_length=64, max_rows=3), "max-rows must be at least 4"),
        (TuneConfig(cache_length=512), "at most the base's 256, got 512"),
        (TuneConfig(cache_length=64), "need at least 17 prompts, there are 2"),
    ):
        with pytest.raises(UserError, match=message):
            tune(drafter, ["one", "two"], config)


def test_a_lookup_is_tuned_with_budgets_alone():
    config = TuneConfig(cache_length=64, max_new_tokens=4, accuracy_prompts=1, also=("chain:2",))
    with pytest.raises(UserError, match="suffix: it is tuned with trees of best:ROWS alone, got 'chain:2'"):
        tune(text_union(make_text_model(num_layers=1), Suffix(length=4)), ["one", "two"], config)
