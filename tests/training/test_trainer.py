"""Whole runs on a tiny model: they learn, they resume to the same adapter, they refuse what cannot work."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax.traverse_util import flatten_dict

from jaxspec.config import MeshConfig
from jaxspec.decoding.method import Method
from jaxspec.drafters import load_drafter
from jaxspec.drafters.drafter import autoregressive
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate
from jaxspec.methods import PPD, SPACE, DraftModel, HiddenTransfer, Hydra, Medusa
from jaxspec.training.data import TrainingData
from jaxspec.training.run_config import check_config
from jaxspec.training.step import stage_ends, train_step, train_steps
from jaxspec.training.trainer import Stopped, Trainer
from jaxspec.weights.load import load_model, save_model
from jaxspec.weights.params import params_fingerprint
from tests.helpers.files import read_jsonl
from tests.helpers.model import assert_same_params
from tests.helpers.tiny import TINY, make_tiny, on_mesh
from tests.helpers.training import (
    assert_same_run,
    best,
    evaluated,
    losses,
    stop_after,
    weights,
    with_train,
    write_at_once,
)


@pytest.fixture
def trained(whole, tmp_path):
    """A copy of the run."""
    return shutil.copytree(whole, tmp_path / "trained")


def learnt(folder):
    rows = losses(folder)
    steps = sorted(rows)
    return np.mean([rows[step] for step in steps[-2:]]) < np.mean([rows[step] for step in steps[:2]])


def test_a_run_learns_and_writes_an_adapter_that_decodes(config, model, whole):
    assert learnt(whole) and losses(whole).keys() == set(range(1, 13))
    assert (whole / "training.png").stat().st_size > 5000
    head = json.loads((whole / "adapter.json").read_text())
    assert head["training"]["steps"] == 12 and head["data"]["prompts"] == "prompts.jsonl"
    assert head["data"]["answers"] == head["data"]["answers_seen"] == 8 and np.array(head["accuracy"]).shape == (3, 10)
    rows = read_jsonl(whole / "log.jsonl")
    assert [r["tokens_per_step"] for r in rows if "top1" in r][-1] == head["tokens_per_step"] > 1
    (state,) = head["tree"]
    assert state["paths"][0] == [0] and len(state["paths"]) == 2 and config.data.cache not in json.dumps(head)
    assert load_drafter("ppd", model, whole).source.trainable["embeddings"].shape == (3, 2, 32)
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["12", "8"]  # so many stay


def test_the_best_adapter_so_far_is_kept(config, model, trained):
    """best/ holds an adapter that decodes, of the evaluation with the most tokens per step."""
    rows = read_jsonl(trained / "log.jsonl")
    scores = {row["step"]: row["tokens_per_step"] for row in rows if "top1" in row}
    kept = best(trained)
    assert scores.keys() == {5, 10, 12} and kept["step"] == max(scores, key=scores.get)
    assert kept["data"]["answers_seen"] == min(8, 2 * kept["step"])
    (trained / "best").rename(trained / ".best.old")  # as a kill leaves it
    Trainer(config, model, trained, resume=True).run()
    assert best(trained) == kept
    load_drafter("ppd", model, trained / "best")
    Trainer(dataclasses.replace(config, tree="chain:1"), model, trained, resume=True).run()
    assert best(trained)["step"] == 12  # figures of another tree do not compare


def test_a_killed_run_resumes_to_the_same_adapter(config, model, whole, tmp_path, monkeypatch):
    """Killed after update 7, three after the last checkpoint."""
    write_at_once(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        Trainer(config, model, tmp_path / "run", resume=False, stop=stop_after(5 + 2 + 2, KeyboardInterrupt)).run()
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6, 7]
    Trainer(config, model, tmp_path / "run", resume=True).run()
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.slow
def test_a_run_with_dropout_resumes_to_the_same_adapter(config, model, tmp_path):
    """What is random and the rate depend on the update alone, which a resumed run counts on from."""
    config = dataclasses.replace(config, method=Hydra(heads=2, dropout=0.3))
    config = with_train(config, steps=6, eval_every=0, positions="text", final_learning_rate=0.3)
    Trainer(config, model, tmp_path / "whole", resume=False).run()
    with pytest.raises(Stopped):
        Trainer(config, model, tmp_path / "run", resume=False, stop=stop_after(3)).run()
    Trainer(config, model, tmp_path / "run", resume=True).run()
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(
    ("asks", "message"),
    [(3, "after update 3 of 12"), (6, "after update 5 of 12"), (16, "after update 12 of 12"), (19, "in the last")],
)
def test_a_run_that_is_asked_to_stop_saves_and_resumes(config, model, whole, tmp_path, asks, message):
    """After an update, in an evaluation, which is repeated, after the last update, and in the last evaluation."""
    with pytest.raises(Stopped, match=message):
        Trainer(config, model, tmp_path / "run", resume=False, stop=stop_after(asks)).run()
    assert not (tmp_path / "run" / "adapter.json").exists() and (asks > 6 or not evaluated(tmp_path / "run"))
    Trainer(config, model, tmp_path / "run", resume=True).run()
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.parametrize(
    "method",
    [PPD(ensemble=2), SPACE(distances=2, tuning="full")],
    ids=lambda m: m.name,
)
@pytest.mark.slow
def test_a_run_over_devices_that_is_stopped_resumes(config, model, tmp_path, method):
    """Stopped, resumed and finished on a mesh or on fewer devices; weights, optimizer and average are divided."""
    mesh = MeshConfig(data=2, fsdp=2, tensor=2)
    one = with_train(dataclasses.replace(config, method=method), batch_size=4, ema=0.5, steps=6, save_every=2)
    over, many = dataclasses.replace(one, mesh=mesh), on_mesh(model, mesh)
    with pytest.raises(Stopped):
        Trainer(over, many, tmp_path / "run", resume=False, stop=stop_after(3)).run()
    Trainer(one, model, shutil.copytree(tmp_path / "run", tmp_path / "fewer"), resume=True).run()
    Trainer(over, many, tmp_path / "run", resume=True).run()
    Trainer(one, model, tmp_path / "one", resume=False).run()
    for folder in ("one", "fewer", "run"):
        np.testing.assert_allclose(
            list(losses(tmp_path / folder).values()), list(losses(tmp_path / "one").values()), 2e-3
        )
        base = load_model(str(tmp_path / folder / "model")) if method.facts(model.config).adapter == "base" else model
        load_drafter(method.name, base, tmp_path / folder)


@pytest.mark.slow
def test_stages_train_one_map_after_the_other_and_resume(config, model, tmp_path, monkeypatch):
    """Hidden Transfer 3.3: every stage moves its own map alone, and leaves the average of what the map was in it.

    A run killed at the start of the second stage and in the middle of it resumes exactly.
    """
    method = HiddenTransfer(distances=2, layers=(0, 1))
    config = with_train(dataclasses.replace(config, method=method), steps=8, save_every=2, eval_every=0, ema=0.9)
    config = with_train(config, adapter_dtype="float32")  # as exact as the average below
    assert stage_ends(method.facts(TINY).stages, 8) == [4, 8]
    seen = []

    def spy(update, base, state, batch, rate):
        before = jax.tree.map(np.asarray, state.trainable)  # the step may reuse its memory
        state, metrics = train_step(update, base, state, batch, rate)
        after = jax.tree.map(np.asarray, state.trainable)
        seen.append((update.stage, [name for name in after if not np.array_equal(before[name], after[name])], after))
        return state, metrics

    with monkeypatch.context() as watched:
        watched.setattr("jaxspec.training.trainer.train_step", spy)
        Trainer(config, model, tmp_path / "whole", resume=False).run()
    assert [(stage, moved) for stage, moved, _ in seen] == [(0, ["step1"])] * 4 + [(1, ["step2"])] * 4
    shares = 0.9 ** np.arange(4)[::-1]
    for first, name in ((0, "step1"), (4, "step2")):
        values = np.stack([after[name] for *_, after in seen[first : first + 4]])
        average = np.tensordot(shares / shares.sum(), values, 1)
        np.testing.assert_allclose(weights(tmp_path / "whole")[name], average, rtol=1e-4, atol=1e-7)

    write_at_once(monkeypatch)
    for resume, asks in ((False, 5), (True, 3)):
        with pytest.raises(KeyboardInterrupt):
            Trainer(config, model, tmp_path / "run", resume, stop_after(asks, KeyboardInterrupt)).run()
    Trainer(config, model, tmp_path / "run", resume=True).run()
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_head_of_two_stages_waits_for_the_prompt_tokens():
    """PPD 4.4.2: first the prompt tokens alone, then everything with a smaller rate."""
    alone, both = PPD(head="two_stage", aggregation="learned").stages
    assert alone.trains == ("embeddings", "weights") and both.trains is None and both.learning_rate < 1
    assert len(PPD(head="one_stage").stages) == len(PPD().stages) == 1


def test_a_loss_that_is_not_finite_stops_the_run(config, model, tmp_path, monkeypatch):
    def diverges(*args):
        calls.append(1)
        state, metrics = train_step(*args)
        return state, metrics | ({"loss": float("nan")} if len(calls) == bad else {})

    monkeypatch.setattr("jaxspec.training.trainer.train_step", diverges)
    for bad, kept in ((1, "no checkpoint was written"), (5, "the last good checkpoint, of step 4, is kept")):
        calls, output = [], tmp_path / f"run{bad}"
        message = rf"no longer finite at step {bad}: .*another --output and a train.learning-rate below 0.03 \({kept}"
        with pytest.raises(UserError, match=message):
            Trainer(config, model, output, resume=False).run()
        assert not (output / "adapter.json").exists()
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["4"]  # whole when it is named


def test_several_updates_in_one_call_change_nothing_of_a_run(config, model, whole, tmp_path, monkeypatch):
    """Calls end at checkpoints and evaluations, after which a run that was stopped resumes, with other calls too."""
    counts, lengths = [], set()

    def spy(*arguments):
        *_, batches, _, count = arguments
        counts.append(int(count))
        lengths.add(batches.tokens.shape)
        return train_steps(*arguments)

    monkeypatch.setattr("jaxspec.training.trainer.train_steps", spy)
    together = with_train(config, together=3, lengths=1)
    with pytest.raises(Stopped, match="after update 8 of 12"):
        Trainer(together, model, tmp_path / "run", resume=False, stop=stop_after(3 + 2 + 1)).run()
    assert counts == [3, 1, 1, 3] and lengths == {(3, 2, 40)}
    Trainer(with_train(config, together=4), model, tmp_path / "run", resume=True).run()
    assert sum(counts) == 12
    assert_same_run(tmp_path / "run", whole, rtol=2e-3, atol=1e-5)


def test_a_call_ends_where_the_length_or_the_stage_does(config, model, tmp_path, monkeypatch):
    """Its rows are logged one by one, up to the first that is not finite."""
    method = PPD(head="two_stage")
    run = with_train(dataclasses.replace(config, method=method), together=16, save_every=12, eval_every=0, lengths=2)
    padded, calls = [40, 40, 40, 40, 20, 20, 40, 40, 40, 40, 40, 40], []
    monkeypatch.setattr(TrainingData, "length", lambda data, step: padded[step])

    def diverges(*arguments):
        stage, count = arguments[0].stage, int(arguments[-1])
        calls.append((stage, count))
        state, metrics = train_steps(*arguments)
        bad = np.arange(16) == 4
        return state, metrics | ({"loss": np.where(bad, np.nan, metrics["loss"])} if len(calls) == 3 else {})

    monkeypatch.setattr("jaxspec.training.trainer.train_steps", diverges)
    with pytest.raises(UserError, match=r"no longer finite at step 11: .*no checkpoint was written"):
        Trainer(run, model, tmp_path / "run", resume=False).run()
    assert calls == [(0, 4), (0, 2), (1, 6)] and list(losses(tmp_path / "run")) == list(range(1, 11))


def test_bad_prompts_leave_nothing_behind(config, model, tmp_path):
    (tmp_path / "bad.jsonl").write_text("not json")
    bad = dataclasses.replace(config, data=dataclasses.replace(config.data, prompts=str(tmp_path / "bad.jsonl")))
    with pytest.raises(UserError, match=r"bad\.jsonl:1"):
        Trainer(bad, model, tmp_path / "run", resume=False)
    assert not (tmp_path / "run").exists()


def test_a_run_that_fails_leaves_its_folder_to_the_next(config, model, trained):
    file = trained / "best" / "adapter.json"
    file.write_text("damaged")
    with pytest.raises(UserError, match=r"adapter\.json") as kept:  # with its traceback and all that it holds
        Trainer(config, model, trained, resume=True).run()
    file.unlink()
    assert kept and Trainer(config, model, trained, resume=True).run() and best(trained)


def test_a_base_of_other_shapes_is_refused(config, model, tmp_path):
    with pytest.raises(UserError, match="other shapes than the config"):
        Trainer(dataclasses.replace(config, model="smollm2-135m"), model, tmp_path / "run", resume=False)
    with pytest.raises(UserError, match="nothing to train"):
        check_config(dataclasses.replace(config, method=Method()))


@pytest.mark.slow
def test_heads_train_too_and_are_stored_in_16_bits(config, model, tmp_path):
    """What is measured is what is stored; what only concerns the adapter's file may change when a run is resumed."""
    run = with_train(config, learning_rate=3e-3, eval_every=0)
    run = dataclasses.replace(run, method=Medusa(heads=2), tree="chain:1", draft_vocabulary=50)
    adapter = Trainer(run, model, tmp_path / "run", resume=False).run()
    assert learnt(tmp_path / "run")
    loaded = load_drafter("medusa", model, tmp_path / "run")
    assert loaded.on_device.sources[0].draft_vocabulary.ids.shape == (50,)
    stored = {name: value for name, value in weights(tmp_path / "run").items() if name != "frequent_tokens"}
    for name, value in flatten_dict(adapter.trainable, sep="/").items():
        assert stored[name].dtype == np.float16
        np.testing.assert_array_equal(stored[name].astype(np.float32), value)
    other = with_train(dataclasses.replace(run, draft_vocabulary=0, tree="chain:2"), adapter_dtype="float32")
    Trainer(other, model, tmp_path / "run", resume=True).run()
    assert all(weights(tmp_path / "run")[name].dtype == np.float32 for name in stored)


