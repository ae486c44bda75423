"""Which code runs: JAX and Flax, some pairs of which fail deep inside an import, and this package's own."""

from __future__ import annotations

import ast
import hashlib
import re
from importlib.metadata import version
from pathlib import Path

_DECODING = ("decoding", "drafting", "methods", "model")
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
    """Digest of the code that decodes, whatever its comments and docstrings say.

    What another version has measured is not taken for the same benchmark's.
    """
    here = Path(__file__).parent
    files = sorted(file for part in _DECODING for file in (here / part).glob("*.py"))
    modules = "\n".join(_bare(file.read_text(encoding="utf-8")) for file in files)
    return hashlib.sha256(modules.encode()).hexdigest()[:16]


def _bare(source: str) -> str:
    """A module without comments and docstrings, in one way of writing."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
            node.body = node.body or [ast.Pass()]
    return ast.unparse(tree)
