"""Settings that can train, and those that cannot."""

import dataclasses
import math
import shutil
from pathlib import Path

import pytest

from jaxspec.decoding.method import Method
from jaxspec.drafters import METHODS
from jaxspec.errors import UserError
from jaxspec.methods import PPD, Amphista, BiTA, Eagle, HiddenTransfer, Hydra, Medusa
from jaxspec.training.run_config import check_config, load_config, load_configs, load_papers, split_config_name
from jaxspec.training.settings import TextSource
from jaxspec.weights.shapes import SHAPES
from tests.helpers.tiny import TINY


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("train", {"steps": 0}, "train.steps"),
        ("train", {"save_every": 0}, "train.save-every"),
        ("train", {"eval_every": -1}, "train.eval-every"),
        ("train", {"keep": 0}, "train.keep"),
        ("train", {"lengths": 0}, "train.lengths must be at least 1, got 0"),
        ("train", {"together": -1}, "train.together must be at least 0, got -1"),
        ("train", {"ema": 1.0}, "train.ema"),
        ("train", {"microbatch": -1}, "train.microbatch must be at least 0"),
        ("train", {"microbatch": 3, "batch_size": 4}, "must divide train.batch-size 4, got 3"),
        ("mesh", {"data": 4}, "must divide train.batch-size"),
        ("mesh", {"fsdp": 0}, "at least 1"),
        ("train", {"warmup": 12}, "train.warmup"),
        ("train", {"learning_rate": 0.0}, "learning-rate"),
        ("train", {"final_learning_rate": 1.5}, "between 0 and 1, got 1.5"),
        ("train", {"clip": -1.0}, "train.clip must be at least 0, got -1.0"),
        ("train", {"seed": -1}, "train.seed"),
        ("data", {"held_out_seed": -1}, "data.held-out-seed"),
        ("train", {"sequence_length": 16}, "no room for an answer"),
        ("data", {"held_out": 0}, "data.held-out"),
        ("data", {"held_out_tokens": 10_000}, "do not fit"),
        ("data", {"held_out_tokens": 0}, "held-out-tokens"),
        (
            "data",
            {"mixture": (TextSource("a", weight=2.0), TextSource("b", weight=-1.0))},
            "not be negative, .* got 2.0, -1.0",
        ),
        ("data", {"mixture": (TextSource("a", weight=0.0), TextSource("b", weight=0.0))}, "nor all 0, got 0.0, 0.0"),
        ("data", {"mixture": (TextSource("a", weight=math.nan),)}, "weights must"),
        ("data", {"prompts": "", "mixture": (TextSource("a"),), "column": "q"}, "--data.mixture.0.column"),
        ("data", {"template": "vicunna"}, "did you mean 'vicuna'"),
        ("data", {"templates": ("vicuna", "vicuna")}, "each once"),
        ("data", {"templates": ("llama2", "vicunna")}, r"unknown template 'vicunna' \(did you mean 'vicuna'\?\)"),
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
    assert set(papers) == {name for name, method in METHODS.items() if method().facts(TINY).trained}
    for paper, runs in papers.items():
        stem = paper.removesuffix("_model")
        assert runs and all(name.startswith(f"{stem}_") for name in runs)
        assert all(run.method.name == paper and run.model in SHAPES for run in runs.values())


def test_two_runs_of_one_name_are_refused(tmp_path, monkeypatch):
    for name in ("ppd.py", "mine.py"):
        shutil.copy(Path("configs") / "ppd.py", tmp_path / name)
    monkeypatch.setattr("jaxspec.training.run_config.shipped_folder", lambda name: tmp_path)
    with pytest.raises(UserError, match=r"ppd\.py: another file has a run 'ppd_vicuna_7b' too"):
        load_config("ppd_smollm2")


def test_a_file_that_cannot_be_read_concerns_its_own_runs_alone(tmp_path, monkeypatch):
    shutil.copy(Path("configs") / "ppd.py", tmp_path)
    (tmp_path / "mine.py").write_text("from elsewhere import Mine")
    monkeypatch.setattr("jaxspec.training.run_config.shipped_folder", lambda name: tmp_path)
    assert load_config("ppd_smollm2").method.name == "ppd"
    with pytest.raises(UserError, match=r"mine\.py: cannot be read \(No module named 'elsewhere'\)"):
        load_config("mine")


