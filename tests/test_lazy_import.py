"""`import jaxspec` loads what is asked for, and no more."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxspec

ROOT = Path(__file__).parents[1]


def modules_after(code):
    """The modules that Python has loaded once it has run some code."""
    command = [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"]
    return set(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout.split())


def test_every_public_name_is_there():
    space = {}
    exec("from jaxspec import *", space)
    assert set(jaxspec.__all__) == set(space) - {"__builtins__"}
    assert set(jaxspec.__all__) < set(dir(jaxspec))
    assert all(space[name] is getattr(jaxspec, name) for name in jaxspec.__all__)


def test_the_documented_names_are_the_public_ones():
    documented = re.findall(r"^\.\. auto\w+:: jaxspec\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.M)
    assert {*documented, "tree"} == set(jaxspec.__all__)


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match="module 'jaxspec' has no attribute 'load_modle'"):
        jaxspec.load_modle  # noqa: B018


def test_the_root_loads_nothing_else():
    loaded = modules_after("import jaxspec")
    assert {name for name in loaded if name.startswith("jaxspec.")} == {"jaxspec.versions"}
    assert "jax" not in loaded


def test_the_step_needs_neither_files_nor_weights():
    loaded = modules_after("import jaxspec.decoding.loop")
    assert not {"transformers", "safetensors", "orbax", "gguf"} & loaded
    rooms = {name.split(".")[1] for name in loaded if name.startswith("jaxspec.")}
    assert rooms == {"config", "decoding", "errors", "model", "parallel", "versions"}
