"""One page of several benchmarks."""

import dataclasses
import json
import shutil
import tarfile
from pathlib import Path

import pytest

from experiments import results
from experiments.agreement import agreement, asked_again
from experiments.stored import store, unpacked
from jaxspec.bench.results import load_results
from jaxspec.errors import UserError
from tests.helpers.experiments import benchmark

DOCS = Path("docs")
FOLDERS = (
    "defaults",
    "defaults_sampled",
    "defaults_temperature_1",
    "greedy",
    "code",
    "space",
    "latency",
    "latency_1b",
    "peers",
)


def run_page(output, *folders):
    results.main([*map(str, folders), "--output", str(output)])
    return (output / "results.md").read_text()


@pytest.mark.slow
def test_the_page_is_made_from_its_folders(tmp_path, capsys):
    text = run_page(tmp_path, *(DOCS / "results" / name for name in FOLDERS))
    assert text == (DOCS / "results.md").read_text()
    assert capsys.readouterr().out == f"{tmp_path / 'results.md'}\n"
    assert len(text.splitlines()) < 250
    assert json.loads((tmp_path / "results.json").read_text()).keys() == {*FOLDERS}
    assert all((tmp_path / "results" / name / "answers.tar.xz").exists() for name in FOLDERS if "latency" not in name)
    assert all((tmp_path / f"results-{name}.png").stat().st_size > 5000 for name in FOLDERS)


def test_folders_that_make_no_page_are_named(tmp_path):
    space, latency = DOCS / "results" / "space", DOCS / "results" / "latency"
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        run_page(tmp_path / "file", space)
    for folders, words in (
        ([], "give at least one"),
        ([latency], "give at least one"),
        ([space] * 2, "different names"),
    ):
        with pytest.raises(UserError, match=words):
            run_page(tmp_path / "none", *folders)
    with pytest.raises(UserError, match="no benchmark"):
        run_page(tmp_path / "none", tmp_path)
    assert not (tmp_path / "none").exists()


def test_answers_are_stored_in_one_file_and_read_from_it(tmp_path):
    with unpacked(DOCS / "results" / "space") as folder:
        rows = load_results(folder).rows
        assert folder != DOCS / "results" / "space" and not (DOCS / "results" / "space" / "answers").exists()
        store(folder, tmp_path / "space")
    assert not folder.exists()
    names = {file.name for file in (tmp_path / "space").iterdir()}
    assert names == {"answers.tar.xz", "bench.json", "memory.json", "overhead.json"}
    store(tmp_path / "space", tmp_path / "space")
    with unpacked(tmp_path / "space") as folder:
        assert load_results(folder).rows == rows
    with tarfile.open(tmp_path / "space" / "answers.tar.xz") as archive:
        assert {(entry.uname, entry.uid, entry.mtime) for entry in archive} == {("", 0, 0)}
    (tmp_path / "space" / "answers.tar.xz").write_bytes(b"xz?")
    with pytest.raises(UserError, match=r"answers.tar.xz: damaged"), unpacked(tmp_path / "space"):
        pass


def test_a_second_run_is_shown_beside_the_first(tmp_path):
    again = shutil.copytree(DOCS / "results" / "space", tmp_path / "again")
    text = run_page(tmp_path / "page", DOCS / "results" / "space", again)
    assert text.count("| draft vocabulary |") == 1 and "what both runs measure on 8 questions" in text
    assert not (tmp_path / "page" / "results-again.png").exists()


def test_agreement_by_hand():
    plain = [4.0] * 8
    first = {"autoregressive": plain, "ppd": [2.0] * 8, "medusa": [1.0, 3.0] * 4, "hydra": plain}
    second = {"autoregressive": plain, "ppd": [1.0] * 8, "medusa": [2.0] * 8}
    first, second = (benchmark({way: (times, [2, 2]) for way, times in run.items()}) for run in (first, second))
    assert asked_again(first, second) and not asked_again(second, first)
    lines = agreement(first, second)
    assert "8 questions. 1 of 2 speedups lie" in lines[2] and "Unfinished" not in lines[2]
    longer = dataclasses.replace(second, setting=second.setting | {"questions": 12})
    assert "**Unfinished: 8 of 12 answers of the second are there.**" in agreement(first, longer)[2]
    assert lines[-2:] == [
        "| ppd | 2.000 | 2.000 | 2.00 (2.00 to 2.00) | 4.00 (4.00 to 4.00) | no |",
        "| medusa | 2.000 | 2.000 | 2.67 (1.33 to 4.00) | 2.00 (2.00 to 2.00) | yes |",
    ]
    for changes in ({"device": "another"}, {"settings": {"temperature": 1.0}}, {"ways": {"ppd": {"adapter": "new"}}}):
        assert not asked_again(first, dataclasses.replace(second, setting=second.setting | changes))
