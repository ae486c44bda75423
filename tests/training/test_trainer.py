"""Whole runs on a tiny model: they learn, they resume to the same adapter, they refuse what cannot work."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import MeshConfig
from jaxspec.decoding.generate import generate
from jaxspec.drafting.drafter import autoregressive
from jaxspec.drafting.method import Method
from jaxspec.errors import UserError
from jaxspec.methods import PPD, SPACE, Amphista, HiddenTransfer, load_drafter
from jaxspec.model.base import Base
from jaxspec.model.decoder import Decoder
from jaxspec.training.batches import TrainingData
from jaxspec.training.data import Answer
from jaxspec.training.run_config import check_config
from jaxspec.training.step import first_state, stage_ends, train_step
from jaxspec.training.trainer import Stopped, Trainer
from jaxspec.weights.load import load_model
from tests.helpers.model import assert_same_params
from tests.helpers.tiny import on_mesh
from tests.helpers.training import losses, weights, write_at_once


def evaluated(folder):
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {row["step"]: row["top1"] for row in rows if "held_out" in row}


def test_a_run_learns_and_writes_an_adapter_that_decodes(config, model, tmp_path):
    output = tmp_path / "run"
    adapter = Trainer(config, model, output, resume=False).run()
    assert losses(output)[12] < losses(output)[1]
    assert (output / "training.png").stat().st_size > 5000
    head = json.loads((output / "adapter.json").read_text())
    assert head["training"]["steps"] == 12 and head["data"]["prompts"] == "prompts.jsonl"
    assert head["data"]["answers"] == head["data"]["answers_seen"] == 8 and np.array(head["accuracy"]).shape == (3, 10)
    (state,) = head["tree"]
    assert state["paths"][0] == [0] and len(state["paths"]) == 2 and str(tmp_path) not in json.dumps(head)
    drafter = load_drafter("ppd", model, output)
    np.testing.assert_array_equal(drafter.trainable["embeddings"], adapter.trainable["embeddings"])


def test_so_many_checkpoints_stay(config, model, tmp_path):
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=5, save_every=1, keep=2))
    Trainer(config, model, tmp_path / "run", resume=False).run()
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["4", "5"]


def test_a_base_of_16_bits_trains_an_adapter_of_32(config, model):
    """Beside float32's: the same loss but for rounding, and nothing of what is trained is in 16 bits."""
    found, answers = {}, [Answer([1, 2, 3], list(range(20))), Answer([4], list(range(20)))]
    for dtype in ("float32", "bfloat16"):
        base = Base(jax.tree.map(lambda x, d=dtype: x.astype(d), model.params), model.decoder)
        state, batch = first_state(PPD(), config.train, 0, base), TrainingData(answers, config.train).batch(0)
        found[dtype] = train_step(PPD(), config.train, 0, base, state, batch)
    state, metrics = found["bfloat16"]
    floats = [x for x in jax.tree.leaves((state.trainable, state.optimizer)) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert len(floats) == 3 and all(x.dtype == jnp.float32 for x in floats)
    assert metrics["loss"] != found["float32"][1]["loss"]
    np.testing.assert_allclose(metrics["loss"], found["float32"][1]["loss"], rtol=0.02)
    np.testing.assert_allclose(metrics["gradient_norm"], found["float32"][1]["gradient_norm"], rtol=0.1)


@pytest.mark.parametrize("method", [PPD(ensemble=2), SPACE(distances=2, rank=2)], ids=lambda m: m.name)
def test_microbatches_average_to_the_gradient_of_the_whole_batch(config, model, method):
    """Answers of one length and every insertion point, so that every part has as many targets."""
    answers = [Answer([1, 2, 3 + i], list(range(20))) for i in range(4)]
    updated = []
    for size, remat in ((0, False), (1, True)):
        train = dataclasses.replace(config.train, batch_size=4, microbatch=size, insertions=20)
        base = Base(model.params, Decoder(model.config, remat=remat))
        state, batch = first_state(method, train, 0, base), TrainingData(answers, train).batch(0)
        _, metrics = train_step(method, train, 0, base, state, batch)
        updated.append([float(metrics[name]) for name in ("loss", "gradient_norm", "top1@1")])
    np.testing.assert_allclose(updated[1], updated[0], rtol=1e-4)


def test_one_gradient_is_held_however_many_are_added(config, model):
    """Gradients of microbatches are summed one by one: there is no stack of them."""
    answers = [Answer([1, 2, 3 + i], list(range(20))) for i in range(3)]
    train, method = dataclasses.replace(config.train, batch_size=3, microbatch=1), SPACE(distances=2, tuning="full")
    base = Base(model.params, model.decoder)
    state, batch = first_state(method, train, 0, base), TrainingData(answers, train).batch(0)
    program = str(jax.make_jaxpr(lambda *args: train_step(method, train, 0, *args))(base, state, batch))
    rows, columns = state.trainable["base"]["lm_head"].shape
    assert f"f32[{rows},{columns}]" in program and f"f32[3,{rows},{columns}]" not in program


def test_a_killed_run_resumes_to_the_same_adapter(config, model, tmp_path, monkeypatch):
    """Stopped in the middle of a step, after the last checkpoint."""
    Trainer(config, model, tmp_path / "whole", resume=False).run()

    import jaxspec.training.trainer as module

    write_at_once(monkeypatch)
    real, calls = module.train_step, []

    def dies(*args, **settings):
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return real(*args, **settings)

    monkeypatch.setattr(module, "train_step", dies)
    with pytest.raises(KeyboardInterrupt):
        Trainer(config, model, tmp_path / "killed", resume=False).run()
    monkeypatch.setattr(module, "train_step", real)
    with pytest.raises(UserError, match="continue it with --resume"):
        Trainer(config, model, tmp_path / "killed", resume=False)
    Trainer(config, model, tmp_path / "killed", resume=True).run()
    np.testing.assert_array_equal(weights(tmp_path / "killed")["embeddings"], weights(tmp_path / "whole")["embeddings"])
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


@pytest.mark.parametrize("left", ["adapter.json", "checkpoints", "log.jsonl"])
def test_a_folder_with_parts_of_another_run_is_refused(config, model, tmp_path, left):
    (tmp_path / "run" / left).mkdir(parents=True)
    with pytest.raises(UserError, match=r"holds parts of a run without its run\.json"):
        Trainer(config, model, tmp_path / "run", resume=True)


def test_a_run_that_is_asked_to_stop_saves_and_goes_on_later(config, model, tmp_path):
    Trainer(config, model, tmp_path / "whole", resume=False).run()
    asked = iter([False, False, True])
    with pytest.raises(Stopped, match="after update 3 of 12"):
        Trainer(config, model, tmp_path / "run", resume=False, stop=lambda: next(asked)).run()
    assert not (tmp_path / "run" / "adapter.json").exists()
    Trainer(config, model, tmp_path / "run", resume=True).run()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    np.testing.assert_array_equal(weights(tmp_path / "run")["embeddings"], weights(tmp_path / "whole")["embeddings"])


def test_a_run_stops_in_the_middle_of_an_evaluation_and_does_it_again(config, model, tmp_path):
    """What was trained until then is saved, though no checkpoint was due."""
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, eval_every=5))
    Trainer(config, model, tmp_path / "whole", resume=False).run()
    asked = iter([False] * 5 + [True])  # five updates, and the first batch of the evaluation
    with pytest.raises(Stopped, match="after update 5 of 12"):
        Trainer(config, model, tmp_path / "run", resume=False, stop=lambda: next(asked)).run()
    assert not evaluated(tmp_path / "run") and not (tmp_path / "run" / "best").exists()
    Trainer(config, model, tmp_path / "run", resume=True).run()
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").open()]
    assert [row["step"] for row in rows if "held_out" in row] == [5, 10, 12, 12]  # of the curve, and of the adapter
    assert evaluated(tmp_path / "run") == evaluated(tmp_path / "whole") and len(evaluated(tmp_path / "run")) == 3
    np.testing.assert_array_equal(weights(tmp_path / "run")["embeddings"], weights(tmp_path / "whole")["embeddings"])


