"""What train.py says before it trains."""

import json

from jaxspec.cli import train


def test_a_config_is_shown_with_what_was_changed(capsys):
    train.main(["--config", "ppd_smollm2", "--show", "--method.ensemble", "4", "--train.steps", "7"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["method"]["ensemble"] == 4 and shown["train"]["steps"] == 7 and shown["method"]["name"] == "ppd"


def test_help_without_a_config_lists_them_by_paper(capsys):
    train.main(["--help"])
    out = capsys.readouterr().out
    assert "--config NAME" in out and "\n  bita: bita_7b, bita_13b, bita_70b, " in out
