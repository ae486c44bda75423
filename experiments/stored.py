"""Benchmarks as the repository stores them: settings as they are, all answers in one compressed file."""

from __future__ import annotations

import contextlib
import lzma
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jaxspec.errors import UserError
from jaxspec.files import writable

PACKED = "answers.tar.xz"
_WHOLE = ("bench.json", "memory.json", "overhead.json", "scores.jsonl", "perplexity.json", "latency.json")


@contextlib.contextmanager
def unpacked(folder: Path) -> Iterator[Path]:
    """The folder of a benchmark, or a temporary copy of it with the answers unpacked where they are stored packed.

    Raises:
      UserError: a damaged archive.
    """
    if not (folder / PACKED).exists():
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(shutil.copytree(folder, Path(temporary) / folder.name))
        try:
            with tarfile.open(copy / PACKED) as archive:
                archive.extractall(copy, filter="data")
        except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
            raise UserError(f"{folder / PACKED}: damaged ({error}); restore it from the repository") from None
        yield copy


def store(folder: Path, to: Path) -> None:
    """Copy a benchmark or a latency for the repository, its answers packed. An earlier copy is overwritten."""
    if folder.resolve() == to.resolve():  # the page is written again where it was
        return
    writable(to)
    for name in _WHOLE:
        if (folder / name).exists():
            shutil.copyfile(folder / name, to / name)
    if (folder / PACKED).exists():
        shutil.copyfile(folder / PACKED, to / PACKED)
    elif (folder / "answers").exists():
        with tarfile.open(to / PACKED, "w:xz", preset=9) as archive:
            for file in sorted((folder / "answers").rglob("*.jsonl")):
                archive.add(file, file.relative_to(folder).as_posix(), filter=_of_nobody)


def _of_nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without times and the names of users, which are nobody's business."""
    entry.mtime = entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