@pytest.mark.slow
def test_a_draft_model_is_made_of_the_bases_layers(config, model, tmp_path):
    """It learns; its folder holds an adapter that drafts, and a base that `load_model` takes, without embeddings."""
    save_model(model, tmp_path / "base")
    base = load_model(str(tmp_path / "base"))
    run = with_train(config, learning_rate=3e-3, steps=8, insertions=24, adapter_dtype="int8", eval_every=0)
    method = DraftModel(layers=(1,), length=2)
    run = dataclasses.replace(run, model=str(tmp_path / "base"), method=method, tree="chain:2", draft_vocabulary=50)
    adapter = Trainer(run, base, tmp_path / "run", resume=False).run()
    assert learnt(tmp_path / "run")
    assert {name.split("/")[0] for name in weights(tmp_path / "run")} == {"layers_0", "norm", "frequent_tokens"}
    drafter = load_drafter("draft_model", base, draft_model=tmp_path / "run", tree="own")
    assert drafter.plan.depth == 2 and drafter.source.draft_vocabulary == 50
    answers, prompts = generate(drafter, ["one", "two"], 16), ["one", "two"]
    assert [a.tokens for a in answers] == [a.tokens for a in generate(autoregressive(base), prompts, 16)]
    short = load_model(str(tmp_path / "run"))
    assert short.config == dataclasses.replace(base.config, num_layers=1) and short.tokenizer.vocab_size == 256
    expected = adapter.trainable | {name: base.params[name] for name in ("embedding", "lm_head")}
    assert_same_params(short.params, expected)
    assert short.fingerprint == params_fingerprint(short.config, expected)
    incomplete = {name: value for name, value in weights(tmp_path / "run").items() if "mlp/down" not in name}
    cut = shutil.copytree(tmp_path / "run", tmp_path / "cut")
    safetensors.numpy.save_file(incomplete, cut / "adapter.safetensors")
    with pytest.raises(UserError, match="tensor 'layers_0/mlp/down/kernel' is missing"):
        load_model(str(cut))
    other = make_tiny(base.config, seed=3)
    save_model(dataclasses.replace(other, tokenizer=base.tokenizer), tmp_path / "base")
    with pytest.raises(UserError, match=f"shares weights with one of fingerprint {base.fingerprint}"):
        load_model(str(tmp_path / "run"))


