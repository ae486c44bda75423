"""The lab's queue on a tiny base: states, resuming, waiting, limits of time, and what comes of every kind of job."""

import dataclasses
import json

import numpy as np
import pytest

import experiments.lab.queue
from experiments.lab.entries import Entry
from experiments.lab.jobs import Job, all_jobs, scored, trained
from experiments.lab.lab import Lab, identity_of, plain
from experiments.lab.queue import KINDS, Queue, choose
from experiments.lab.terms import Terms
from jaxspec.errors import UserError
from jaxspec.methods import PPD, Hydra, Medusa, PromptLookup

SMALL = Terms(
    "tiny-text", updates=6, trial_updates=2, sequences=2, insertions=8, answers=16, validation=3, held_out=6, live=2,
    answer_tokens=24,
)  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A work folder whose answers are made once."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def lab(model, tmp_path, shared, monkeypatch):
    monkeypatch.setattr("experiments.lab.lab.load_model", lambda name, dtype: model)
    monkeypatch.setattr("experiments.lab.jobs.NODES", (4, 16))
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
