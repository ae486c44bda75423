"""Settings that can train, those that cannot, and those that a run can go on with."""

import contextlib
import dataclasses
import json
import shutil

import jax
import pytest

from jaxspec.config import MeshConfig
from jaxspec.errors import UserError
from jaxspec.methods import METHODS, BiTA, HiddenTransfer
from jaxspec.training.configs import FOLDER, load_config, load_configs, load_papers, split_config_name
from jaxspec.training.run_config import check_config, check_same_run, describe
from jaxspec.training.trainer import Trainer
from jaxspec.weights.shapes import SHAPES


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("train", {"steps": 0}, "train.steps"),
        ("train", {"save_every": 0}, "train.save-every"),
        ("train", {"eval_every": -1}, "train.eval-every"),
        ("train", {"keep": 0}, "train.keep"),
        ("train", {"ema": 1.0}, "train.ema"),
        ("train", {"microbatch": -1}, "must divide train.batch-size"),
        ("mesh", {"data": 4}, "must divide train.batch-size"),
        ("train", {"warmup": 12}, "train.warmup"),
        ("train", {"learning_rate": 0.0}, "learning-rate"),
        ("train", {"clip": -1.0}, "train.clip must not be negative, got -1.0"),
        ("train", {"seed": -1}, "train.seed"),
        ("data", {"held_out_seed": -1}, "data.held-out-seed"),
        ("train", {"sequence_length": 16}, "no room for an answer"),
        ("data", {"held_out": 0}, "data.held-out"),
        ("data", {"held_out_tokens": 10_000}, "do not fit"),
        ("data", {"held_out_tokens": 0}, "held-out-tokens"),
    ],
)
def test_settings_that_cannot_train_are_refused(config, part, changes, message):
    changed = dataclasses.replace(config, **{part: dataclasses.replace(getattr(config, part), **changes)})
    with pytest.raises(UserError, match=message):
        check_config(changed)


def test_every_config_loads_and_can_train():
    configs = load_configs()
    assert {"ppd_smollm2", "ppd_vicuna_7b", "ppd_vicuna_13b", "ppd_mobilellama_1_4b"} <= set(configs)
    for config in configs.values():
        check_config(config)


def test_every_paper_has_a_file_of_runs_that_bear_its_name():
    papers = load_papers()
    assert set(papers) == {name for name, method in METHODS.items() if method.trainable}
    for paper, runs in papers.items():
        assert runs and all(name.startswith(f"{paper}_") for name in runs)
        assert all(run.method.name == paper and run.model in SHAPES for run in runs.values())


def test_two_runs_of_one_name_are_refused(tmp_path, monkeypatch):
    for name in ("ppd.py", "mine.py"):
        shutil.copy(FOLDER / "ppd.py", tmp_path / name)
    monkeypatch.setattr("jaxspec.training.configs.FOLDER", tmp_path)
    with pytest.raises(UserError, match=r"ppd\.py: another file has a run 'ppd_vicuna_7b' too"):
        load_config("ppd_smollm2")


@pytest.mark.parametrize("name", ["bita_7b", "bita_13b", "bita_70b", *(f"bita_vicuna_{n}b" for n in (7, 13, 33))])
def test_configs_of_bita_are_its_papers(name):
    """Section 4.1."""
    config, large = load_config(name), name.endswith(("33b", "70b"))
    assert config.method == BiTA(distances=4 if large else 3, prompting="deep", prompts=16, objective="hard")
    train = config.train
    assert (train.learning_rate, train.schedule, train.warmup, train.batch_size) == (3e-2, "cosine", 0, 128)
    assert train.steps * train.batch_size == 4 * config.data.answers and train.insertions == 64  # four epochs
    assert config.tree == "efficient:5"


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("hidden_transfer_llama2_7b", (15, 20, 25)),  # the third is not published
        ("hidden_transfer_vicuna_7b", (15, 20, 25)),
        ("hidden_transfer_llama2_13b", (25, 30, 35)),
        ("hidden_transfer_vicuna_13b", (25, 30, 35)),
    ],
)
def test_configs_of_hidden_transfer_are_its_papers(name, layers):
    """Sections 3.3 and 4.1."""
    method = load_config(name).method
    assert method == HiddenTransfer(layers=layers, training="separate", train_visibility="real", direction="reverse")


def test_an_unknown_config_is_refused_with_a_suggestion():
    with pytest.raises(UserError, match="did you mean 'ppd_smollm2'") as refused:
        load_config("ppd_smolm2")
    assert "\n  bita: bita_7b, bita_13b, bita_70b, " in str(refused.value)
    with pytest.raises(UserError, match="--config NAME"):
        split_config_name(["--train.steps", "3"])
    assert split_config_name(["--a", "1", "--config", "x", "--b"]) == ("x", ["--a", "1", "--b"])


def test_resuming_over_a_base_of_another_precision_is_refused(config, model, tmp_path):
    Trainer(config, model, tmp_path / "run", resume=False)
    params = jax.tree.map(lambda x: x.astype(jax.numpy.bfloat16), model.params)
    half = dataclasses.replace(model, params=params)
    with pytest.raises(UserError, match="a base in float32, not bfloat16; continue it with --dtype float32"):
        Trainer(config, half, tmp_path / "run", resume=True)
    file = tmp_path / "run" / "run.json"
    held = json.loads(file.read_text())
    del held["dtype"], held["method"]["mask"], held["train"]["schedule"]  # as older versions wrote it
    file.write_text(json.dumps(held))
    Trainer(config, half, tmp_path / "run", resume=True)
    with pytest.raises(UserError, match="a base in bfloat16, not float32"):  # known from now on
        Trainer(config, model, tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("microbatch", "mesh", "same"),
    [(1, MeshConfig(fsdp=4), True), (2, MeshConfig(data=2, tensor=2), True), (2, MeshConfig(fsdp=4), False),
     (4, MeshConfig(fsdp=2), False), (0, MeshConfig(fsdp=2), False)],
)  # fmt: skip
def test_on_another_mesh_a_run_goes_on_in_passes_of_the_same_size(config, tmp_path, microbatch, mesh, same):
    """Of four sequences, where gradients are means of a pass's targets."""

    def over(mesh, microbatch):
        train = dataclasses.replace(config.train, batch_size=8, microbatch=microbatch)
        return describe(dataclasses.replace(config, train=train, mesh=mesh)) | {"dtype": "float32"}

    with contextlib.nullcontext() if same else pytest.raises(UserError, match=r"other settings.*sequences of a pass"):
        check_same_run(over(MeshConfig(fsdp=2), 2), over(mesh, microbatch), tmp_path)


@pytest.mark.parametrize(
    ("part", "changes"),
    [("train", {"eval_every": 2, "save_every": 3, "remat": True, "keep": 5}), ("data", {"batch_size": 2})],
)
def test_settings_that_change_no_weights_do_not_stand_in_the_way(config, model, tmp_path, part, changes):
    Trainer(config, model, tmp_path / "run", resume=False)
    changed = dataclasses.replace(config, **{part: dataclasses.replace(getattr(config, part), **changes)})
    Trainer(changed, model, tmp_path / "run", resume=True)