@pytest.mark.slow
def test_full_fine_tuning_ends_in_a_base_of_its_own(config, model, tmp_path):
    """It learns, it resumes to the same weights, and `load_model` takes what it made, with an adapter that fits."""
    run = with_train(config, learning_rate=1e-3, steps=6, save_every=3)
    run = dataclasses.replace(run, method=SPACE(distances=2, tuning="full"), tree="chain:2")
    adapter = Trainer(run, model, tmp_path / "run", resume=False).run()
    assert learnt(tmp_path / "run") and not (tmp_path / "run" / "best").exists()
    assert set(weights(tmp_path / "run")) == {"mask", "frequent_tokens"} and adapter.method.tuning == "none"
    tuned = load_model(str(tmp_path / "run" / "model"))
    assert tuned.fingerprint == adapter.fingerprint != model.fingerprint
    assert adapter.info["perplexity"].keys() == {"base", "own"}
    drafter = load_drafter("space", tuned, tmp_path / "run")
    assert drafter.model is tuned
    with pytest.raises(UserError, match=r"trained for another base .*/run/model as the model"):
        load_drafter("space", model, tmp_path / "run")

    again = shutil.copytree(tmp_path / "run", tmp_path / "again", ignore=shutil.ignore_patterns("model", "6"))
    Trainer(run, model, again, resume=True).run()
    assert_same_run(again, tmp_path / "run")
    assert_same_params(load_model(str(again / "model")).params, tuned.params)


@pytest.mark.slow
def test_a_tuned_base_is_part_of_a_small_adapter(config, model, tmp_path):
    """With LoRA the adapter belongs to the frozen base, and decodes on the one it makes of it."""
    run = with_train(config, learning_rate=3e-3, steps=4, eval_every=0)
    run = dataclasses.replace(run, method=SPACE(distances=2, rank=2), tree="chain:2")
    adapter = Trainer(run, model, tmp_path / "run", resume=False).run()
    assert adapter.fingerprint == model.fingerprint and not (tmp_path / "run" / "model").exists()
    assert adapter.info["perplexity"]["own"] != adapter.info["perplexity"]["base"]
    drafter = load_drafter("space", model, tmp_path / "run")
    assert drafter.model.fingerprint != model.fingerprint