def test_the_best_adapter_so_far_is_kept(config, model, tmp_path):
    """best/ holds an adapter that decodes, of the evaluation with the highest top-1."""
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, eval_every=2))
    Trainer(config, model, tmp_path / "run", resume=False).run()
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").open()]
    scores = {row["step"]: np.mean(row["top1"]) for row in rows if "held_out" in row}
    best = json.loads((tmp_path / "run" / "best" / "adapter.json").read_text())
    assert scores.keys() == {2, 4, 6, 8, 10, 12} and best["step"] == max(scores, key=scores.get)
    load_drafter("ppd", model, tmp_path / "run" / "best")
    (tmp_path / "run" / "best").rename(tmp_path / "run" / ".best.old")  # as a kill leaves it
    assert Trainer(config, model, tmp_path / "run", resume=True)._best == best["score"]
    load_drafter("ppd", model, tmp_path / "run" / "best")


def test_an_average_of_the_weights_is_what_ships(config, model, tmp_path):
    """With a share of 0 updates leave the average where the weights are; with a large one it moves slowly."""
    moved = {}
    for ema in (0.0, 1e-9, 0.9):
        train = dataclasses.replace(config.train, ema=ema)
        Trainer(dataclasses.replace(config, train=train), model, tmp_path / str(ema), resume=False).run()
        moved[ema] = weights(tmp_path / str(ema))["embeddings"]
    np.testing.assert_allclose(moved[1e-9], moved[0.0], atol=1e-6)
    begun = np.asarray(config.method.init(jax.random.key(config.train.seed), model.base)["embeddings"])
    assert 0 < np.abs(moved[0.9] - begun).max() < np.abs(moved[0.0] - begun).max()


