"""The lab's queue on a tiny base: states, resuming, waiting, limits of time, and what comes of every kind of job."""


import numpy as np
import pytest

from experiments.lab.entries import Entry
from experiments.lab.jobs import scored, trained
from experiments.lab.lab import Lab
from experiments.lab.queue import Queue
from experiments.lab.terms import Terms
from jaxspec.methods import PPD, Hydra, PromptLookup

SMALL = Terms(
    "tiny-text", updates=6, trial_updates=2, sequences=2, insertions=8, answers=16, validation=3, held_out=6, live=2,
    answer_tokens=24, small_vocabulary=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A work folder whose answers are made once."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def lab(model, tmp_path, shared, monkeypatch):
    monkeypatch.setattr("experiments.lab.lab.load_model", lambda name, dtype: model)
    return Lab(tmp_path / "results", shared, SMALL)


def worked_off(lab, jobs):
    """The results of jobs, by name."""
    said = []
    done = Queue(lab, jobs, jobs).run(0, said.append)
    assert done == len(jobs), said
    return {job.name: lab.result(job.name) for job in jobs}


def test_a_method_without_training_is_recorded_scored_and_checked(lab):
    results = worked_off(lab, list(scored(Entry("prompt_lookup", PromptLookup()), "prompt_lookup")))
    score, live = results["prompt_lookup/score"], results["prompt_lookup/live"]
    assert len(score["tokens"]) == results["prompt_lookup/offers-all"]["answers"] <= 6
    assert [*score["drafts"]] == ["alone-4", "alone-16", "alone-64", "same-64", "own-64"]
    assert live["steps"] == score["drafts"]["alone-16"]["steps"][: len(live["steps"])]
    assert live["identical"] == len(live["tokens"])


def test_an_entry_is_trained_with_the_best_rate_recorded_and_scored(lab):
    results = worked_off(lab, list(trained(Entry("ppd", PPD(), 1e-2), 0)))
    rates, training = results["ppd/rates"], results["ppd/seed-0/train"]
    assert {"0.01", "0.0033", "0.03"} <= {*rates["rates"]} and len(rates["rates"]) <= 5
    assert training["learning_rate"] == rates["learning_rate"] == float(max(rates["rates"], key=rates["rates"].get))
    assert training["updates"] == 6 and training["answers_seen"] == 12 and training["parameters"] == 3 * 32
    assert np.shape(training["accuracy"]) == (3, 10)
    assert "alone-16-small" in results["ppd/seed-0/score"]["drafts"]


@pytest.mark.slow
def test_a_method_that_drafts_along_paths_is_recorded_with_every_shape(lab):
    """Its replay equals decoding, answer by answer."""
    results = worked_off(lab, list(trained(Entry("hydra", Hydra(heads=2), 1e-3, along_paths=True), 0)))
    score, live = results["hydra/seed-0/score"], results["hydra/seed-0/live"]
    assert {"alone-4", "alone-64", "joined-16", "same-64", "own-64", "alone-16-small"} <= {*score["drafts"]}
    assert live["steps"] == score["drafts"]["alone-16"]["steps"][: len(live["steps"])]
