"""Bring home what a lab has made elsewhere: `python -m experiments.lab collect` there, `merge` at home."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from experiments.lab.archives import Archives, extract
from experiments.lab.carry import disk_errors, empty_folder, is_hidden
from experiments.lab.terms import check_terms
from experiments.lab.unpack import CARRIED, RESULTS, WORK, digest, faults
from jaxspec.errors import UserError, check_at_least
from jaxspec.files import check_writable, exclusive, read_json, writable, write_atomically, write_json

MANIFEST = "collected.json"
TERMS = "terms.json"  # of the results: those of other terms are not mixed
WEIGHTS = "adapter.safetensors"


@dataclasses.dataclass(frozen=True)
class Collect:
    """Put results, recordings and adapters that are new since the lab was unpacked into archives for `merge`.

    Attributes:
      output: an empty folder for the archives.
      size: megabytes of an archive, at most.
      archives: how many of them, at most; what does not fit stays behind, large adapters first. 0: no limit.
      results: folder of the results.
      work: folder of checkpoints, adapters and recordings.
    """

    output: str = "runs/collected"
    size: float = 15
    archives: int = 0
    results: str = RESULTS
    work: str = WORK


@dataclasses.dataclass(frozen=True)
class Merge:
    """Put what `collect` has brought in place.

    Attributes:
      input: folder of the archives.
      replace: results, recordings and adapters that are here with other content.
      results: folder of the results.
      work: folder of checkpoints, adapters and recordings.
    """

    input: str
    replace: bool = False
    results: str = RESULTS
    work: str = WORK


def collect(options: Collect) -> None:
    """Collect what is new, and say what was made and what stays behind."""
    check_at_least(options, {"size": 0.01, "archives": 0})
    results, work = Path(options.results), Path(options.work)
    carried = read_json(work / CARRIED, ("results", "work")) if (work / CARRIED).exists() else {}
    files = _new("results", results, results.rglob("*.json"), carried)
    files |= _new("work", work, work.rglob("recording*.npz"), carried)
    folder = empty_folder(options.output)
    with disk_errors(folder, "give another --output"), tempfile.TemporaryDirectory(prefix=".", dir=folder) as name:
        archives = Archives(Path(name), round(options.size * 1e6), options.archives or sys.maxsize)
        for file, path in files.items():
            archives.add_cut(file, path)
        for adapter in _new_adapters(work, carried):
            archives.add_whole(adapter, _named("work", work, adapter.iterdir()))
        made = archives.finish(folder)
        terms = read_json(results / TERMS) if (results / TERMS).exists() else {}
        write_json(folder / MANIFEST, {"terms": terms, "archives": made, "files": archives.files})
    print("\n".join(f"{made[name]['size'] / 1e6:6.1f} MB  {folder / name}" for name in made) or "nothing is new")


def merge(options: Merge) -> None:
    """Check the archives, then put every file in place that is not there yet."""
    folder, places = Path(options.input), {"results": Path(options.results), "work": Path(options.work)}
    manifest = read_json(folder / MANIFEST, ("terms", "archives", "files"))
    if found := faults(folder, manifest["archives"]):
        raise UserError(f"{folder}: {found}; copy it again")
    check_terms(places["results"], manifest["terms"])
    with exclusive(writable(places["work"])):
        _merge(options, manifest, folder, places)


def _merge(options: Merge, manifest: Mapping[str, Any], folder: Path, places: Mapping[str, Path]) -> None:
    targets = {name: _target(name, places, folder) for name in manifest["files"]}
    there = [name for name, path in targets.items() if path.is_file()]
    changed = [name for name in there if digest(targets[name]) != manifest["files"][name]["sha256"]]
    if changed and not options.replace:
        named = ", ".join(str(targets[name]) for name in changed)
        raise UserError(f"here with other content: {named}; --replace takes what {folder} has")
    new = [name for name in targets if name in changed or name not in there]
    check_writable(places["results"])
    staged = places["work"] / ".merge"
    shutil.rmtree(staged, ignore_errors=True)  # of one that was killed
    try:
        with disk_errors(places["work"], "make room and merge again, nothing is lost"):
            extract(folder, manifest["archives"], {name: manifest["files"][name] for name in new}, staged)
            # results last: whoever finds one finds the adapter that it is about
            for name in sorted(new, key=lambda name: name.startswith("results/")):
                _put(staged / name, targets[name])
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    print(f"{len(new)} files put in place, {len(targets) - len(new)} were here")


def _named(place: str, root: Path, paths: Iterable[Path]) -> dict[str, Path]:
    """Visible files of the results or of the work folder by their name in the archives."""
    inside = {path: path.relative_to(root) for path in sorted(paths) if path.is_file()}
    return {f"{place}/{name.as_posix()}": path for path, name in inside.items() if not is_hidden(name)}


def _new(place: str, root: Path, paths: Iterable[Path], carried: Mapping[str, Any]) -> dict[str, Path]:
    """Those that did not come with the parts, or have changed since."""
    known = carried.get(place, {})
    named = _named(place, root, paths)
    return {name: path for name, path in named.items() if known.get(name.removeprefix(f"{place}/")) != digest(path)}


def _new_adapters(work: Path, carried: Mapping[str, Any]) -> list[Path]:
    """The folders of new adapters, smallest first."""
    folders = [path.parent for path in work.rglob("adapter/adapter.json") if (path.parent / WEIGHTS).exists()]
    new = [folder for folder in sorted(folders) if _new("work", work, folder.iterdir(), carried)]
    return sorted(new, key=lambda folder: sum(path.stat().st_size for path in folder.iterdir()))


def _target(name: str, places: Mapping[str, Path], folder: Path) -> Path:
    """Where a collected file belongs. Raises UserError for a name that leads elsewhere."""
    place, *inside = PurePosixPath(name).parts
    if place not in places or not inside or ".." in inside:
        raise UserError(f"{folder / MANIFEST}: {name!r} is neither a result nor of the work folder; collect it again")
    return places[place].joinpath(*inside)


def _put(new: Path, path: Path) -> None:
    """Move a file, also to another disk: readers see the old one or the new, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.replace(new, path)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        write_atomically(path, new.read_bytes())
