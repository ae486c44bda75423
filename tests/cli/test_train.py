"""What `jaxspec train` says before it trains."""

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


def test_one_source_takes_the_place_of_a_configs_mixture(capsys):
    for words, sources in (
        (["--data.prompts", "mine.jsonl", "--data.templates"], 0),
        (["--data.mixture.1.weight", "0"], 5),
    ):
        train.main(["--config", "bita_7b", "--show", *words])
        data = json.loads(capsys.readouterr().out)["data"]
        assert len(data["mixture"]) == sources and bool(data["prompts"]) == bool(not sources)
    assert [source["weight"] for source in data["mixture"]] == [1029, 0, 20022, 24926, 50000]
