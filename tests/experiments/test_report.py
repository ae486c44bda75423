"""The page of ablations, and the run that measures what it shows."""

import json
from pathlib import Path

import pytest

from experiments import ablate
from experiments.decoding_studies import DECODING_STUDIES, SAMPLED
from experiments.report import Section, not_run, verdicts_table, write_report
from experiments.studies import STUDIES, Conclusion, Training, study
from experiments.verdicts import Verdict
from jaxspec.errors import UserError
from jaxspec.files import exclusive
from jaxspec.methods import PPD
from tests.helpers.experiments import RATE, SMALL

DOCS = Path("docs")
NOTHING = {part: {} for part in ablate.PARTS}


def test_the_page_is_made_from_its_results(tmp_path):
    page = write_report(json.loads((DOCS / "ablations.json").read_text()), tmp_path)
    assert page.read_text() == (DOCS / "ablations.md").read_text()
    for picture in ("ablations-curves.png", "ablations-similarity.png"):
        assert (tmp_path / picture).stat().st_size > 5000


def test_verdicts_are_counted_by_table_and_ours_apart():
    paper, ours = Conclusion("", "", "a paper's"), Conclusion("", "", "our own", ours=True)
    holds, fails = Verdict("holds", "0.1"), Verdict("does not hold", "0.2")
    sections = [Section("A", ["text"], [(paper, holds), (paper, fails), (ours, fails)]), Section("B", [])]
    sections.append(Section("C", [], [(paper, holds)]))
    assert verdicts_table(sections).splitlines()[2:] == [
        "| A | 1 | 1 |  |  |  |  |",
        "| C | 1 |  |  |  |  |  |",
        "| **all of the papers'** | 2 | 1 |  |  |  |  |",
        "| questions of ours |  | 1 |  |  |  |  |",
    ]
    said = ["- a paper's: **holds** (0.1)", "- a paper's: **does not hold** (0.2)"]
    said.append("- our own: **does not hold** (0.2), our question")
    assert sections[0].markdown() == "\n\n".join(["### A", "text", "\n".join(said)])


def test_what_is_missing_is_known():
    assert len(not_run(NOTHING)) == len(STUDIES) + len(DECODING_STUDIES) + 4
    timed, untimed = ({label: {"seconds": seconds} for label in "12345"} for seconds in ([1.0], []))
    some = {
        "trainings": {"ppd_exits": {label: {} for label in "123"}, "ppd_epts": {"1": {}}},
        "decoding": {"bita_masks_speed": timed, "space_masks_speed": untimed},
        "acceptance": {next(iter(SAMPLED)): {}},
    }
    missing = not_run(NOTHING | some)
    assert {"ppd_epts", "space_masks_speed", "acceptance"} <= {*missing}
    assert not {"ppd_exits", "bita_masks_speed"} & {*missing}


def test_what_is_asked_for_is_run_with_what_it_needs():
    assert ablate.choose(("bita_masks_speed",), []) == {"bita_masks_speed", "bita_masks"}
    assert ablate.choose(("ppd_exits",), ["steps"]) == {"ppd_exits"}
    assert ablate.choose((), ["steps", "bita_masks_speed"]) == {"steps", "bita_masks_speed", "bita_masks"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--studies", "bita_promting"], "did you mean 'bita_prompting'"),
        (["--steps", "0"], "must be at least 1"),
        (["--report"], "no results there"),
    ],
)
def test_bad_options_are_named(args, message, tmp_path):
    with pytest.raises(UserError, match=message):
        ablate.main([*args, "--docs", str(tmp_path)])


@pytest.mark.slow
def test_a_run_writes_results_and_the_page(model, base_run, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ablate, "STUDIES", SMALL)
    monkeypatch.setattr(ablate, "load_model", lambda name: model)
    monkeypatch.setattr(ablate, "base_run", lambda options: base_run)
    args = ["--studies", "entry", "--output", str(trained[0]), "--docs", str(tmp_path)]
    ablate.main(args)
    assert capsys.readouterr().out == f"written to {tmp_path / 'ablations.md'}\n"
    saved = json.loads((tmp_path / "ablations.json").read_text())
    assert saved["trainings"] == {"entry": trained[1]["entry"]} and saved["setting"]["machine"] == ""  # nothing timed
    assert "or recorded no intervals: `seeds`," in (tmp_path / "ablations.md").read_text()
    with pytest.raises(UserError, match="results of another setting"):
        ablate.main([*args, "--steps", "9"])
    with exclusive(tmp_path), pytest.raises(UserError, match="another process is writing there"):
        ablate.main(args)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"wrong"}, "train.ema must be at least 0 and below 1"),
        ({"entry", "bita_decoding"}, "no adapter of bita ships"),
        ({"entry", "similarity"}, f"no adapter of {ablate.WATCHED} ships"),
        ({"entry", "coverage"}, f"no adapter of {ablate.COUNTED} ships"),
        ({"entry", "acceptance"}, "no adapter of .* ships"),
    ],
)
def test_what_cannot_run_is_named_before_anything_is_trained(names, message, model, base_run, monkeypatch):
    wrong = study("wrong", "Wrong", "a paper", {"0": Training(PPD(), RATE), "1": Training(PPD(), {"ema": 1.0})})
    monkeypatch.setattr(ablate, "STUDIES", (*SMALL, wrong))
    monkeypatch.setattr(ablate, "load_model", lambda name: model)
    monkeypatch.setattr(ablate, "base_run", lambda options: base_run)
    monkeypatch.setattr(ablate, "train_study", lambda *args: pytest.fail("trained"))
    with pytest.raises(UserError, match=message):
        next(ablate.measure(ablate.Options(), names))


def test_sampling_resumes_behind_the_last_drafter_or_begins_again(model, base_run, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(ablate, "load_model", lambda name: model)
    monkeypatch.setattr(ablate, "base_run", lambda options: base_run)
    monkeypatch.setattr(ablate, "open_adapter", lambda *args: None)
    monkeypatch.setattr(ablate, "load_drafter", lambda *args, **settings: None)
    monkeypatch.setattr(ablate, "measure_acceptance", lambda label, *rest: asked.append(label) or {})
    monkeypatch.setattr(ablate, "write_report", lambda results, docs: docs)
    first, *others = SAMPLED
    (tmp_path / "ablations.json").write_text(json.dumps({"acceptance": {first: {}}}))
    for _ in range(2):
        ablate.main(["--studies", "acceptance", "--docs", str(tmp_path)])
    assert asked == [*others, first, *others]


def test_what_is_timed_is_timed_on_one_machine(tmp_path, monkeypatch):
    def setting(machine, names, before):
        monkeypatch.setattr(ablate, "device_name", lambda: machine)
        return ablate.check_setting(ablate.Options(), names, before, tmp_path)

    untimed = setting("one", {"ppd_exits"}, {})
    timed = setting("one", {"steps"}, untimed)
    assert (untimed["machine"], timed["machine"]) == ("", "one")
    assert setting("another", {"ppd_exits"}, timed) == timed
    with pytest.raises(UserError, match="another setting"):
        setting("another", {"bita_decoding"}, timed)
