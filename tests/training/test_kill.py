"""SIGKILL, as a real process gets it."""

import dataclasses
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import safetensors.numpy

from jaxspec.model.hf import save_directory
from tests.tiny import make_text_model


def command(files, output, *more):
    model = make_text_model()
    shapes = [
        word
        for field in dataclasses.fields(model.config)
        if isinstance(value := getattr(model.config, field.name), (int, float)) and not isinstance(value, bool)
        for word in (f"--shapes.{field.name.replace('_', '-')}", str(value))
    ]
    return [
        *(sys.executable, "train.py", "--config", "ppd_smollm2", "--model", str(files / "model")),
        *(*shapes, "--shapes.no-tie-embeddings", "--data.answers", "12", "--data.held-out", "2"),
        *("--data.max-prompt-tokens", "60", "--data.max-answer-tokens", "20", "--data.held-out-tokens", "20"),
        *("--data.cache", str(files / "cache"), "--train.sequence-length", "80", "--train.insertions", "8"),
        *("--train.steps", "60", "--train.save-every", "5", "--train.eval-every", "0", "--output", str(output), *more),
    ]


@pytest.mark.slow
def test_a_training_that_was_killed_resumes_to_the_same_adapter(tmp_path):
    model = make_text_model()
    save_directory(tmp_path / "model", model.config, model.params, model.eos)
    model.tokenizer.save_pretrained(tmp_path / "model")
    subprocess.run(command(tmp_path, tmp_path / "whole"), check=True, capture_output=True)

    killed = subprocess.Popen(command(tmp_path, tmp_path / "killed"), stderr=subprocess.DEVNULL)
    checkpoints = tmp_path / "killed" / "checkpoints"
    while not (checkpoints.exists() and any(int(p.name) >= 10 for p in checkpoints.iterdir() if p.name.isdigit())):
        assert killed.poll() is None, "the run ended before it could be killed"
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert not (tmp_path / "killed" / "adapter.json").exists()

    resumed = subprocess.run(command(tmp_path, tmp_path / "killed", "--resume"), capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stderr
    whole, again = (
        safetensors.numpy.load_file(tmp_path / name / "adapter.safetensors") for name in ("whole", "killed")
    )
    np.testing.assert_allclose(again["embeddings"], whole["embeddings"], rtol=1e-5, atol=1e-6)
