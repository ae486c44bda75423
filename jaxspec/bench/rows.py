"""The rows of a question file: JSONL, a JSON array, or parquet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxspec.errors import UserError
from jaxspec.training.examples import read_jsonl


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbers, from 1 or of the lines, and objects of a file.

    Raises UserError where it cannot be read; names the file, and the line where it has lines.
    """
    return _read_parquet(path) if path.suffix == ".parquet" else read_jsonl(path)


def _read_parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow.parquet  # slow to import; comes with datasets

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not a parquet file that can be read ({error})") from None
    yield from enumerate(rows, 1)
