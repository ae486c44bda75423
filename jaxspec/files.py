"""Writing files so that nothing is half there or lost."""

from __future__ import annotations

import os
from pathlib import Path

from jaxspec.errors import UserError


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, then rename it: readers see the old content or the new, never half."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def writable(folder: Path) -> Path:
    """The folder, made where missing. Raises UserError before hours of measuring rather than after them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder}: cannot be written; give another --output")
    return folder
