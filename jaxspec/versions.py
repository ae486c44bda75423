"""Which code runs: JAX and Flax, some pairs of which fail deep inside an import, and this package's own."""

from __future__ import annotations

import hashlib
import re
from importlib.metadata import version
from pathlib import Path

_DECODING = ("decoding", "methods", "model", "tree")
_TRIED = {"jax": ("0.10.2", "0.11"), "flax": ("0.12.8", "0.13")}


def _parts(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def check_versions() -> None:
    """Raise ImportError for a JAX or Flax outside the ranges that were tried."""
    for package, (lowest, beyond) in _TRIED.items():
        found = version(package)
        if not _parts(lowest) <= _parts(found) < _parts(beyond):
            raise ImportError(
                f"jaxspec was tried with {package}>={lowest},<{beyond}, and {found} is installed; "
                f"install the tried versions with: pip install -r requirements.txt"
            )


def source_digest() -> str:
    """Digest of the code that decodes: what another version has measured is not taken for the same benchmark's."""
    here = Path(__file__).parent
    files = sorted(file for part in _DECODING for file in (here / part).glob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]