def test_an_average_does_not_hold_the_untrained_weights(config, model, tmp_path):
    """After one update it is that update's weights, however much of the past it keeps."""
    once = {}
    for ema in (0.0, 0.999):
        train = dataclasses.replace(config.train, steps=1, warmup=0, ema=ema)
        Trainer(dataclasses.replace(config, train=train), model, tmp_path / str(ema), resume=False).run()
        once[ema] = weights(tmp_path / str(ema))["embeddings"]
    np.testing.assert_allclose(once[0.999], once[0.0], rtol=1e-4)


@pytest.mark.slow
def test_an_average_begins_anew_with_every_stage(config, model, tmp_path):
    """Two maps, one update each: the second one's average must not hold what it was while the first one learnt."""
    once = {}
    for ema in (0.0, 0.999):
        train = dataclasses.replace(config.train, steps=2, ema=ema)
        run = dataclasses.replace(config, method=HiddenTransfer(distances=2, layers=(0, 1)), train=train)
        Trainer(run, model, tmp_path / str(ema), resume=False).run()
        once[ema] = weights(tmp_path / str(ema))
    for name, value in once[0.0].items():
        np.testing.assert_allclose(once[0.999][name], value, rtol=1e-4)


def test_every_stage_leaves_its_average(config, model, tmp_path):
    """Two maps, two updates each: the first one ships as the mean of both, not as the second left it."""
    made = {}
    for ema in (0.0, 0.999):
        train = dataclasses.replace(config.train, steps=4, warmup=0, ema=ema)
        run = dataclasses.replace(config, method=HiddenTransfer(distances=2, layers=(0, 1)), train=train)
        Trainer(run, model, tmp_path / str(ema), resume=False).run()
        made[ema] = weights(tmp_path / str(ema))
    for name, value in made[0.0].items():
        assert np.allclose(made[0.999][name], value, rtol=1e-4) == (name == "frequent_tokens"), name


def test_a_process_that_is_late_does_not_take_the_first_ones_file_for_another_run(config, model, tmp_path, monkeypatch):
    """The first process writes run.json as soon as all have said that there is none."""
    import jaxspec.training.trainer as module

    monkeypatch.setattr(module, "check_alike", lambda content, what: (tmp_path / "run" / "run.json").write_text("{}"))
    (tmp_path / "run").mkdir()
    assert Trainer(config, model, tmp_path / "run", resume=False).output.exists()


