"""Archives of at most so many bytes each: files into them, and out again."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from experiments.lab.unpack import digest
from jaxspec.errors import UserError

_PIECE = 1 << 16  # smaller pieces of a file are not worth an entry
_ENTRY = 4096  # what an entry takes beyond its content at most, and the end of an archive


class Archives:
    """Compressed archives in a temporary folder, until all are finished.

    Attributes:
      files: of every file that was added its digest, its size and its pieces, each an archive and a name in it.
    """

    def __init__(self, folder: Path, size: int, most: int):
        """At most so many archives of at most so many bytes."""
        self.files: dict[str, dict[str, Any]] = {}
        self._folder, self._size, self._left = folder, size, most
        self._names: list[str] = []
        self._file = self._packed = self._archive = None

    def add_cut(self, name: str, path: Path) -> None:
        """Add a file, in pieces where it does not fit into one archive; say so if it has to stay behind."""
        content, whole = path.read_bytes(), _content(self._size)
        least = min(_PIECE, whole // 4)
        room = self._room() if self._room() >= least else 0
        if max(1, len(content)) > max(self._room(), room + self._left * whole):
            self._leave(path, len(content), "no room in so many archives")
            return
        self._note(name, content)
        begin = 0
        while not self.files[name]["pieces"] or begin < len(content):
            if self._archive is None or self._room() < min(max(1, len(content) - begin), least):
                self._next()
            piece = content[begin : begin + self._room()]
            number = len(self.files[name]["pieces"])
            self._write(name, name if len(piece) == len(content) else f"{name}.piece-{number:02}", piece)
            begin += len(piece)

    def add_whole(self, path: Path, files: Mapping[str, Path]) -> None:
        """Add files that belong together, those of a folder, to one archive; say so if they have to stay behind."""
        contents = {name: file.read_bytes() for name, file in files.items()}
        size = sum(map(len, contents.values()))
        needed = size + (len(files) - 1) * _ENTRY
        if needed > _content(self._size):
            self._leave(path, size, f"more than --size {self._size / 1e6:g} holds")
            return
        if needed > self._room():
            if not self._left:
                self._leave(path, size, "no room in so many archives")
                return
            self._next()
        for name, content in contents.items():
            self._note(name, content)
            self._write(name, name, content)

    def finish(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Move the archives into a folder; size and digest of each."""
        self._close()
        made = {}
        for name in self._names:
            path = self._folder / name
            made[name] = {"size": path.stat().st_size, "sha256": digest(path)}
            path.rename(folder / name)
        return made

    def _room(self) -> int:
        """Bytes that certainly fit into the archive at hand."""
        return 0 if self._archive is None else _content(self._size - self._file.tell())

    def _note(self, name: str, content: bytes) -> None:
        sha = hashlib.sha256(content).hexdigest()
        self.files[name] = {"sha256": sha, "size": len(content), "pieces": []}

    def _write(self, name: str, entry: str, content: bytes) -> None:
        member = tarfile.TarInfo(entry)
        member.size = len(content)
        self._archive.addfile(member, io.BytesIO(content))
        self._packed.flush()  # so that the file says how long it is
        self._file.flush()
        self.files[name]["pieces"].append([self._names[-1], entry])

    def _next(self) -> None:
        self._close()
        self._left -= 1
        self._names.append(f"results-{len(self._names):02}.tar.gz")
        self._file = (self._folder / self._names[-1]).open("wb")
        self._packed = gzip.GzipFile(filename="", mode="wb", fileobj=self._file, compresslevel=6, mtime=0)
        self._archive = tarfile.TarFile(fileobj=self._packed, mode="w", format=tarfile.GNU_FORMAT)

    def _close(self) -> None:
        for opened in (self._archive, self._packed, self._file):
            if opened is not None:
                opened.close()
        self._file = self._packed = self._archive = None

    def _leave(self, path: Path, size: int, why: str) -> None:
        print(f"stays behind: {path}, {size / 1e6:.1f} MB ({why})")


def _content(room: int) -> int:
    """How large the content of an entry may be that fits into so many bytes even if it cannot be compressed."""
    return max(0, (room - _ENTRY) * 1000 // 1001)


def extract(folder: Path, archives: Iterable[str], files: Mapping[str, Mapping[str, Any]], target: Path) -> None:
    """Put files together from their pieces. Raises UserError for one that is not what was added."""
    wanted = {tuple(piece): name for name, file in files.items() for piece in file["pieces"]}
    for archive in archives:
        with tarfile.open(folder / archive, "r:gz") as opened:
            for member in opened:
                if (name := wanted.get((archive, member.name))) and member.isfile():
                    (target / name).parent.mkdir(parents=True, exist_ok=True)
                    with (target / name).open("ab") as file:
                        shutil.copyfileobj(opened.extractfile(member), file)
    for name, file in files.items():
        if not (target / name).is_file() or digest(target / name) != file["sha256"]:
            raise UserError(f"{folder}: damaged: {name} in {file['pieces'][0][0]}; collect it again")
