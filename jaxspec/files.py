"""Writing files so that a kill leaves none half written or lost, and reading those that one has cut short."""

from __future__ import annotations

import codecs
import contextlib
import glob
import io
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from jaxspec.errors import UserError

_MAX_JSON = 64 * 2**20  # bytes; the largest are vocabularies, of up to some 35 MB
# UTF-32 begins as UTF-16 does
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, then rename it: readers see the old content or the new, never half.

    The name is this process's own. Those that killed processes have left are removed.
    """
    here = f".{path.name}.{platform.node()}-"
    for left in path.parent.glob(f"{glob.escape(here)}*.tmp"):
        if not _runs(left.name.removeprefix(here).removesuffix(".tmp")):
            left.unlink(missing_ok=True)
    temporary = path.with_name(f"{here}{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _runs(process: str) -> bool:
    """Whether a process of that number may still run on this machine."""
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except (ValueError, PermissionError):
        return True
    return True


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file as `write_atomically` does."""
    write_atomically(path, json.dumps(value, indent=1).encode())


def swap_folder(new: Path, folder: Path) -> None:
    """Put a finished folder in the place of another, which stays until then."""
    restore_folder(folder)
    if folder.exists():
        folder.rename(_aside(folder))
    new.rename(folder)
    shutil.rmtree(_aside(folder), ignore_errors=True)


@contextlib.contextmanager
def replacing(folder: Path, new: Path) -> Iterator[None]:
    """A new folder beside another one takes its place when the block ends well, and else is removed.

    Raises UserError where another process is writing it. What a killed one has left is removed.
    """
    lock = folder.with_name(f".{folder.name}.lock")
    writable(folder.parent)
    with locked(lock, f"{folder}: another process is writing there; wait for it or give another folder"):
        shutil.rmtree(new, ignore_errors=True)
        try:
            yield
            swap_folder(new, folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
            lock.unlink(missing_ok=True)


def restore_folder(folder: Path) -> None:
    """Put back a folder that a killed `swap_folder` had moved aside, or remove it if the new one is in place."""
    if folder.exists():
        shutil.rmtree(_aside(folder), ignore_errors=True)
    elif _aside(folder).exists():
        _aside(folder).rename(folder)


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def user_cache(*parts: str) -> Path:
    """A path in jaxspec's part of the user's cache, which is among temporary files where there is no home."""
    try:
        home = Path.home()
    except RuntimeError:
        home = Path(tempfile.gettempdir())
    return home.joinpath(".cache", "jaxspec", *parts)


def shipped_folder(name: str) -> Path:
    """A folder of data that ships with the package: inside it where it was installed, beside it in a checkout.

    Raises UserError for an installation that has lost it.
    """
    package = Path(__file__).resolve().parent
    checkout = package.parent if (package.parent / "pyproject.toml").exists() else package
    for folder in (package / name, checkout / name):
        if folder.is_dir():
            return folder
    raise UserError(
        f"this installation of jaxspec lacks its {name}: in a clone of the repository, run "
        "pip install --force-reinstall --no-deps ."
    )


def local_folder(name: str) -> Path:
    """A folder by its name. Raises UserError for a bucket, which would become a folder called `gs:`."""
    if "://" in name:
        raise UserError(f"{name}: not a folder; mount the bucket (gcsfuse does it for gs://) and give its path")
    return Path(name)


def display_name(name: str) -> str:
    """The last part of a path that exists, any other name as it is: what is kept must not name a machine's paths."""
    return Path(os.path.abspath(name)).name if name and Path(name).exists() else name


def check_writable(folder: Path) -> None:
    """Raise UserError for a folder that cannot be written, or made; nothing is made yet."""
    # `os.path` rather than `Path`, whose tests raise where a parent may not be entered.
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    is_folder = os.path.isdir(there)
    if not is_folder or not os.access(there, os.W_OK):
        raise UserError(f"{folder}: cannot be written ({there} is {'read-only' if is_folder else 'a file'})")


def new_folder(name: str) -> Path:
    """A folder that is to be made by whoever writes it. Raises UserError for no name, or one that exists."""
    if not name or Path(name).exists():
        raise UserError(f"give a new directory with --output, got {name!r}")
    return Path(name)


def writable(folder: Path) -> Path:
    """The folder, made where missing. Raises UserError before hours of measuring rather than after them."""
    check_writable(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from None
    return folder


def exclusive(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Keep out other processes that ask for the same folder. Raises UserError if one is writing there already."""
    return locked(folder / ".lock", f"{folder}: another process is writing there; wait for it or give another folder")


@contextlib.contextmanager
def locked(file: Path, refusal: str = "") -> Iterator[None]:
    """A lock that one process at a time holds. Its file stays, as another process may be waiting for it.

    If another process holds it, raises UserError with the `refusal`, or without one waits.
    """
    try:
        held = FileLock(file).acquire(blocking=not refusal)
    except Timeout:
        raise UserError(refusal) from None
    except OSError:  # a file system without locks
        held = contextlib.nullcontext()
    with held:
        yield


def drop_half_line(file: Path) -> None:
    """Cut off a last line that a kill or a full disk left incomplete."""
    content = file.read_bytes() if file.exists() else b""
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with file.open("r+b") as opened:
            opened.truncate(whole)


def read_whole_lines(file: Path, fields: Collection[str] = ()) -> list[dict[str, Any]]:
    """The objects of a JSONL file whose last line a kill may have cut; none where there is no file.

    Raises UserError where an earlier line is damaged or lacks one of the `fields`.
    """
    content = file.read_bytes() if file.exists() else b""
    rows = []
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
        try:
            rows.append(parse_json(line))
        except ValueError as error:
            raise UserError(f"{file}:{number}: damaged ({error}); remove that line") from None
        lacking = [name for name in fields if not isinstance(rows[-1], dict) or name not in rows[-1]]
        if lacking:
            raise UserError(f"{file}:{number}: damaged (no {lacking[0]}); remove that line")
    return rows


def read_text(path: Path) -> str:
    """The text of a file, in UTF-8, or as its byte order mark says. Raises UserError naming the file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    encoding = next((name for mark, name in _MARKS if content.startswith(mark)), "utf-8")
    try:
        return io.StringIO(content.decode(encoding), newline=None).read()  # lines end alike on all systems
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line}: not valid {encoding.upper()} ({error.reason}); save it as UTF-8") from None


def check_json_size(path: Path) -> None:
    """Raise UserError for a JSON file too large to be of settings, an index, a vocabulary or results."""
    size = path.stat().st_size if path.exists() else 0
    if size > _MAX_JSON:
        raise UserError(f"{path}: {size} bytes, and a JSON file here has at most {_MAX_JSON}")


def parse_json(text: str) -> Any:
    """A JSON value. Raises ValueError for text that is none, or too deep: thousands of lists in each other."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("too many lists or objects in each other") from None


def read_json(path: Path, fields: Collection[str] = ()) -> dict[str, Any]:
    """A JSON object from a file. Raises UserError naming the file, also where it lacks one of the fields."""
    check_json_size(path)
    try:
        content = parse_json(read_text(path))
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(content).__name__}")
    if lacking := [name for name in fields if name not in content]:
        raise UserError(f"{path}: {lacking[0]} is missing; another program or version has written it")
    return content