@pytest.mark.parametrize(
    "method",
    [PPD(ensemble=2), pytest.param(SPACE(distances=2, tuning="full"), marks=pytest.mark.slow)],
    ids=lambda m: m.name,
)
def test_a_run_over_devices_that_is_stopped_goes_on(config, model, tmp_path, method):
    """Stopped, resumed and finished on a mesh; weights, optimizer, average and evaluation are divided."""
    mesh = MeshConfig(data=2, fsdp=2, tensor=2)
    train = dataclasses.replace(config.train, batch_size=4, ema=0.5, eval_every=2)
    config = dataclasses.replace(config, method=method, train=train, mesh=mesh)
    many = on_mesh(model, mesh)
    Trainer(config, many, tmp_path / "whole", resume=False).run()
    asked = iter([False] * 4 + [True])
    with pytest.raises(Stopped):
        Trainer(config, many, tmp_path / "run", resume=False, stop=lambda: next(asked)).run()
    one = dataclasses.replace(config, mesh=MeshConfig())
    Trainer(one, model, shutil.copytree(tmp_path / "run", tmp_path / "fewer"), resume=True).run()
    Trainer(config, many, tmp_path / "run", resume=True).run()
    for name, value in weights(tmp_path / "whole").items():
        np.testing.assert_array_equal(weights(tmp_path / "run")[name], value)
    Trainer(one, model, tmp_path / "one", resume=False).run()
    alone, fewer, together = (list(losses(tmp_path / folder).values()) for folder in ("one", "fewer", "run"))
    np.testing.assert_allclose([fewer, together], [alone, alone], rtol=2e-3)
    for folder in ("one", "fewer", "run"):
        base = load_model(str(tmp_path / folder / "model")) if method.replaces_base else model
        [answer] = generate(load_drafter(method.name, base, tmp_path / folder), ["question 1"], max_new_tokens=8)
        assert answer.tokens


def test_stages_train_one_map_after_the_other_and_resume(config, model, tmp_path, monkeypatch):
    """Hidden Transfer 3.3: every stage moves its own map alone; a run killed in the second one resumes exactly."""
    import jaxspec.training.trainer as module

    method = HiddenTransfer(layers=(0, 1, 1))
    config = dataclasses.replace(config, method=method)
    assert stage_ends(method, 12) == [4, 8, 12]
    real, seen = module.train_step, []

    def spy(method, train, stage, base, state, batch, **settings):
        before = jax.tree.map(np.asarray, state.trainable)  # the step may reuse its memory
        result = real(method, train, stage, base, state, batch, **settings)
        seen.append((stage, {k for k in before if not np.array_equal(before[k], result[0].trainable[k])}))
        if len(seen) == dies_at:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(module, "train_step", spy)
    write_at_once(monkeypatch)
    dies_at = None
    Trainer(config, model, tmp_path / "whole", resume=False).run()
    assert seen == [(stage, {f"step{stage + 1}"}) for stage in range(3) for _ in range(4)]
    folder = tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt):
        seen.clear()
        dies_at = 6  # in the middle of a stage
        Trainer(config, model, folder, resume=False).run()
    with pytest.raises(KeyboardInterrupt):
        seen.clear()
        dies_at = 5  # right behind the checkpoint at the start of the next
        Trainer(config, model, folder, resume=True).run()
    Trainer(config, model, folder, resume=True).run()
    for name, value in weights(tmp_path / "whole").items():
        np.testing.assert_array_equal(weights(folder)[name], value)


def test_a_head_of_two_stages_waits_for_the_prompt_tokens(model):
    """PPD 4.4.2: first the prompt tokens alone, then everything with a smaller rate."""
    alone, both = PPD(head="two_stage", aggregation="learned").stages
    assert alone.trains == ("embeddings", "weights") and both.trains is None and both.learning_rate < 1
    assert len(PPD(head="one_stage").stages) == len(PPD().stages) == 1


