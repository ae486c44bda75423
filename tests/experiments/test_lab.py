"""The lab's queue on a tiny base: states, resuming, waiting, limits of time, and what comes of every kind of job."""

import dataclasses
import json
import math
import os
import re
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.lab.__main__ import compile_quickly, main
from experiments.lab.entries import Entry
from experiments.lab.jobs import Job, all_jobs, scored, trained
from experiments.lab.lab import Lab, identity_of, plain
from experiments.lab.queue import KINDS, Queue, choose
from experiments.lab.recordings import load_recordings, save_recordings
from experiments.lab.scoring import shaped
from experiments.lab.terms import Terms
from experiments.lab.training import compare_updates, further_out, run_of, seconds_of_updates, train_run
from jaxspec.decoding.draft import Offer
from jaxspec.drafters import METHODS, load_drafter
from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.drafter import Drafter
from jaxspec.drafters.source import Source
from jaxspec.errors import UserError
from jaxspec.methods import PPD, Hydra, Medusa, PromptLookup
from jaxspec.training.settings import DataConfig
from jaxspec.trees import from_paths
from jaxspec.tuning.record import Recording
from tests.helpers.tiny import TINY

SMALL = Terms(
    "tiny-text", updates=6, trial_updates=2, sequences=2, insertions=8, held_out=6, live=2, small_vocabulary=64,
    text=DataConfig(answers=16, held_out=3, max_prompt_tokens=192, max_answer_tokens=24, held_out_tokens=24),
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
    done = Queue(lab, jobs, jobs).run(math.inf, said.append)
    assert done == len(jobs), said
    return {job.name: lab.result(job.name) for job in jobs}


def test_a_method_without_training_is_recorded_and_scored(lab, monkeypatch):
    monkeypatch.setattr("experiments.lab.scoring.NODES", (4,))
    *jobs, _ = scored(Entry("prompt_lookup", PromptLookup()), "prompt_lookup")
    score = worked_off(lab, jobs)["prompt_lookup/score"]
    assert [*score["drafts"]] == ["alone-4", "same-4", "own-4"]
    assert all(np.all(np.array(d["steps"]) <= score["tokens"]) for d in score["drafts"].values())


@pytest.mark.slow
def test_a_score_is_checked_by_decoding(lab):
    results = worked_off(lab, list(scored(Entry("prompt_lookup", PromptLookup()), "prompt_lookup")))
    score, live = results["prompt_lookup/score"], results["prompt_lookup/live"]
    assert len(score["tokens"]) == results["prompt_lookup/offers-all"]["answers"] <= 6
    assert [*score["drafts"]] == ["alone-4", "alone-16", "alone-64", "same-64", "own-64"]
    assert live["steps"] == score["drafts"]["alone-16"]["steps"][: len(live["steps"])]
    assert live["identical"] == len(live["tokens"])


@pytest.mark.slow
def test_an_entry_is_trained_with_the_best_rate_recorded_and_scored(lab):
    results = worked_off(lab, list(trained(Entry("ppd", PPD(), 1e-2), 0)))
    rates, training = results["ppd/rates"], results["ppd/seed-0/train"]
    assert {"0.01", "0.0033", "0.03"} <= {*rates["rates"]} and len(rates["rates"]) <= 5
    assert training["learning_rate"] == rates["learning_rate"] == float(max(rates["rates"], key=rates["rates"].get))
    assert training["updates"] == 6 and training["answers_seen"] == 12 and training["parameters"] == 3 * 32
    assert np.shape(training["accuracy"]) == (3, 10)
    assert "alone-16-small" in results["ppd/seed-0/score"]["drafts"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_method_that_drafts_along_paths_is_recorded_with_every_shape(lab):
    """Its replay equals decoding, answer by answer."""
    results = worked_off(lab, list(trained(Entry("hydra", Hydra(heads=2), 1e-3, along_paths=True), 0)))
    score, live = results["hydra/seed-0/score"], results["hydra/seed-0/live"]
    assert {"alone-4", "alone-64", "joined-16", "same-64", "own-64", "alone-16-small"} <= {*score["drafts"]}
    assert live["steps"] == score["drafts"]["alone-16"]["steps"][: len(live["steps"])]


# The queue, on jobs that do nothing


@pytest.fixture
def done(monkeypatch):
    """Jobs of a kind that writes down that it ran; `trouble` of a job is raised instead."""
    ran: list[str] = []

    def do(lab, job):
        ran.append(job.name)
        if trouble := job.settings.get("trouble"):
            raise trouble
        return {"seed": job.seed, "measured": {"watts": 3}}

    kinds = {**KINDS, "nothing": do}
    monkeypatch.setattr("experiments.lab.queue.KINDS", kinds)
    monkeypatch.setattr("experiments.lab.queue._USUAL", {"nothing": 50})
    return ran


def job(name, **settings):
    needs = settings.pop("needs", ())
    return Job(name, "nothing", "nothing at all", settings=settings, needs=needs)


def work_off(lab, jobs, seconds=math.inf):
    said = []
    return Queue(lab, jobs, jobs).run(time.monotonic() + seconds, said.append), said


def test_a_job_waits_for_those_that_it_needs_and_none_runs_twice(lab, done):
    jobs = [job("b/score", needs=("a/train",)), job("a/train"), job("c")]
    queue = Queue(lab, jobs, jobs)
    assert [queue.state(j) for j in jobs] == ["waiting", "ready", "ready"]
    assert work_off(lab, jobs)[0] == 3 and done == ["a/train", "b/score", "c"]
    assert work_off(lab, jobs)[0] == 0 and len(done) == 3
    row = json.loads((lab.results / "a" / "train.json").read_text())
    assert row["result"] == {"seed": 0} and row["measured"] == {"watts": 3} and row["seconds"] >= 0


def test_a_job_that_fails_does_not_end_the_others_and_is_tried_again_when_asked(lab, done):
    jobs = [job("a", trouble=ValueError("no such luck")), job("b", needs=("a",)), job("c")]
    count, said = work_off(lab, jobs)
    assert count == 1 and any("a: failed (no such luck)" in line for line in said)
    queue = Queue(lab, jobs, jobs)
    assert [queue.state(j) for j in jobs] == ["failed", "waiting", "done"]
    assert "Traceback" in lab.failure(jobs[0]).read_text()
    lab.failure(jobs[0]).unlink()
    assert queue.state(jobs[0]) == "ready"


def test_what_another_process_works_on_is_left_to_it(lab, done):
    first, _ = jobs = [job("a"), job("b")]
    queue = Queue(lab, jobs, jobs)
    with lab.claimed(first) as free:
        assert free and queue.state(first) == "running"
        with lab.claimed(first) as again:
            assert not again
        assert work_off(lab, jobs)[0] == 1 and done == ["b"]
    assert queue.state(first) == "ready"


def test_nothing_begins_that_would_not_end_in_time(lab, done, monkeypatch):
    jobs = [job("a"), job("b")]
    count, said = work_off(lab, jobs, seconds=30)
    assert count == 0 and said == [f"{name}: not begun, it takes some 50 s" for name in "ab"]
    monkeypatch.setattr("experiments.lab.queue._USUAL", {"nothing": 20})
    assert work_off(lab, jobs, seconds=30)[0] == 2  # the second by what the first has taken


def test_a_kill_leaves_a_job_to_be_done_again(lab, done):
    jobs = [job("a", trouble=KeyboardInterrupt())]
    with pytest.raises(KeyboardInterrupt):
        work_off(lab, jobs)
    assert Queue(lab, jobs, jobs).state(jobs[0]) == "ready"


def test_a_result_is_of_one_job(lab, done):
    work_off(lab, [job("a", nodes=4)])
    with pytest.raises(UserError, match=r"a.json is of another job \(settings {'nodes': 4}, not {'nodes': 16}\)"):
        work_off(lab, [job("a", nodes=16)])


def test_a_lost_recording_is_made_again_only_where_it_is_needed(lab, done, monkeypatch):
    monkeypatch.setattr("experiments.lab.queue.ARTIFACTS", {"nothing": lambda lab, job: lab.results / "made"})
    jobs = [job("a"), job("b", needs=("a",))]
    row = {"result": {}, "seconds": 1, "device": "this"}
    lab.write(jobs[0], row)
    assert Queue(lab, jobs, jobs).state(jobs[0]) == "ready"
    assert Queue(lab, jobs, jobs[:1]).state(jobs[0]) == "done"
    lab.write(jobs[1], row)
    jobs.append(job("c", needs=("b",)))
    assert [Queue(lab, jobs, jobs).state(j) for j in jobs] == ["ready", "waiting", "waiting"]  # b's is lost, too
    monkeypatch.setattr("experiments.lab.queue.ARTIFACTS", {})
    assert [Queue(lab, jobs, jobs).state(j) for j in jobs] == ["done", "done", "ready"]


def test_a_result_that_was_made_from_an_older_one_is_made_again(lab, done):
    jobs = [job("a"), job("b", needs=("a",))]
    work_off(lab, jobs)
    row = json.loads(lab.file("a").read_text())
    lab.file("a").write_text(json.dumps(row | {"result": {"seed": 7}}))
    assert work_off(lab, jobs)[0] == 1 and done == ["a", "b", "b"]


def test_a_damaged_result_says_what_to_do(lab, done):
    work_off(lab, [job("a")])
    lab.file("a").write_text("{")
    with pytest.raises(UserError, match=r"a.json: .*; remove the file, and run does the job again"):
        work_off(lab, [job("a")])


def test_time_ends_also_while_another_works_on_what_is_needed(lab, done):
    jobs = [job("a"), job("b", needs=("a",))]
    with lab.claimed(jobs[0]):
        began = time.monotonic()
        assert work_off(lab, jobs, seconds=1.5)[0] == 0
        assert time.monotonic() - began < 10


def test_what_an_unfinished_job_of_other_settings_left_is_removed(lab):
    first, other = (Job("x/rates", "rates", "", Entry("ppd", PPD(), rate)) for rate in (0.1, 0.2))
    for again in range(2):
        lab.prepare(first)
        assert (lab.folder(first) / "rates.json").exists() == bool(again)
        (lab.folder(first) / "rates.json").write_text("{}")
    (lab.folder(first) / "rate-0.1").mkdir()
    lab.prepare(other)
    assert [path.name for path in lab.folder(first).iterdir()] == [".rates.json"]


def test_jobs_are_chosen_by_pattern_folder_and_machine():
    jobs = all_jobs()
    names = {job.name for job in choose(jobs, ["hydra", "*/eagle/score"], alone=False, accelerator=False)}
    assert {"hydra/rates", "hydra/seed-2/score", "shipped/eagle/score"} <= names
    assert not any(name.startswith("eagle") for name in names)
    assert not any(job.alone or job.accelerator for job in choose(jobs, [], alone=False, accelerator=False))
    assert all(job.alone for job in choose(jobs, [], alone=True, accelerator=True))
    with pytest.raises(UserError, match=r"no job matches 'medsua' \(did you mean 'medusa'\?\); list shows them all"):
        choose(jobs, ["medsua"], alone=False, accelerator=False)
    with pytest.raises(UserError, match=r"none of the \d+ jobs can run here: \d+ is there only for --alone, \d+ need"):
        choose(jobs, ["device/steps"], alone=False, accelerator=False)


def test_the_table_of_jobs_hangs_together():
    """Every job has a kind and a name of its own, and what it needs comes before it."""
    seen: set[str] = set()
    for job in all_jobs():
        assert job.kind in KINDS and job.name not in seen and {*job.needs} <= seen
        assert plain(identity_of(job))
        seen.add(job.name)


def test_rates_go_on_beyond_an_edge():
    assert further_out({"0.01": 1.2, "0.03": 1.5, "0.0033": 1.1}) == [pytest.approx(0.09)]
    assert further_out({"0.01": 1.2, "0.03": 1.1, "0.0033": 1.3}) == [pytest.approx(0.0011)]
    assert further_out({"0.01": 1.6, "0.03": 1.5, "0.0033": 1.1}) == []
    assert further_out({"0.01": 0.0, "0.03": 0.0, "0.0033": 0.0}) == [pytest.approx(0.0011)]  # all diverged


def test_results_of_other_terms_are_refused(lab):
    lab.check()
    lab.check()
    with pytest.raises(UserError, match=r"holds results of other terms \(updates 6, not 7\); give another --results"):
        Lab(lab.results, lab.work, dataclasses.replace(SMALL, updates=7))
    held = json.loads((lab.results / "terms.json").read_text())
    (lab.results / "terms.json").write_text(json.dumps(held | {"fingerprint": "another base"}))
    with pytest.raises(UserError, match=r"other terms \(fingerprint 'another base', not "):
        lab.check()


def test_recordings_are_read_as_they_were_written(tmp_path, model):
    """Offers with parents, and others; answers of unequal lengths; and what a replay needs of the drafter."""
    rng = np.random.default_rng(0)

    def offer(places, parents):
        tokens = rng.integers(0, 9, (places, 2, 3)).astype(np.int32)
        parent = rng.integers(0, 3, tokens.shape).astype(np.int32) if parents else None
        return Offer(tokens, tokens > 2, np.log(rng.random(tokens.shape)).astype(np.float32), parent)

    recordings = [
        Recording(np.arange(length), [offer(length - 1, True), offer(length - 1, False)]) for length in (3, 5)
    ]
    adapter = Adapter(Medusa(heads=2), {}, "", {"accuracy": [[0.5] * 10] * 2, "tree": "not needed"})
    sources = (Source(adapter.method, {}, TINY, adapter), Source(PromptLookup(), {}, TINY))
    save_recordings(tmp_path / "offers.npz", recordings, Drafter(sources, model, from_paths([])))
    read, drafter = load_recordings(tmp_path / "offers.npz", model)
    jax.tree.map(np.testing.assert_array_equal, [r.offers for r in read], [r.offers for r in recordings])
    assert [r.answer.tolist() for r in read] == [[0, 1, 2], [0, 1, 2, 3, 4]]
    assert [source.method for source in drafter.sources] == [Medusa(heads=2), PromptLookup()]
    assert drafter.sources[0].accuracy == [[0.5] * 10] * 2 and drafter.sources[0].trained
    (tmp_path / "offers.npz").write_bytes(b"PK")
    with pytest.raises(UserError, match=r"offers.npz: no recording that can be read .*; remove the job's result"):
        load_recordings(tmp_path / "offers.npz", model)


def test_a_device_that_computes_something_else_is_refused(lab, monkeypatch, tmp_path):
    """The CPU stands for both devices: its own figures pass, and others are named."""
    entry = Entry("ppd", PPD(), 1e-2)
    run = run_of(SMALL, lab.data, entry, 0, 1e-2, 2)
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    train_run(lab, run, tmp_path / "run")
    monkeypatch.setattr("experiments.lab.training._first_update_on_cpu", lambda *_: {"loss": 10.36})
    with pytest.raises(UserError, match=r"otherwise than the CPU beside it: loss .*, not 10\.36"):
        train_run(lab, run, tmp_path / "other")
    with pytest.raises(UserError, match=r"gradient_norm nan, not 10\.2"):
        compare_updates({"gradient_norm": float("nan")}, {"gradient_norm": 10.2})


def test_a_training_is_timed_without_compilation(lab, monkeypatch):
    """Twice as many updates take longer by no more than those: what is compiled counts once."""
    [rates, train] = list(trained(Entry("ppd", PPD(), 1e-2), 0))[:2]
    short = seconds_of_updates(lab, train)
    lab.terms = dataclasses.replace(SMALL, updates=1000)
    assert 0 < short < 60 and seconds_of_updates(lab, train) < 200
    assert seconds_of_updates(lab, rates) > 0


# The command


@pytest.fixture
def methods():
    """Those of the package, whatever a test adds to them."""
    known = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(known)


def folders(tmp_path):
    return ["--results", str(tmp_path / "results"), "--work", str(tmp_path / "work")]


def test_the_list_shows_states_devices_and_seconds(tmp_path, capsys):
    [offers] = [job for job in all_jobs() if job.name == "suffix/offers-all"]
    lab = Lab(tmp_path / "results", tmp_path / "work")
    lab.write(offers, {"result": {}, "seconds": 12.3, "device": "a laptop"})
    main(["list", *folders(tmp_path), "--only", "suffix"])
    lines = capsys.readouterr().out.splitlines()
    assert "| suffix/offers-all | offers | ready |  | some 240 | the leaderboard |" in lines  # its recording is lost
    assert any(line.startswith("| suffix/score | score | waiting |") for line in lines) and lines[-1] == "0 of 3 done"
    (lab.folder(offers) / "recording-all.npz").parent.mkdir(parents=True)
    (lab.folder(offers) / "recording-all.npz").touch()
    main(["list", *folders(tmp_path), "--only", "suffix"])
    lines = capsys.readouterr().out.splitlines()
    assert "| suffix/offers-all | offers | done | a laptop | 12 | the leaderboard |" in lines
    assert any(line.startswith("| suffix/score | score | ready |") for line in lines)


def test_what_the_command_refuses(tmp_path, methods):
    with pytest.raises(UserError, match="no job matches 'suffx'"):
        main(["run", *folders(tmp_path), "--only", "suffx"])
    with pytest.raises(UserError, match="minutes must be at least 0"):
        main(["run", *folders(tmp_path), "--minutes", "-1"])
    (tmp_path / "mine.py").write_text("class Mine:\n    pass\n")
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "ppd.py").write_text("import jaxspec.methods\nclass Other(jaxspec.methods.Suffix):\n    name = 'ppd'\n")
    for word, message in {
        "none.py:Mine": r"none.py:Mine: no such file; give FILE.py:CLASS",
        "README.md:Mine": r"README.md: not a Python file",
        f"{tmp_path}/mine.py:Mine": r"mine.py: holds no method 'Mine'",
        f"{tmp_path}/broken.py:Mine": r"broken.py: cannot be run \(ModuleNotFoundError",
        f"{tmp_path}/ppd.py:Other": r"there is a method 'ppd' already",
    }.items():
        with pytest.raises(UserError, match=message):
            main(["list", *folders(tmp_path), "--enter", word])


def test_a_method_of_the_readers_own_gets_jobs(tmp_path, capsys, methods):
    page = Path("docs/adding-a-method.md").read_text()
    (tmp_path / "bigram.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    main(["list", *folders(tmp_path), "--enter", f"{tmp_path}/bigram.py:Bigram", "--only", "bigram"])
    assert "| bigram/offers-all | offers | ready |" in capsys.readouterr().out


def test_products_of_triton_are_left_out_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    compile_quickly()
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to=x"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "jax_plugins")
    for _ in range(2):
        compile_quickly()
        assert os.environ["XLA_FLAGS"] == "--xla_dump_to=x --xla_gpu_enable_triton_gemm=false"


@pytest.mark.parametrize("name", ["suffix", "lookahead", "jacobi"])
def test_methods_without_accuracies_are_recorded_with_their_own_tree(model, name):
    drafter = load_drafter(name, model)
    assert shaped(drafter, "own", 16).shape == drafter.source.tree
