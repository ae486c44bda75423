"""Settings that can train, and those that cannot."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from jaxspec.errors import UserError
from jaxspec.methods import METHODS, PPD, BiTA, HiddenTransfer
from jaxspec.training.configs import load_config, load_configs, load_papers, split_config_name
from jaxspec.training.run_config import check_config
from jaxspec.weights.shapes import SHAPES


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("train", {"steps": 0}, "train.steps"),
        ("train", {"save_every": 0}, "train.save-every"),
        ("train", {"eval_every": -1}, "train.eval-every"),
        ("train", {"keep": 0}, "train.keep"),
        ("train", {"ema": 1.0}, "train.ema"),
        ("train", {"microbatch": -1}, "train.microbatch must be at least 0"),
        ("train", {"microbatch": 3, "batch_size": 4}, "must divide train.batch-size 4, got 3"),
        ("mesh", {"data": 4}, "must divide train.batch-size"),
        ("mesh", {"fsdp": 0}, "at least 1"),
        ("train", {"warmup": 12}, "train.warmup"),
        ("train", {"learning_rate": 0.0}, "learning-rate"),
        ("train", {"clip": -1.0}, "train.clip must be at least 0, got -1.0"),
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


@pytest.mark.parametrize("layers", [range(33), pytest.param(range(33, 99), marks=pytest.mark.slow)], ids=str)
def test_every_config_loads_and_can_train(layers):
    configs = load_configs()
    assert {"ppd_smollm2", "ppd_vicuna_7b", "ppd_vicuna_13b", "ppd_mobilellama_1_4b"} <= set(configs)
    for config in configs.values():
        if config.shapes.num_layers in layers:
            check_config(config)


def test_every_paper_has_a_file_of_runs_that_bear_its_name():
    papers = load_papers()
    assert set(papers) == {name for name, method in METHODS.items() if method.trainable}
    for paper, runs in papers.items():
        assert runs and all(name.startswith(f"{paper}_") for name in runs)
        assert all(run.method.name == paper and run.model in SHAPES for run in runs.values())


def test_two_runs_of_one_name_are_refused(tmp_path, monkeypatch):
    for name in ("ppd.py", "mine.py"):
        shutil.copy(Path("configs") / "ppd.py", tmp_path / name)
    monkeypatch.setattr("jaxspec.training.configs.shipped_folder", lambda name: tmp_path)
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


@pytest.mark.parametrize(("base", "rows"), [("mobilellama_1_4b", 285), ("vicuna_7b", 105), ("vicuna_13b", 60)])
def test_configs_of_ppd_are_its_thesis(base, rows):
    """Sections 4.3.2 and 6.1.2, Table 6.1."""
    config = load_config(f"ppd_{base}")
    assert config.method == PPD(distances=3, ensemble=1, objective="distillation", decay=0.8)
    train = config.train
    assert (train.learning_rate, train.schedule, train.warmup, train.batch_size) == (1e-2, "cosine", 0, 4)
    assert train.steps * train.batch_size == 2 * config.data.answers and train.sequence_length == 1024  # two epochs
    assert config.data.regenerate and config.tree == f"dynamic:{rows}"


@pytest.mark.parametrize("base", ["llama2", "vicuna"])
@pytest.mark.parametrize(("size", "layers"), [("7b", (15, 20, 25)), ("13b", (25, 30, 35))])
def test_configs_of_hidden_transfer_are_its_papers(base, size, layers):
    """Sections 3.3 and 4.1; the third layer is not published."""
    method = load_config(f"hidden_transfer_{base}_{size}").method
    assert method == HiddenTransfer(layers=layers, training="separate", train_visibility="real", direction="reverse")


def test_an_unknown_config_is_refused_with_a_suggestion():
    with pytest.raises(UserError, match="did you mean 'ppd_smollm2'") as refused:
        load_config("ppd_smolm2")
    assert "\n  bita: bita_7b, bita_13b, bita_70b, " in str(refused.value)
    with pytest.raises(UserError, match="--config NAME"):
        split_config_name(["--train.steps", "3"])
    assert split_config_name(["--a", "1", "--config", "x", "--b"]) == ("x", ["--a", "1", "--b"])
