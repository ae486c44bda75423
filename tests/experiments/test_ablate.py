"""What the papers' tables need is trained, measured and written."""

import json

import pytest

from experiments import ablate
from experiments.decoding_studies import DECODING_STUDIES, SAMPLED
from experiments.lab.entries import Entry
from experiments.lab.lab import Lab
from experiments.lab.terms import Terms
from experiments.studies import SpeedRow, Study
from jaxspec.errors import UserError
from jaxspec.files import exclusive
from jaxspec.methods import PPD
from jaxspec.training.settings import DataConfig

SMALL = Terms(
    "tiny-text", updates=2, trial_updates=2, sequences=2, insertions=8, held_out=6, live=2, small_vocabulary=64,
    text=DataConfig(answers=16, held_out=3, max_prompt_tokens=192, max_answer_tokens=24, held_out_tokens=24),
)  # fmt: skip


def test_what_is_missing_is_measured():
    names = {study.name for study in DECODING_STUDIES} | {"steps", "similarity", "coverage", "acceptance"}
    assert ablate.choose((), {}) == names
    one = {"bita_masks_speed": {}, "acceptance": {next(iter(SAMPLED)): {}}}
    assert ablate.choose((), one) == names - {"bita_masks_speed"}
    assert ablate.choose((), {"acceptance": dict.fromkeys(SAMPLED)}) == names - {"acceptance"}
    assert ablate.choose(("steps",), {"steps": {}}) == {"steps"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--studies", "bita_promting_speed"], "did you mean 'bita_prompting_speed'"),
        (["--decode-prompts", "0"], "must be at least 1"),
    ],
)
def test_bad_options_are_named(args, message, tmp_path):
    with pytest.raises(UserError, match=message):
        ablate.main([*args, "--output", str(tmp_path)])


def test_every_measurement_has_a_table():
    cell = {"tokens_per_step": 1.5, "accepted": 0.25}
    ratio = {"against_match": {"value": 2.0, "low": 1.5, "high": 3.0}}
    figures = {
        "coverage": {"1024": 0.75},
        "steps": {"PPD": {"8": 0.01}},
        "similarity": {"step 1": {"11": 0.5, "12": 0.75}, "step 2": {"12": 0.25}},
        "acceptance": {"a chain": {"match": [cell] * 4, "rejection": [cell | ratio] * 4}},
    }
    last = {name: write(figures[name])[-1] for name, (_, write) in ablate.MEASURES.items()}
    assert last == {
        "coverage": "| share | 0.750 |",
        "steps": "| PPD | 10.0 |",
        "similarity": "| step 2 |  | 0.25 |",
        "acceptance": "| a chain | rejection / match |" + " 2.00 (1.50 to 3.00) |" * 4,
    }


@pytest.mark.slow
def test_a_run_trains_what_it_needs_once_and_writes_the_page(model, tmp_path, monkeypatch, capsys):
    study = Study("entry", "Late entry", "a paper", {"0": Entry("0", PPD(), 1e-2)})
    speeds = Study("entry_speed", "Speeds", "a paper", {"chain": SpeedRow(("entry", "0"), "straightforward:3")})
    monkeypatch.setattr("experiments.lab.lab.load_model", lambda name, dtype: model)
    monkeypatch.setattr("experiments.lab.jobs.STUDIES", (study,))
    monkeypatch.setattr(ablate, "STUDIES", (study,))
    monkeypatch.setattr(ablate, "DECODING_STUDIES", (speeds,))
    monkeypatch.setattr(ablate, "Lab", lambda results, work: Lab(results, work, SMALL))
    args = ["--studies", "entry_speed", "--decode-prompts", "2", "--max-new-tokens", "12", "--output", str(tmp_path)]
    args += ["--results", str(tmp_path / "results"), "--work", str(tmp_path / "work")]
    ablate.main(args)
    assert capsys.readouterr().out == f"written to {tmp_path / 'ablations.md'}\n"
    rows = json.loads((tmp_path / "ablations.json").read_text())["measured"]["entry_speed"]
    assert [row["rows"] for row in rows.values()] == [1, 7] and all(row["identical"] == 2 for row in rows.values())
    page = (tmp_path / "ablations.md").read_text()
    assert "## Speeds\n\na paper\n" in page and "Late entry" not in page  # not trained as a job of the lab
    monkeypatch.setattr(ablate, "train_run", None)
    ablate.main(args)
    lab = Lab(tmp_path / "results", tmp_path / "work", SMALL)
    [job] = [job for job in ablate.variants() if job.seed == 0]
    lab.write(job, {"result": {"accuracy": [[0.5] * 10] * 3, "parameters": 96}, "seconds": 1, "device": "this"})
    ablate.main([*args, "--report"])
    assert "| 0 | 1 | 0.500 / 0.500 / 0.500 |" in (tmp_path / "ablations.md").read_text()
    with pytest.raises(UserError, match=r"holds other results \(decode-prompts 2, not 3\); give another --output"):
        ablate.main([*args, "--decode-prompts", "3"])
    with exclusive(tmp_path), pytest.raises(UserError, match="another process is writing there"):
        ablate.main(args)
