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


def test_the_digest_is_of_the_code_that_decodes(monkeypatch, tmp_path):
    assert all((Path(versions.__file__).parent / part).is_dir() for part in versions._DECODING)
    monkeypatch.setattr(versions, "__file__", str(tmp_path / "versions.py"))
    found = []
    one, commented, other = "def f(): return 1", "def f():  # so\n    'What.'\n    return 1", "def f(): return 2"
    for part, text in (("methods", one), ("methods", other), ("methods", commented), ("evaluation", "report()")):
        (tmp_path / part).mkdir(exist_ok=True)
        (tmp_path / part / "file.py").write_text(text)
        found.append(versions.source_digest())
    assert found[0] == found[2] == found[3] != found[1]


def test_importing_starts_no_device():
    """Who imports may still choose platforms, or call jax.distributed.initialize."""
    code = "import jaxspec; from jax._src import xla_bridge; assert not xla_bridge._backends"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
