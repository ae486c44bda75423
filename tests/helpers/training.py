"""What a run has left, and train.py in processes of its own, on a tiny base in a folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.numpy

from jaxspec.training.checkpoints import Checkpoints
from jaxspec.training.step import TrainState
from jaxspec.weights.load import save_model
from tests.helpers.tiny import make_text_model


def weights(folder: Path) -> dict:
    """Of a run's adapter."""
    return safetensors.numpy.load_file(folder / "adapter.safetensors")


def losses(folder: Path) -> dict[int, float]:
    """By update."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def prepare(folder: Path) -> None:
    """A base and prompts."""
    save_model(make_text_model(), folder / "base")
    prompts = "".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(40))
    (folder / "prompts.jsonl").write_text(prompts)


def command(folder: Path, output: str, *more: str) -> list[str]:
    """A short run; `output` names its folder and that of its answers."""
    settings = {
        "model": folder / "base", "output": folder / output, "draft-vocabulary": 0,
        "data.prompts": folder / "prompts.jsonl", "data.cache": folder / f"{output}-answers", "data.answers": 30,
        "data.held-out": 6, "data.max-prompt-tokens": 16, "data.max-answer-tokens": 24, "data.held-out-tokens": 24,
        "data.batch-size": 4, "train.steps": 60, "train.batch-size": 2, "train.sequence-length": 48,
        "train.insertions": 8, "train.save-every": 5, "train.eval-every": 25, "train.warmup": 0, "mesh.data": 1,
    }  # fmt: skip
    options = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [sys.executable, "train.py", "--config", "ppd_smollm2", *options, *more]


def start(words: list[str], **environment: str) -> subprocess.Popen:
    """Begin a process of one CPU device."""
    flags = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | flags | environment
    )


def write_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write checkpoints before training goes on.

    A process that dies takes the thread that writes them along; a test that only pretends to die does not.
    """
    real = Checkpoints.save

    def save(checkpoints: Checkpoints, step: int, state: TrainState) -> None:
        real(checkpoints, step, state)
        checkpoints.finish()

    monkeypatch.setattr(Checkpoints, "save", save)


def finish(process: subprocess.Popen, code: int = 0) -> str:
    """What it has printed; it must end with this code."""
    try:
        text, _ = process.communicate(timeout=900)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == code, text
    return text
