"""What a run tells TensorBoard, whose package is an extra: a module of the test's own takes its place."""

import collections
import importlib.machinery
import sys
import types

import pytest

from jaxspec.errors import UserError
from jaxspec.training.logs import RunLog
from jaxspec.training.trainer import Trainer
from tests.helpers.training import losses, stop_after, with_train, write_at_once


@pytest.fixture
def shown(monkeypatch):
    """What TensorBoard would show, (tag, step, value) by folder: what is purged is forgotten."""
    shown = collections.defaultdict(list)

    class Writer:
        def __init__(self, folder, purge_step):
            shown[folder] = self.points = [point for point in shown[folder] if point[1] < purge_step]

        def add_scalar(self, tag, value, step):
            self.points.append((tag, step, value))

        def close(self):
            self.points = None

    module = types.ModuleType("tensorboardX")
    module.__spec__, module.SummaryWriter = importlib.machinery.ModuleSpec("tensorboardX", None), Writer
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    return shown


@pytest.mark.slow
def test_tensorboard_shows_every_update_once(config, model, tmp_path, shown, monkeypatch):
    """Killed behind update 7 and an evaluation, resumed from the checkpoint of update 4."""
    write_at_once(monkeypatch)
    config = with_train(config, tensorboard=True)
    with pytest.raises(KeyboardInterrupt):  # behind two batches of the evaluation
        Trainer(config, model, tmp_path / "run", resume=False, stop=stop_after(5 + 2 + 2, KeyboardInterrupt)).run()
    points = shown[str(tmp_path / "run" / "tensorboard")]
    assert {step for _, step, _ in points} == set(range(1, 8))
    Trainer(config, model, tmp_path / "run", resume=True).run()
    points = shown[str(tmp_path / "run" / "tensorboard")]
    drawn = [(step, value) for tag, step, value in points if tag == "training/loss"]
    assert drawn == list(losses(tmp_path / "run").items())
    assert [step for tag, step, _ in points if tag == "held-out-3/top1/3"] == [5, 10, 12, 12]


def test_a_log_that_cannot_be_written_is_named(tmp_path):
    with RunLog(tmp_path / "gone", False, 0) as log, pytest.raises(UserError, match=r"log\.jsonl: cannot be written"):
        log.write({"step": 1})


def test_tensorboard_is_an_extra(config, model, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = with_train(config, tensorboard=True)
    with pytest.raises(UserError, match="pip install tensorboardX"):
        Trainer(config, model, tmp_path / "run", resume=False)
    assert not (tmp_path / "run").exists()
