"""The log of a run: a JSONL file, and on request TensorBoard event files."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from jaxspec.errors import UserError
from jaxspec.files import drop_half_line
from jaxspec.parallel.processes import is_leader


def check_tensorboard() -> None:
    """Raise UserError where tensorboardX, an optional dependency, is not installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise UserError("train.tensorboard needs a package; install it with: pip install tensorboardX")


class RunLog(contextlib.AbstractContextManager):
    """The log: rows of figures, each with its `step`. Only the first of several processes writes.

    Args:
      folder: folder of log.jsonl and tensorboard/.
      tensorboard: whether to write for TensorBoard as well.
      done: updates of the checkpoint that the run resumes from; TensorBoard drops figures of later ones.
    """

    def __init__(self, folder: Path, tensorboard: bool, done: int):
        self._file, self._writer = folder / "log.jsonl", None
        if is_leader():
            drop_half_line(self._file)
        if tensorboard and is_leader():
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)

    def __exit__(self, *error: object) -> None:
        if self._writer:
            self._writer.close()

    def write(self, row: dict[str, Any]) -> None:
        """Append a row. Raises UserError if it cannot be written."""
        if not is_leader():
            return
        try:
            with self._file.open("a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise UserError(f"{self._file}: cannot be written ({error.strerror})") from None
        if self._writer:
            self._draw(dict(row))

    def _draw(self, row: dict[str, Any]) -> None:
        """Write each figure under its name, and by distance where it has several values."""
        step, answers = row.pop("step"), row.pop("held_out", None)
        part = f"held-out-{answers}" if answers else "training"  # fewer answers during training than at the end
        for name, value in row.items():
            values = {f"/{d}": v for d, v in enumerate(value, 1)} if isinstance(value, list) else {"": value}
            for distance, number in values.items():
                self._writer.add_scalar(f"{part}/{name}{distance}", number, step)
