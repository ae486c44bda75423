"""Tuning, and decoding with what it has chosen."""

import json
import shutil

import pytest

from jaxspec.cli import decode, tune
from jaxspec.drafters import costs
from jaxspec.drafters.defaults import cost_name, with_default
from jaxspec.methods import Suffix
from tests.helpers.cli import arguments, named
from tests.helpers.methods import union
from tests.helpers.tiny import make_text_model

pytestmark = pytest.mark.usefixtures("equal_layouts")


def test_tune_measures_and_tries_and_decode_takes_its_choice(files, tmp_path, capsys):
    files = shutil.copytree(files, tmp_path / "files")
    small = ["--cache-length", "64", "--max-rows", "8", "--num-prompts", "2", "--finalists", "1", "--also", "sparse:3"]
    prompts = ["--prompts", str(files / "prompts.jsonl"), "--max-new-tokens", "8", "--accuracy-prompts", "1"]
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "tree.json").write_text("of an earlier tuning")
    tune.main([*named(files), *small, *prompts, "--output", str(tmp_path / "tuned"), "--json"])
    out, err = capsys.readouterr()
    result = json.loads(out)
    tree = tmp_path / "tuned" / "tree.json"
    fixed = result["tree"] is not None and not isinstance(result["tree"], str)  # else nothing, or best:ROWS, has won
    assert "of an earlier tuning" not in tree.read_text() if fixed else not tree.exists()
    names = [trial["name"] for trial in result["trials"]]
    assert names[0] == "autoregressive" and names[-1] == "ppd sparse:3" and len(names) >= 3
    assert all(trial["identical"] == 2 for trial in result["trials"])
    assert result["rows"][0] == 1 and "measuring: " in err
    assert (tmp_path / "tuned" / "tuning.png").stat().st_size > 5000
    assert "layouts: " in err and (tmp_path / "layouts.json").exists()

    def decode_with(*options):
        decode.main(arguments(files, "--prompt", "some words", "--json", *options))
        out, err = capsys.readouterr()
        return json.loads(out), err

    if result["tree"]:
        row, _ = decode_with("--tree", str(tree) if fixed else result["tree"], "--compare")
        assert row["identical_to_autoregressive"]
    kept = files / "adapter" / "tuned.json"
    (tmp_path / "tuned" / "tuned.json").rename(kept)
    row, err = decode_with("--tree", "auto")
    chosen = "autoregressive" if result["choice"] == "autoregressive" else "ppd"
    assert row["method"] == chosen and ("tuned" in err) == (chosen == "ppd")
    kept.write_text("{")  # damage is told and stops nothing
    _, err = decode_with()
    assert "warning: " in err


def test_quick_measures_rows_and_the_default_takes_them(files, capsys):
    costs.FILE.write_text("[]")
    tune.main([*named(files), "--quick", "--cache-length", "64", "--json"])
    out, err = capsys.readouterr()
    assert f"{costs.FILE} is damaged: it is replaced" in err
    found = json.loads(out)
    assert found["rows"][0] == 1 and len(found["greedy_milliseconds"]) == len(found["sampled_milliseconds"]) > 2
    assert found["choice"].startswith("best:1@") and "measuring: " in err and "written to " in err

    def decode_once():
        decode.main(arguments(files, "--prompt", "some words"))
        return capsys.readouterr().err

    assert "costs of rows" not in decode_once()  # they were measured
    costs.FILE.write_text("[]")
    assert f"{costs.FILE} is damaged: costs of rows are typical ones of a CPU" in decode_once()


def test_costs_are_shown_beside_those_of_one_row():
    drafter = union([Suffix()], make_text_model(), 8)
    measured = costs.RowCosts((1.0, 8.0), ((20.0, 30.0), (25.0, 40.0)), {cost_name(drafter): (0.5, 1.0)})
    table = tune.costs_table(with_default(drafter, costs=measured), measured).splitlines()
    assert table[0].split() == ["rows", "greedy", "ms", "sampled", "ms"]
    assert table[2].split() == ["8", "30.0", "(1.50)", "40.0", "(1.60)"]
    assert table[3] == "suffix drafts in 0.5 ms, sampled in 1.0 ms" and table[4].startswith("choice: best:1@")


@pytest.mark.slow
def test_a_union_is_tuned_and_decode_takes_what_was_chosen(files, tmp_path, capsys, monkeypatch):
    """Whatever wins on this machine, the union is asked for and what was chosen of it decodes."""
    monkeypatch.setenv("HOME", str(tmp_path))
    small = ["--cache-length", "64", "--max-rows", "8", "--num-prompts", "1", "--accuracy-prompts", "1"]
    options = ["--prompts", str(files / "prompts.jsonl"), "--max-new-tokens", "8", "--finalists", "1"]
    tune.main([*named(files), "--method", "ppd+token_recycling", *small, *options, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert len(result["trials"]) == 2 and all(trial["identical"] == 1 for trial in result["trials"])
    assert result["drafting_milliseconds"].keys() == {"ppd", "token_recycling"}
    assert result["file"] == str(tmp_path / ".cache" / "jaxspec" / "unions" / "ppd+token_recycling" / "tuned.json")
    decode.main(arguments(files, "--prompt", "some words", "--json", "--method", "ppd+token_recycling"))
    out, err = capsys.readouterr()
    if result["tree"]:
        assert json.loads(out)["method"] == "+".join(result["sources"]) and "tuned for this machine" in err
    else:
        assert json.loads(out)["method"] == "autoregressive" and "no tree of ppd+token_recycling pays" in err


@pytest.mark.slow
def test_what_to_skip_is_searched_and_kept_as_an_adapter(files, tmp_path, capsys):
    out = tmp_path / "skipped"
    base, prompts = named(files)[:2], ["--prompts", str(files / "prompts.jsonl"), "--accuracy-prompts", "2"]
    small = ["--max-new-tokens", "8", "--trials", "3", "--output", str(out), "--json"]
    tune.main([*base, "--method", "self_speculative", *prompts, *small])
    result = json.loads(capsys.readouterr().out)
    assert result["value"] > 0 and result["file"] == str(out / "adapter.json")
    decode.main(
        [*base, "--method", "self_speculative", "--adapter", str(out), "--prompt", "words", "--compare", "--json"]
    )
    assert json.loads(capsys.readouterr().out)["identical_to_autoregressive"]
