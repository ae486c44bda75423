"""The pages that GitHub shows: their links lead somewhere. Those of docs/ are checked by `make docs`."""

import re
from pathlib import Path

import pytest

from jaxspec.methods import METHODS

PAGES = [Path("README.md"), Path("CONTRIBUTING.md"), *Path("docs").glob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_the_readme_is_short_and_names_every_method():
    text = Path("README.md").read_text()
    assert len(text.splitlines()) <= 130
    assert all(f"| `{name}` |" in text for name in METHODS)