@pytest.mark.parametrize("name", ["bita_7b", "bita_13b", "bita_70b", *(f"bita_vicuna_{n}b" for n in (7, 13, 33))])
def test_configs_of_bita_are_its_papers(name):
    """Section 4.1."""
    config, large = load_config(name), name.endswith(("33b", "70b"))
    assert config.method == BiTA(distances=4 if large else 3, prompting="deep", prompts=16, objective="hard")
    train, data = config.train, config.data
    assert (train.learning_rate, train.schedule, train.warmup, train.batch_size) == (3e-2, "cosine", 0, 128)
    assert train.steps * train.batch_size == 4 * data.answers and train.insertions == 64  # four epochs
    assert config.tree == "efficient:5" and train.clip == 1
    assert [source.weight for source in data.text_sources] == [1029, 52002, 20022, 24926, 50000]  # Table 5
    family = "vicuna" if "vicuna" in name else "llama2"
    assert data.templates == (family, f"{family}-short") and data.answers == 300000
    assert train.sequence_length == data.max_prompt_tokens + data.max_answer_tokens == 2048


@pytest.mark.parametrize("name", ["space_llama2_7b", "space_llama2_13b", "space_llama2_70b", "space_qwen_14b"])
def test_configs_of_space_are_its_papers(name):
    """Section 4.1 and A.1."""
    config, large = load_config(name), name.endswith("70b")
    train, data = config.train, config.data
    assert (train.learning_rate, train.schedule, train.batch_size) == (5e-5, "cosine", 128 if large else 32)
    assert 0 <= 2 * data.answers - train.steps * train.batch_size < train.batch_size  # two epochs
    assert [source.weight for source in data.text_sources] == [48818, 52002, 1029, 20202, 20022, 24926]  # Table 3
    assert data.answers == 166999 and all(
        s.answer_column == "output" or s.column != "instruction" for s in data.text_sources
    )


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
    """Sections 3.3, 4.1 and 4.2; the third layer is not published, nor the direction of the divergence."""
    config = load_config(f"hidden_transfer_{base}_{size}")
    assert config.method == HiddenTransfer(
        layers=layers, training="separate", train_visibility="real", objective="distillation"
    )
    train = config.train
    assert train.steps * train.batch_size == 3 * config.data.answers  # an epoch for every map
    assert train.positions == "text" and train.insertions == train.sequence_length  # at all of them


@pytest.mark.parametrize(
    ("method", "epochs", "batch", "recipe"),
    [
        (Medusa(heads=3, blocks=1, lm_head="full", decay=0.8), 2, 128, {"learning_rate": 1e-3, "warmup": 106}),
        (
            Hydra(
                heads=4, blocks=4, lm_head="full", prefix_attention=True, alignment=1.0, labels=0.0, dropout=0.2
            ),
            10, 32,
            {"learning_rate": 5e-4, "final_learning_rate": 0.33, "warmup": 100, "weight_decay": 0.1},
        ),
        (Amphista(heads=4, lm_head="full", alignment=1.0, labels=1.0), 4, 8, {"learning_rate": 1e-3}),
    ],
    ids=lambda value: value.name if isinstance(value, Method) else "",
)  # fmt: skip
@pytest.mark.parametrize("size", ["7b", "13b", "33b"])
def test_configs_of_heads_are_their_papers(size, method, epochs, batch, recipe):
    """The READMEs of Medusa and Hydra, and section 4.1 and A.1 of Amphista, whose batch is not published."""
    config = load_config(f"{method.name}_vicuna_{size}")
    train, conversations = config.train, 68000
    assert config.method == method and train.batch_size == batch
    assert train.steps == epochs * conversations // batch and config.data.answers == conversations
    expected = {"clip": 1.0, "schedule": "cosine", "beta1": 0.9, "beta2": 0.999, "sequence_length": 2048} | recipe
    assert {name: getattr(train, name) for name in expected} == expected
    assert (config.tree == "medusa:64") == (method.name == "amphista")
    assert config.data.max_prompt_tokens + config.data.max_answer_tokens == 2048  # later turns are learned too


@pytest.mark.parametrize(("base", "tokens"), [("llama3_8b", 32000), ("vicuna_7b", 0), ("vicuna_13b", 0)])
def test_configs_of_eagle_are_its_script(base, tokens):
    """The released settings of EAGLE-3's training."""
    config = load_config(f"eagle_{base}")
    assert config.method == Eagle(depth=8, unroll=7, vocabulary=tokens, own_head=True, start="random")
    train = config.train
    assert (train.learning_rate, train.schedule, train.warmup, train.steps) == (5e-5, "linear", 12000, 800000)
    assert (train.batch_size, train.beta1, train.beta2, train.clip) == (16, 0.9, 0.95, 0.5)
    assert all(source.regenerate for source in config.data.text_sources) and config.draft_vocabulary == tokens


def test_an_unknown_config_is_refused_with_a_suggestion():
    with pytest.raises(UserError, match="did you mean 'ppd_smollm2'") as refused:
        load_config("ppd_smolm2")
    assert "\n  bita: bita_7b, bita_13b, bita_70b, " in str(refused.value)
    with pytest.raises(UserError, match="--config NAME"):
        split_config_name(["--train.steps", "3"])
    assert split_config_name(["--a", "1", "--config", "x", "--b"]) == ("x", ["--a", "1", "--b"])