def test_resuming_with_other_settings_is_refused(config, model, tmp_path):
    Trainer(config, model, tmp_path / "run", resume=False)
    other = dataclasses.replace(config, train=dataclasses.replace(config.train, learning_rate=1e-3))
    with pytest.raises(UserError, match=r"other settings.*train\.learning-rate .*, not 0\.001"):
        Trainer(other, model, tmp_path / "run", resume=True)


def test_a_loss_that_is_not_finite_stops_the_run(config, model, tmp_path, monkeypatch):
    import jaxspec.training.trainer as module

    real = module.train_step

    def diverges(*args, **settings):
        calls.append(1)
        state, metrics = real(*args, **settings)
        return state, metrics | ({"loss": float("nan")} if len(calls) == bad else {})

    monkeypatch.setattr(module, "train_step", diverges)
    for bad, kept in ((1, "no checkpoint was written"), (5, "the last good checkpoint, of step 4, is kept")):
        calls, output = [], tmp_path / f"run{bad}"
        message = rf"no longer finite at step {bad}: .*another --output and a train.learning-rate below 0.03 \({kept}"
        with pytest.raises(UserError, match=message):
            Trainer(config, model, output, resume=False).run()
        assert not (output / "adapter.json").exists()
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["4"]  # whole when it is named


def test_bad_prompts_leave_nothing_behind(config, model, tmp_path):
    (tmp_path / "bad.jsonl").write_text("not json")
    bad = dataclasses.replace(config, data=dataclasses.replace(config.data, prompts=str(tmp_path / "bad.jsonl")))
    with pytest.raises(UserError, match=r"bad\.jsonl:1"):
        Trainer(bad, model, tmp_path / "run", resume=False)
    assert not (tmp_path / "run").exists()
    Trainer(config, model, tmp_path / "run", resume=False)  # the corrected command works


def test_other_prompts_under_the_same_name_are_no_resume(config, model, tmp_path):
    Trainer(config, model, tmp_path / "run", resume=False)
    with open(config.data.prompts, "a") as file:
        file.write('{"prompt": "one more"}\n')
    with pytest.raises(UserError, match="other settings"):
        Trainer(config, model, tmp_path / "run", resume=True)


def test_a_folder_has_one_run_at_a_time(config, model, tmp_path):
    first = Trainer(config, model, tmp_path / "run", resume=False)
    with pytest.raises(UserError, match="another process is writing there"):
        Trainer(config, model, tmp_path / "run", resume=True)
    first.run()
    (tmp_path / "run" / "best").mkdir(exist_ok=True)
    (tmp_path / "run" / "best" / "adapter.json").write_text("damaged")
    with pytest.raises(UserError, match=r"adapter\.json") as kept:  # with its traceback and all that it holds
        Trainer(config, model, tmp_path / "run", resume=True)
    (tmp_path / "run" / "best" / "adapter.json").unlink()
    assert kept and Trainer(config, model, tmp_path / "run", resume=True)


