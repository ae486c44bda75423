"""What the documents name exists, and their links lead somewhere."""

import re
from pathlib import Path

import pytest

from jaxspec.cli.main import COMMANDS
from jaxspec.drafters import METHODS

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(f.relative_to(ROOT)) for f in ROOT.glob("docs/*.md"))]
PATH = re.compile(r"`((?:jaxspec|configs|experiments|tests|docs|adapters)/[^`\s]*)`")


@pytest.mark.parametrize("page", PAGES)
def test_paths_of_the_project_exist(page):
    named = PATH.findall((ROOT / page).read_text())
    assert [path for path in named if not (ROOT / path).exists() and "bigram" not in path] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
    inside = [target for target in targets if not target.startswith("https://")]
    assert [target for target in inside if not ((ROOT / page).parent / target).exists()] == []


def test_the_readme_is_short_and_names_every_method():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 130
    assert all(f"| `{name}` |" in text for name in METHODS)


def test_commands_are_named_and_not_files():
    """`jaxspec tune`, never a file that a user would have to find; the README shows the two that a clone has."""
    files = [*ROOT.glob("jaxspec/**/*.py"), *ROOT.glob("docs/*.*"), *ROOT.glob("configs/*.py"), ROOT / "Makefile"]
    named = re.compile(rf"(?<![\w/])(?:{'|'.join(COMMANDS)})\.py")
    texts = {file: file.read_text() for file in files if file.suffix != ".png"}
    assert [file for file, text in texts.items() if named.search(text)] == []
