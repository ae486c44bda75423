"""Checkpoints where the disk is full or damaged."""

import dataclasses
import shutil

import orbax.checkpoint as ocp
import pytest

from jaxspec.errors import UserError
from jaxspec.methods import PPD
from jaxspec.training.trainer import Trainer
from tests.helpers.training import assert_same_run, command, files_of_at_most, finish, prepare, start, with_train


def largest(folder):
    return max(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the writer that failed
def test_whatever_does_not_fit_on_the_disk_is_named_and_the_run_resumes_later(config, model, tmp_path, capsys):
    """First best/, then what is written in the background, then the picture; what was whole stays.

    Orbax spreads arrays over files as its threads come along: a single one must already be larger than the adapter.
    """
    config = with_train(config, eval_every=2, adapter_dtype="float16")
    config = dataclasses.replace(config, method=PPD(ensemble=32))
    whole, run = tmp_path / "whole", tmp_path / "run"
    Trainer(config, model, whole, resume=False).run()
    adapter = largest(whole / "best")
    steps = [
        (adapter - 1, r"best.tmp: the adapter cannot be written there \(File too large\)"),
        (adapter, r"checkpoints: a checkpoint cannot be written \(File too large\); there is no earlier one"),
        (largest(whole) - 1, r"training.png: cannot be written \(File too large\); the adapter beside it is whole"),
    ]
    for size, message in steps:
        with pytest.raises(UserError, match=message), files_of_at_most(size):
            Trainer(config, model, run, resume=(run / "run.json").exists()).run()
    assert not (run / "training.png").exists()
    assert_same_run(run, whole)
    Trainer(config, model, run, resume=True).run()
    assert (run / "training.png").exists()


@pytest.mark.slow
def test_a_full_disk_ends_in_one_line(tmp_path):
    """Orbax would show a traceback for every thread that its error has come through."""
    prepare(tmp_path)
    settings = ("--method.ensemble", "64", "--train.adapter-dtype", "float16")  # an array of a checkpoint is larger
    words = ["bash", "-c", 'ulimit -f 20; exec "$@"', "bash", *command(tmp_path, "run", *settings)]
    text = finish(start(words, JAX_ENABLE_COMPILATION_CACHE="false"), code=2)
    message = "checkpoints: a checkpoint cannot be written (File too large); there is no earlier one"
    assert message in text.splitlines()[-1] and "Traceback" not in text and "ERROR" not in text


@pytest.mark.slow
def test_a_full_disk_keeps_the_last_good_checkpoint(config, model, whole, tmp_path, monkeypatch):
    real, run = ocp.CheckpointManager.save, tmp_path / "run"

    def full_at_8(manager, step, **settings):
        if step == 8:
            raise OSError(28, "No space left on device")
        return real(manager, step, **settings)

    with monkeypatch.context() as patched:
        patched.setattr(ocp.CheckpointManager, "save", full_at_8)
        with pytest.raises(UserError, match=r"checkpoints: .*No space left on device.*; that of step 4 is kept"):
            Trainer(config, model, run, resume=False).run()
    with (run / "log.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')  # what a full disk leaves of a row
    Trainer(config, model, run, resume=True).run()
    assert_same_run(run, whole)


def test_a_damaged_checkpoint_is_named(config, model, whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    for file in (run / "checkpoints" / "12").rglob("*"):
        if file.is_file() and file.stat().st_size > 100:
            file.write_bytes(b"damaged")
    message = "checkpoints/12: this checkpoint cannot be read.*; delete it and continue with --resume from step 8"
    with pytest.raises(UserError, match=message):
        Trainer(config, model, run, resume=True).run()
    shutil.rmtree(run / "checkpoints" / "12")
    Trainer(config, model, run, resume=True).run()
    assert_same_run(run, whole)
