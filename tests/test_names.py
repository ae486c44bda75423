"""Names of public classes."""

import ast
from pathlib import Path


def test_no_two_public_classes_share_a_name():
    """A name in a traceback, a docstring or a search leads to one class."""
    modules: dict[str, list[str]] = {}
    for file in sorted(Path("jaxspec").rglob("*.py")):
        for statement in ast.parse(file.read_text()).body:
            if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_"):
                modules.setdefault(statement.name, []).append(str(file))
    assert {name: files for name, files in modules.items() if len(files) > 1} == {}
