"""The check of installed versions."""

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from jaxspec import versions


def test_installed_versions_are_in_the_tried_ranges():
    versions.check_versions()


@pytest.mark.parametrize(("package", "found"), [("jax", "0.9.1"), ("jax", "0.13.0"), ("flax", "0.13.0.dev1")])
def test_other_versions_are_named_with_the_way_out(monkeypatch, package, found):
    tried = {name: lowest for name, (lowest, _) in versions.TRIED.items()}
    monkeypatch.setattr(versions, "version", (tried | {package: found}).__getitem__)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which is changed
    with pytest.raises(ImportError, match=f"{package}>=.* and {re.escape(found)} is installed: pip install "):
        versions.check_versions()


def test_nobody_sees_a_traceback_of_an_untried_version():
    code = "import runpy; check = runpy.run_path('jaxspec/versions.py')['check_versions'];"
    code += "check.__globals__['OLDEST_PYTHON'] = (9, 1); check()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.startswith("error: jaxspec needs Python 9.1 or newer, and this is 3.")
    assert ended.stderr.count("\n") == 1


def test_jax_may_be_missing(monkeypatch):
    def version(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(versions, "version", version)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(ImportError, match=r"needs jax>=.* and none is installed: pip install "):
        versions.check_versions()


def test_requirements_state_the_same_ranges():
    text = Path("requirements.txt").read_text()
    for package, (lowest, beyond) in versions.TRIED.items():
        assert f"{package}>={lowest},<{beyond}\n" in text


def version_of(package, monkeypatch):
    """What a package in that folder calls its version."""
    monkeypatch.setattr(versions, "__file__", str(package / "versions.py"))
    return versions.code_version.__wrapped__()


def test_the_version_is_the_commit_that_last_changed_what_decodes(tmp_path, monkeypatch):
    package = tmp_path / "jaxspec"
    decoder, page = package / "model" / "decoder.py", package / "bench" / "page.py"
    for file in (decoder, page):
        file.parent.mkdir(parents=True)

    def commit(file, text):
        file.write_text(text)
        run_git(tmp_path, "add", ".")
        run_git(tmp_path, "commit", "-qm", "Change")
        return version_of(package, monkeypatch)

    def change(text):
        decoder.write_text(text)
        return version_of(package, monkeypatch)

    run_git(tmp_path, "init", "-q")
    assert version_of(package, monkeypatch) == versions.__version__  # nothing is committed
    first = commit(decoder, "one")
    assert run_git(tmp_path, "rev-parse", "HEAD").startswith(first) and len(first) == 12
    assert commit(page, "of results") == first
    assert len({first, change("two"), change("three")}) == 3  # changes that are not committed count, each by itself
    assert change("two") == change("two")
    assert commit(decoder, "two") != first


def run_git(folder, *words):
    user = ("-c", "user.name=A", "-c", "user.email=a@b.c")
    return subprocess.run(["git", "-C", folder, *user, *words], check=True, capture_output=True, text=True).stdout


def test_without_a_checkout_of_its_own_it_is_the_packages_version(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "jaxspec"
    package.mkdir(parents=True)
    run_git(tmp_path, "init", "-q")  # of whoever has installed the package
    assert version_of(package, monkeypatch) == versions.__version__
    (package.parent / ".git").touch()  # which git cannot read
    assert version_of(package, monkeypatch) == versions.__version__


def test_importing_starts_no_device():
    """Who imports may still choose platforms, or call jax.distributed.initialize."""
    code = "import jax, jaxspec; jax.config.update('jax_num_cpu_devices', 3)"  # JAX refuses once there are devices
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
