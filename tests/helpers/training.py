"""What a run has left, ways to stop one, and `jaxspec train` in processes of its own, on a tiny base in a folder."""

import contextlib
import dataclasses
import itertools
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from jaxspec.training.folder import Checkpoints
from jaxspec.training.run_config import RunConfig
from jaxspec.training.step import TrainState
from jaxspec.weights.load import save_model
from tests.helpers.files import read_jsonl, write_jsonl
from tests.helpers.tiny import make_text_model


def with_train(config: RunConfig, **changes) -> RunConfig:
    """The run with other settings in `train`."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A limit on the size of files, in the place of a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def weights(folder: Path) -> dict:
    """Of a run's adapter."""
    return safetensors.numpy.load_file(folder / "adapter.safetensors")


def _log(folder: Path, name: str) -> dict[int, float | list[float]]:
    return {row["step"]: row[name] for row in read_jsonl(folder / "log.jsonl") if name in row}


def losses(folder: Path) -> dict[int, float]:
    """By update."""
    return _log(folder, "loss")


def evaluated(folder: Path) -> dict[int, list[float]]:
    """Top-1 accuracies, by update."""
    return _log(folder, "top1")


def best(folder: Path) -> dict | None:
    """What the best adapter so far says of itself, if there is one."""
    file = folder / "best" / "adapter.json"
    return json.loads(file.read_text()) if file.exists() else None


def assert_same_run(run: Path, whole: Path, rtol: float = 0, atol: float = 0) -> None:
    """The same updates, evaluations, adapter and best one, or with a tolerance those that are alike."""
    assert losses(run).keys() == losses(whole).keys() and evaluated(run).keys() == evaluated(whole).keys()
    assert rtol or (evaluated(run), best(run)) == (evaluated(whole), best(whole))
    by_update = ([losses(folder)[step] for step in losses(whole)] for folder in (run, whole))
    np.testing.assert_allclose(*by_update, rtol, atol)
    assert weights(run).keys() == weights(whole).keys()
    for name, value in weights(whole).items():
        np.testing.assert_allclose(weights(run)[name], value, rtol, atol)


def stop_after(asks: int, error: type[BaseException] | None = None) -> Callable[[], bool]:
    """For a run that asks after updates and in evaluations: to stop after having asked so often, or to die there."""
    asked = itertools.count(1)

    def stop() -> bool:
        last = next(asked) == asks
        if last and error:
            raise error
        return last

    return stop


def write_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write checkpoints before training continues.

    A process that dies takes the thread that writes them along; a test that only pretends to die does not.
    """
    real = Checkpoints.save

    def save(checkpoints: Checkpoints, step: int, state: TrainState) -> None:
        real(checkpoints, step, state)
        checkpoints.finish()

    monkeypatch.setattr(Checkpoints, "save", save)


def prepare(folder: Path) -> None:
    """A base and prompts."""
    save_model(make_text_model(), folder / "base")
    write_jsonl(folder / "prompts.jsonl", ({"prompt": f"question {i}"} for i in range(40)))


def command(folder: Path, output: str, *more: str, config: str = "ppd_smollm2") -> list[str]:
    """A short run; `output` names its folder and that of its answers."""
    settings = {
        "model": folder / "base", "output": folder / output, "draft-vocabulary": 0,
        "data.prompts": folder / "prompts.jsonl", "data.cache": folder / f"{output}-answers", "data.answers": 30,
        "data.held-out": 6, "data.max-prompt-tokens": 16, "data.max-answer-tokens": 24, "data.held-out-tokens": 24,
        "data.batch-size": 4, "train.steps": 60, "train.batch-size": 2, "train.sequence-length": 48,
        "train.insertions": 8, "train.save-every": 5, "train.eval-every": 25, "train.warmup": 0, "mesh.data": 1,
    }  # fmt: skip
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "jaxspec", "train", "--config", config, *options, *more]


def start(words: list[str], **environment: str) -> subprocess.Popen:
    """Begin a process of one CPU device."""
    flags = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | flags | environment
    )


def finish(process: subprocess.Popen, code: int = 0) -> str:
    """What it has printed; it must end with this code."""
    try:
        text, _ = process.communicate(timeout=900)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == code, text
    return text
