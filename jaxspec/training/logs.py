"""What a run says of itself on the way: a JSONL file, and TensorBoard where that is wanted."""

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
    """Raise UserError where the package that writes for TensorBoard, an extra, is not installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise UserError("train.tensorboard needs a package; install it with: pip install tensorboardX")


class RunLog(contextlib.AbstractContextManager):
    """Rows of figures, each with its `step`; of several processes the first one writes them.

    Args:
      folder: of log.jsonl and tensorboard/.
      tensorboard: whether to write for TensorBoard too.
      done: updates of the checkpoint that the run resumes from; TensorBoard forgets what it was told of later ones.
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
        """Append a row. Raises UserError where the disk takes no more."""
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
        """Figures by name; those of several distances by distance."""
        step, answers = row.pop("step"), row.pop("held_out", None)
        part = f"held-out-{answers}" if answers else "training"  # on the way, and of the adapter
        for name, value in row.items():
            values = {f"/{d}": v for d, v in enumerate(value, 1)} if isinstance(value, list) else {"": value}
            for distance, number in values.items():
                self._writer.add_scalar(f"{part}/{name}{distance}", number, step)
