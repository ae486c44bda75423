"""The experiment on options of EAGLE and DFlash: what it trains, keeps and prints."""

import json

import pytest

from experiments import parts
from jaxspec.errors import UserError

ROW = {"tokens_per_step": {"4": 1.5, "16": 1.9, "64": 2.1}, "accuracy": [[0.5, 0.1], [0.25, 0.1]], "parameters": 5e6}


@pytest.fixture
def trained(monkeypatch):
    """Names that were trained, in place of a training."""
    names = []

    def note(lab, name, updates):
        names.append((name, updates))
        return ROW

    monkeypatch.setattr(parts, "train_part", note)
    return names


def test_what_was_trained_is_not_trained_again(trained, tmp_path, capsys):
    folder = ["--work", str(tmp_path), "--output", str(tmp_path)]
    parts.main(["--only", "selector", "--updates", "7", *folder])
    parts.main(["--only", "dflash", "--updates", "7", *folder])
    both = ["dflash, selector", "dflash, convolution and selector"]
    remaining = ["dflash", "dflash, convolution", "dflash as published"]
    assert trained == [(name, 7) for name in both + remaining]
    trainings = json.loads((tmp_path / "parts.json").read_text())
    assert [*trainings] == [name for name in parts.METHODS if name.startswith("dflash")]
    assert "| dflash, selector | 1.50 | 1.90 | 2.10 | .500 / .250 | 5.0 |" in capsys.readouterr().out


def test_a_name_that_is_none(trained, tmp_path):
    with pytest.raises(UserError, match="none has ppd in its name; there are: eagle; eagle, a norm for each tap"):
        parts.main(["--only", "ppd", "--work", str(tmp_path), "--output", str(tmp_path)])


def test_every_part_is_one_step_from_its_method():
    """Options are added one by one, but for the two that belong together and those of published forms."""
    settings = {name: vars(method) for name, method in parts.METHODS.items()}
    for name in settings:
        method = name.split()[0].strip(",")
        changed = {key for key, value in settings[name].items() if value != settings[method][key]}
        assert len(changed) == (0 if name == method else 2 if " and " in name else 1) or "as published" in name
