"""Put together what `python -m experiments.lab pack` has cut: python3 unpack.py PARTS_DIR TARGET_DIR.

Needs nothing but Python 3.9: it runs on the bare machine, before any of the project's packages can be imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

MANIFEST = "lab.json"
INNER = "checkout.tar.gz"  # in the stream of parts: the checkout and the work folder; beside it lie the wheels
RESULTS = "experiments/results"
WORK = "runs/lab"
CARRIED = "carried.json"  # in the work folder: what came with the parts, which need not be brought back


class RefusalError(Exception):
    """What keeps a lab from being unpacked, in one line."""


class Joined:
    """Reads files as if they were one."""

    def __init__(self, paths: Iterable[Path]):
        self._paths = iter(paths)
        self._open = None

    def read(self, size: int) -> bytes:
        """So many bytes, fewer only at the end."""
        found = []
        while size:
            if self._open is None:
                path = next(self._paths, None)
                if path is None:
                    break
                self._open = path.open("rb")
            found.append(self._open.read(size))
            size -= len(found[-1])
            if not found[-1]:
                self._open.close()
                self._open = None
        return b"".join(found)


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            hasher.update(block)
    return hasher.hexdigest()


def faults(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> str:
    """Which files of a manifest are missing or damaged, in words; nothing where all are whole."""
    missing = [name for name in files if not (folder / name).is_file()]
    damaged = [name for name in files if name not in missing and not _is_whole(folder / name, files[name])]
    named = {"missing": missing, "damaged": damaged}
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in named.items() if names)


def digests(folder: Path) -> dict[str, str]:
    """The digests of all files in a folder, by their path in it."""
    return {path.relative_to(folder).as_posix(): digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def unpack_parts(parts: Path, target: Path) -> str:
    """Check the parts, put checkout and packages into the target, and say how to start the lab there.

    Raises RefusalError, with nothing left in the target, where a part is missing or damaged, the target is not empty,
    the disk too full, Python another or pip fails.
    """
    manifest = _read_manifest(parts)
    if found := faults(parts, manifest["parts"]):
        raise RefusalError(f"{parts}: {found}; copy it again")
    _check_target(target, manifest)
    made = next((path for path in (*reversed(target.absolute().parents), target.absolute()) if not path.exists()), None)
    try:
        target.mkdir(parents=True, exist_ok=True)
        _extract([parts / name for name in manifest["parts"]], target)
        _install(target)
        _write_carried(target / "checkout", manifest["commit"])
    except BaseException as error:
        _empty(target)
        if made:
            shutil.rmtree(made, ignore_errors=True)
        if isinstance(error, (OSError, tarfile.TarError)):
            raise RefusalError(f"{target}: cannot be written ({error})") from None
        raise
    site, checkout = (shlex.quote(str(target.absolute() / name)) for name in ("site", "checkout"))
    return f"cd {checkout} && PYTHONPATH={site} {shlex.quote(sys.executable)} -m experiments.lab run"


def _read_manifest(parts: Path) -> dict[str, Any]:
    try:
        return json.loads((parts / MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        raise RefusalError(f"{parts / MANIFEST}: cannot be read ({error.strerror}); it goes with the parts") from None
    except ValueError as error:
        raise RefusalError(f"{parts / MANIFEST}: damaged ({error}); copy it again") from None


def _is_whole(path: Path, known: Mapping[str, Any]) -> bool:
    return path.stat().st_size == known["size"] and digest(path) == known["sha256"]


def _check_target(target: Path, manifest: Mapping[str, Any]) -> None:
    """Whether the parts may and can be unpacked there, by this Python."""
    python = ".".join(map(str, sys.version_info[:2]))
    if python != manifest["python"]:
        raise RefusalError(
            f"packed for Python {manifest['python']}, this is {python}: start unpack.py with that one, or pack again "
            f"with --python {python}"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RefusalError(f"{target} is {'not empty' if target.is_dir() else 'a file'}; give another folder")
    there = next(path for path in (target.absolute(), *target.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < manifest["needs"]:
        raise RefusalError(f"{target}: needs {manifest['needs'] / 1e6:.0f} MB, {free / 1e6:.0f} MB are free")


def _extract(parts: Iterable[Path], target: Path) -> None:
    """The wheels into the target's `wheels`, all else into its `checkout`."""
    (target / "wheels").mkdir()
    with tarfile.open(fileobj=Joined(parts), mode="r|") as outer:
        for member in _safe(outer):
            if member.name == INNER:
                with tarfile.open(fileobj=outer.extractfile(member), mode="r|gz") as inner:
                    for file in _safe(inner):
                        _extract_one(inner, file, target / "checkout")
            else:
                _extract_one(outer, member, target / "wheels")


def _safe(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The members of an archive. Raises RefusalError for one that is no plain file, or would lie outside the target."""
    for member in archive:
        path = PurePosixPath(member.name)
        if not member.isfile() or path.is_absolute() or ".." in path.parts:
            raise RefusalError(f"{member.name}: not a plain file inside the target; pack again")
        yield member


def _extract_one(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # earlier releases lack it
    archive.extract(member, folder, **safe)


def _install(target: Path) -> None:
    """Put the wheels into the target's `site`, and remove them."""
    wheels, site = target / "wheels", target / "site"
    site.mkdir()
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
    if files := sorted(map(str, wheels.iterdir())):
        # pip unpacks among temporary files first: on the disk whose space was checked
        environment = {**os.environ, "TMPDIR": str(wheels.absolute())}
        command += ["--target", str(site), *files]
        ended = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
        if ended.returncode:
            said = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
            raise RefusalError(f"pip cannot install the wheels: {said[-1]}")
    shutil.rmtree(wheels)


def _write_carried(checkout: Path, commit: str) -> None:
    """What is there before the lab starts."""
    work = checkout / WORK
    work.mkdir(parents=True, exist_ok=True)
    carried = {"commit": commit, "results": digests(checkout / RESULTS), "work": digests(work)}
    (work / CARRIED).write_text(json.dumps(carried, indent=1), encoding="utf-8")


def _empty(folder: Path) -> None:
    for path in folder.iterdir() if folder.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def main(args: list[str]) -> int:
    """Unpack; the exit code."""
    if len(args) != 2:
        print("usage: python3 unpack.py PARTS_DIR TARGET_DIR", file=sys.stderr)
        return 2
    try:
        print(unpack_parts(Path(args[0]), Path(args[1])))
    except RefusalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
