"""Pictures, drawn without a screen."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxspec.files import write_atomically


@contextlib.contextmanager
def picture(file: Path, rows: int, columns: int, size: tuple[float, float], dpi: int) -> Iterator[list[Any]]:
    """Panels to draw in, written to a file at the end.

    Args:
      file: PNG to write.
      rows: of panels.
      columns: likewise.
      size: of the whole, in inches.
      dpi: dots per inch.

    Yields:
      The panels' axes, row by row.
    """
    from matplotlib.figure import Figure  # slow to import, needed once at the end

    figure = Figure(figsize=size)
    yield list(figure.subplots(rows, columns, squeeze=False).flat)
    figure.tight_layout()
    content = io.BytesIO()
    figure.savefig(content, dpi=dpi)
    write_atomically(file, content.getvalue())
