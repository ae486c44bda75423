"""What the documents name exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATH = re.compile(r"`((?:jaxspec|configs|experiments|tests|docs|adapters)/[^`\s]*)`")


@pytest.mark.parametrize("page", ["README.md", *sorted(str(f.relative_to(ROOT)) for f in ROOT.glob("docs/*.md"))])
def test_paths_of_the_project_exist(page):
    named = PATH.findall((ROOT / page).read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []
