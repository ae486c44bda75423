"""Which packages another machine lacks, and wheels of them."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from jaxspec.errors import UserError
from jaxspec.files import read_text

# belong to the machine's accelerator, or are large: only requirements.txt, not the needs of others, asks for a version
_MACHINE = re.compile(r"jax|jaxlib|jax-cuda.*|nvidia-.*|torch|numpy")


@dataclasses.dataclass(frozen=True)
class Machine:
    """The machine that is to run the lab.

    Attributes:
      installed: versions of its packages by normalised name; "" for an unknown one.
      python: its version.
      platforms: of its wheels, as pip names them.
    """

    installed: Mapping[str, str]
    python: str
    platforms: Sequence[str]

    def has(self, requirement: Requirement) -> bool:
        """Whether a package is there in a version that will do; an unknown version is taken to do."""
        version = self.installed.get(canonicalize_name(requirement.name))
        return version == "" or (version is not None and requirement.specifier.contains(version, prereleases=True))


def read_freeze(file: Path) -> dict[str, str]:
    """Versions by normalised name, from what `pip freeze` has written. Raises UserError for any other line."""
    installed = {}
    for line in map(str.strip, read_text(file).splitlines()):
        if line and not line.startswith("#"):
            name, version = _frozen(line, file)
            installed[canonicalize_name(name)] = version
    return installed


def _frozen(line: str, file: Path) -> tuple[str, str]:
    """Name and version of one line; of an editable or other installation from an address the version is unknown."""
    if found := re.fullmatch(r"([\w.-]+)\s*={2,3}\s*(\S+)", line):
        return found[1], found[2]
    if found := re.fullmatch(r"([\w.-]+)(?:\[.*\])?\s*@\s*(\S+)", line):
        try:
            return found[1], str(parse_wheel_filename(re.split(r"[?#]", found[2])[0].rsplit("/", 1)[-1])[1])
        except InvalidWheelFilename:
            return found[1], ""
    if found := re.search(r"^-e\s.*#egg=([\w.-]+)", line):
        return found[1], ""
    raise UserError(f"{file}: {line!r} is not a line of pip freeze; write the file with `pip freeze` on that machine")


def read_requirements(file: Path) -> list[Requirement]:
    """What the project needs. Raises UserError for a line that is no requirement."""
    lines = [line.split("#")[0].strip() for line in read_text(file).splitlines()]
    try:
        return [Requirement(line) for line in lines if line]
    except InvalidRequirement as error:
        raise UserError(f"{file}: {error}") from None


def lacking(machine: Machine, requirements: Sequence[Requirement]) -> dict[str, Requirement]:
    """By normalised name, what a machine lacks of the requirements and of what they need, with all that is asked of it.

    What a package needs is what its version here says. What is there already is taken to have what it needs.
    """
    stated = {canonicalize_name(requirement.name): requirement.specifier for requirement in requirements}
    found: dict[str, Requirement] = {}
    asked, seen = [need for need in requirements if _applies(need, machine.python)], set()
    while asked:
        requirement = asked.pop()
        name = canonicalize_name(requirement.name)
        if (name, str(requirement)) in seen:
            continue
        seen.add((name, str(requirement)))
        if _MACHINE.fullmatch(name):
            requirement.specifier = stated.get(name, SpecifierSet())
        if name in found or not machine.has(requirement):
            known = found.setdefault(name, Requirement(name))
            known.specifier &= requirement.specifier
            asked += _needs(requirement, machine.python)
    return found


def _needs(requirement: Requirement, python: str) -> Iterator[Requirement]:
    """What a package, with the extras asked for, needs there; nothing where it is not installed here."""
    try:
        needs = distribution(requirement.name).requires or ()
    except PackageNotFoundError:
        return
    for need in map(Requirement, needs):
        if any(_applies(need, python, extra) for extra in ("", *requirement.extras)):
            yield need


def _applies(requirement: Requirement, python: str, extra: str = "") -> bool:
    """Whether a requirement holds on Linux with that Python."""
    there = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    there |= {"platform_system": "Linux", "os_name": "posix", "implementation_name": "cpython", "extra": extra}
    return requirement.marker is None or requirement.marker.evaluate(there)


def download(machine: Machine, folder: Path, packages: Mapping[str, Requirement]) -> None:
    """Wheels without their needs: of the versions here, or where there are none of any that will do.

    Raises UserError with what pip says where there are none at all.
    """
    exact = [_as_here(requirement) for requirement in packages.values()]
    if not exact or not _pip(machine, folder, exact):
        return
    for requirement in packages.values():
        if _pip(machine, folder, [_as_here(requirement)]) and (said := _pip(machine, folder, [str(requirement)])):
            raise UserError(f"pip cannot download {requirement}: {said}")


def _as_here(requirement: Requirement) -> str:
    """A requirement of the version that is installed here, where one is and it will do."""
    try:
        version = distribution(requirement.name).version
    except PackageNotFoundError:
        return str(requirement)
    fits = requirement.specifier.contains(version, prereleases=True)
    return f"{requirement.name}=={version}" if fits else str(requirement)


def _pip(machine: Machine, folder: Path, packages: Sequence[str]) -> str:
    """What pip says that went wrong, or nothing."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    command += ["--python-version", machine.python, "--implementation", "cp"]
    command += [word for platform in machine.platforms for word in ("--platform", platform)]
    ended = subprocess.run([*command, *packages], capture_output=True, text=True)
    return (ended.stderr.strip().splitlines() or ["no reason given"])[-1] if ended.returncode else ""
