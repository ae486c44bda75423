"""What `pip install` brings: the packages, the configs, the commands, and adapters that are not too large."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from jaxspec.cli.main import COMMANDS, module_of

PROJECT = tomllib.loads(Path("pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
MB = 1_000_000


def test_every_package_is_installed():
    found = {".".join(file.parent.parts) for file in Path("jaxspec").rglob("__init__.py")}
    assert set(SETUPTOOLS["packages"]) == found | {"jaxspec.configs", "jaxspec.adapters"}


def test_adapters_of_more_than_10_mb_are_left_out_of_the_wheel():
    folder = Path("adapters")
    patterns = SETUPTOOLS["exclude-package-data"]["jaxspec.adapters"]
    left_out = {path for pattern in patterns for path in folder.glob(pattern)}
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert left_out == {path for path in files if path.stat().st_size > 10 * MB}
    assert sum(path.stat().st_size for path in files) < 80 * MB


def test_every_command_is_a_module():
    assert all(Path(module_of(name).replace(".", "/") + ".py").exists() for name in COMMANDS)
    assert PROJECT["project"]["scripts"] == {"jaxspec": "jaxspec.cli.main:main"}


@pytest.mark.slow
@pytest.mark.optimized
def test_the_wheel_works_without_the_clone(tmp_path):
    """It finds its configs and adapters, says which ones it lacks, and what to do where all are lost."""
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), "."]
    subprocess.run(build, check=True)
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 40 * MB
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)

    def decode(*options):
        command = [sys.executable, "-m", "jaxspec", *options]
        return subprocess.run(
            command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True, text=True
        )

    settings = ("--prompt", "Hello", "--max-new-tokens", "4")
    assert decode("decode", "--method", "ppd", *settings).returncode == 0
    assert json.loads(decode("train", "--config", "bita_70b", "--show").stdout)["method"]
    lacking = decode("decode", "--method", "hydra", *settings)
    assert lacking.returncode == 2 and "take the folder adapters/hydra-smollm2-135m from the" in lacking.stderr
    shutil.rmtree(site / "jaxspec" / "adapters")
    lost = decode("decode", "--method", "ppd", *settings)
    assert lost.returncode == 2 and lost.stderr.startswith("error: this installation of jaxspec lacks its adapters")
