"""What the documents name exists, and their links lead somewhere."""

import re
from pathlib import Path

import pytest

from experiments.readme import draw, fastest_on, shown_drafters, with_figures
from jaxspec.cli.main import COMMANDS
from jaxspec.drafters import METHODS
from jaxspec.errors import UserError
from jaxspec.files import read_json

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(f.relative_to(ROOT)) for f in ROOT.glob("docs/**/*.md"))]
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


@pytest.mark.parametrize("page", PAGES)
def test_links_to_sections_lead_to_one(page):
    linked = re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", (ROOT / page).read_text())
    inside = [
        ((ROOT / page).parent / file if file else ROOT / page, section) for file, section in linked if "//" not in file
    ]
    assert [(file.name, section) for file, section in inside if section not in sections_of(file.read_text())] == []


def sections_of(text):
    """The names by which links know a page's sections."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_figures_of_the_readme_are_those_of_stored_results(tmp_path):
    """`python -m experiments.readme` writes them."""
    results, gpu = (read_json(ROOT / "docs" / name) for name in ("results.json", "h100.json"))
    text = (ROOT / "README.md").read_text()
    assert with_figures(text, results, gpu) == text
    assert shown_drafters(results["defaults"]) == ["eagle+suffix", "suffix", "space"]  # in the picture
    assert [(name, f["rows"]) for name, f in fastest_on(gpu).items()] == [
        ("hidden_transfer", 31),
        ("space", 32),
        ("hydra", 8),
    ]
    results["defaults"]["ways"]["ppd"]["all"]["speedup"]["value"] = 9.0
    changed = with_figures(text, results, gpu)
    assert re.search(r"\| `ppd` \| [\d.]+ \| 9\.00 \(", changed)
    assert len(changed.splitlines()) == len(text.splitlines())
    assert shown_drafters(results["defaults"]) == ["ppd", "suffix"]
    draw(results, gpu, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="has no two lines"):
        with_figures("", results, gpu)
    results["defaults_sampled"]["setting"]["jax"] = "another"
    with pytest.raises(UserError, match="of one device, JAX, dtype, code and size"):
        with_figures(text, results, gpu)


def test_the_readme_is_short_and_names_every_method():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert all(f"| `{name}` |" in text for name in METHODS)


def test_commands_are_named_and_not_files():
    """`jaxspec tune`, never a file that a user would have to find; the README shows the two that a clone has."""
    files = [*ROOT.glob("jaxspec/**/*.py"), *ROOT.glob("docs/*.*"), *ROOT.glob("configs/*.py"), ROOT / "Makefile"]
    named = re.compile(rf"(?<![\w/])(?:{'|'.join(COMMANDS)})\.py")
    texts = {file: file.read_text() for file in files if file.suffix != ".png"}
    assert [file for file, text in texts.items() if named.search(text)] == []
