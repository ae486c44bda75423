"""Settings that can train, and those that cannot."""

import dataclasses

import pytest

from jaxspec.errors import UserError
from jaxspec.training.configs import config_names, load_config, split_config_name
from jaxspec.training.run_config import check_config


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
    assert {"ppd_smollm2", "ppd_vicuna_7b", "ppd_vicuna_13b", "ppd_mobilellama_1_4b"} <= set(config_names())
    for name in config_names():
        config = load_config(name)
        check_config(config)


def test_an_unknown_config_is_refused_with_a_suggestion():
    with pytest.raises(UserError, match="did you mean 'ppd_smollm2'"):
        load_config("ppd_smolm2")
    with pytest.raises(UserError, match="--config NAME"):
        split_config_name(["--train.steps", "3"])
    assert split_config_name(["--a", "1", "--config", "x", "--b"]) == ("x", ["--a", "1", "--b"])
