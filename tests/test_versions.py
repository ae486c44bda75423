"""The check of installed versions."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec import versions


def test_installed_versions_are_in_the_tried_ranges():
    versions.check_versions()


@pytest.mark.parametrize(("package", "found"), [("jax", "0.9.1"), ("jax", "0.11.0"), ("flax", "0.13.0.dev1")])
def test_other_versions_are_named_with_the_way_out(monkeypatch, package, found):
    tried = {name: lowest for name, (lowest, _) in versions._TRIED.items()}
    monkeypatch.setattr(versions, "version", (tried | {package: found}).__getitem__)
    with pytest.raises(ImportError, match=f"{package}>=.* and {re.escape(found)} is installed.*requirements.txt"):
        versions.check_versions()


def test_requirements_state_the_same_ranges():
    text = Path("requirements.txt").read_text()
    for package, (lowest, beyond) in versions._TRIED.items():
        assert f"{package}>={lowest},<{beyond}\n" in text


def test_the_digest_is_of_the_code(monkeypatch, tmp_path):
    folder = tmp_path / "jaxspec"
    (folder / "methods").mkdir(parents=True)
    monkeypatch.setattr(versions, "__file__", str(folder / "versions.py"))
    found = set()
    for text in ("one", "other", "one"):
        (folder / "methods" / "ppd.py").write_text(text)
        found.add(versions.source_digest())
    assert len(found) == 2


def test_importing_starts_no_device():
    """Who imports may still choose platforms, or call jax.distributed.initialize."""
    code = "import jaxspec; from jax._src import xla_bridge; assert not xla_bridge._backends"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