def test_an_output_that_cannot_be_written_is_refused(config, model, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written"):
        Trainer(config, model, tmp_path / "file" / "run", resume=False)


def test_a_base_of_other_shapes_is_refused(config, model, tmp_path):
    with pytest.raises(UserError, match="other shapes than the config"):
        Trainer(dataclasses.replace(config, model="smollm2-135m"), model, tmp_path / "run", resume=False)
    with pytest.raises(UserError, match="nothing to train"):
        check_config(dataclasses.replace(config, method=Method()))


def test_heads_train_too_and_are_stored_in_16_bits(config, model, tmp_path):
    """What is measured is what is stored; what only concerns the adapter's file may change when a run is resumed."""
    train = dataclasses.replace(config.train, adapter_dtype="float16", learning_rate=3e-3)
    config = dataclasses.replace(config, method=Amphista(heads=2), train=train, tree="chain:1", draft_vocabulary=50)
    adapter = Trainer(config, model, tmp_path / "run", resume=False).run()
    rows = losses(tmp_path / "run")
    assert np.mean([rows[step] for step in (11, 12)]) < np.mean([rows[step] for step in (1, 2)])
    loaded = load_drafter("amphista", model, tmp_path / "run")
    assert loaded.on_device.draft_vocabulary.ids.shape == (50,)
    stored = weights(tmp_path / "run")
    assert stored["positions"].dtype == np.float16
    np.testing.assert_array_equal(stored["positions"].astype(np.float32), adapter.trainable["positions"])
    other = dataclasses.replace(
        config, draft_vocabulary=0, tree="chain:2", train=dataclasses.replace(train, adapter_dtype="float32")
    )
    Trainer(other, model, tmp_path / "run", resume=True).run()
    assert weights(tmp_path / "run")["positions"].dtype == np.float32
    with pytest.raises(UserError, match="other settings"):
        Trainer(dataclasses.replace(config, method=Amphista(heads=3)), model, tmp_path / "run", resume=True)


def test_weights_that_do_not_fit_16_bits_are_refused(config, model, tmp_path, monkeypatch):
    train = dataclasses.replace(config.train, adapter_dtype="float16", steps=1, save_every=1)
    trainer = Trainer(dataclasses.replace(config, train=train), model, tmp_path / "run", resume=False)
    with pytest.raises(UserError, match="do not fit float16"):
        trainer._as_stored({"w": jax.numpy.array([1e6])})


def test_full_fine_tuning_ends_in_a_base_of_its_own(config, model, tmp_path):
    """It learns, it resumes to the same weights, and `load_model` takes what it made, with an adapter that fits."""
    train = dataclasses.replace(config.train, learning_rate=1e-3)
    config = dataclasses.replace(config, method=SPACE(distances=2, tuning="full"), train=train, tree="chain:2")
    adapter = Trainer(config, model, tmp_path / "run", resume=False).run()
    rows = losses(tmp_path / "run")
    assert np.mean([rows[step] for step in (11, 12)]) < np.mean([rows[step] for step in (1, 2)])
    assert set(weights(tmp_path / "run")) == {"mask", "frequent_tokens"} and adapter.method.tuning == "none"
    tuned = load_model(str(tmp_path / "run" / "model"))
    assert tuned.fingerprint == adapter.fingerprint != model.fingerprint
    assert adapter.info["perplexity"].keys() == {"base", "own"}
    drafter = load_drafter("space", tuned, tmp_path / "run")
    assert drafter.model is tuned and not drafter.tuned_base
    ours, plain = (generate(d, ["question 3"], 12) for d in (drafter, autoregressive(tuned)))
    assert ours[0].tokens == plain[0].tokens
    with pytest.raises(UserError, match=r"trained for another base .*/run/model as the model"):
        load_drafter("space", model, tmp_path / "run")

    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "model")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "12")
    Trainer(config, model, tmp_path / "again", resume=True).run()
    again = load_model(str(tmp_path / "again" / "model"))
    assert again.fingerprint == tuned.fingerprint and losses(tmp_path / "again") == rows
    assert_same_params(again.params, tuned.params)


def test_a_tuned_base_is_part_of_a_small_adapter(config, model, tmp_path):
    """With LoRA the adapter belongs to the frozen base, and decodes on the one it makes of it."""
    train = dataclasses.replace(config.train, learning_rate=3e-3)
    config = dataclasses.replace(config, method=SPACE(distances=2, rank=2), train=train, tree="chain:2")
    adapter = Trainer(config, model, tmp_path / "run", resume=False).run()
    assert adapter.fingerprint == model.fingerprint and not (tmp_path / "run" / "model").exists()
    assert adapter.info["perplexity"]["own"] != adapter.info["perplexity"]["base"]
    drafter = load_drafter("space", model, tmp_path / "run")
    assert drafter.tuned_base and drafter.model.fingerprint != model.fingerprint
    ours, own, base = (
        generate(d, ["question 3"], 24)[0].tokens
        for d in (drafter, autoregressive(drafter.model), autoregressive(model))
    )
    assert ours == own != base
