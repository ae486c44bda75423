"""What `pip install` brings: the packages, the configs, the commands, and adapters that are not too large."""

import tomllib
from pathlib import Path

from jaxspec.cli.main import COMMANDS

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
    assert sum(path.stat().st_size for path in files) < 32 * MB


def test_every_command_has_a_program():
    assert all(Path(f"{name}.py").exists() for name in COMMANDS)
    assert PROJECT["project"]["scripts"] == {"jaxspec": "jaxspec.cli.main:main"}
