"""Trainings of studies: shared between tables, done once, resumed where they were killed."""

import dataclasses

import numpy as np
import pytest

import jaxspec.training.trainer
from experiments.trainings import run_name, train_study
from tests.helpers.experiments import SMALL
from tests.helpers.training import write_at_once


@pytest.mark.slow
def test_trainings_are_shared_and_done_once(model, base_run, trained):
    folder, results = trained
    assert len(list(folder.iterdir())) == 2 and results["rates"]["the same"] == results["entry"]["0"]
    rows = results["rates"].values()
    assert [r["training"]["learning_rate"] for r in rows] == [1e-2, 2e-3]
    assert all(np.shape(r["accuracy"]) == (3, 10) and r["answers_seen"] == r["answers"] == 8 for r in rows)
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*.*") if file.is_file()}
    assert {study.name: train_study(study, base_run, model, folder) for study in SMALL} == results
    locks = {file for file in before if file.name.endswith(".lock")}
    assert all(file.stat().st_mtime_ns == before[file] for file in before.keys() - locks)


@pytest.mark.slow
def test_a_killed_training_resumes(model, base_run, trained, tmp_path, monkeypatch):
    write_at_once(monkeypatch)
    real, calls = jaxspec.training.trainer.train_step, []

    def train_step(*args, **settings):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*args, **settings)

    monkeypatch.setattr(jaxspec.training.trainer, "train_step", train_step)
    with pytest.raises(KeyboardInterrupt):
        train_study(SMALL[0], base_run, model, tmp_path)
    again = train_study(SMALL[0], base_run, model, tmp_path)
    assert len(calls) == 4 + 2  # the last checkpoint was after two of four updates
    assert again["0"]["accuracy"] == trained[1]["entry"]["0"]["accuracy"]


def test_another_base_or_other_prompts_are_other_trainings(model, base_run):
    other = dataclasses.replace(base_run, data=dataclasses.replace(base_run.data, prompts=""))
    stranger = dataclasses.replace(model, fingerprint="another")
    assert len({run_name(base_run, model), run_name(other, model), run_name(base_run, stranger)}) == 3
