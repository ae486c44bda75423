"""docs/settings.md says what the runs for the papers' models set, and leaves nothing out."""

import dataclasses
from pathlib import Path

import pytest

from jaxspec.training.run_config import load_papers
from jaxspec.training.settings import TextSource

UNLISTED = {
    "train.remat": "spends time to save memory, the weights stay the same",
    "data.held_out_tokens": "concerns the evaluation alone",
    "data.column": "follows from the data set",
}


def read_tables():
    """By paper, the rows of its table: the cells by the heads of their columns."""
    tables = {}
    for section in (Path(__file__).parents[1] / "docs/settings.md").read_text().split("\n## ")[1:]:
        title, *lines = section.splitlines()
        cells = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
        heads, _, *rows = cells
        tables[title.lower().replace(" ", "_")] = [dict(zip(heads, row, strict=True)) for row in rows]
    return tables


def write(value):
    """A value as the page has it."""
    if isinstance(value, TextSource):
        return f"{value.weight} of {value.prompts}"
    return (" ".join(map(str, value)) if isinstance(value, tuple) else str(value)) or "none"


def settings(run):
    """What a run sets, by name: each value as the page has it, and whether it is the default."""
    found = {f"data.mixture.{i}": (write(source), False) for i, source in enumerate(run.data.mixture)}
    for prefix, part in (("", run), ("method.", run.method), ("train.", run.train), ("data.", run.data)):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if field.name not in ("model", "mixture") and not dataclasses.is_dataclass(value):
                found[prefix + field.name] = write(value), value == field.default
    return found


TABLES = read_tables()
PAPERS = load_papers()
RUNS = [(paper, name) for paper in PAPERS for name in PAPERS[paper] if "smollm2" not in name]


@pytest.mark.parametrize("paper, name", RUNS)
def test_the_page_gives_every_setting_of_a_run_as_the_config_has_it(paper, name):
    values = settings(PAPERS[paper][name])
    rows = [row for row in TABLES[paper] if row.get("runs", "all") == "all" or name in row["runs"].split(", ")]
    page = {row["setting"]: row["ours"] for row in rows}
    assert len(rows) == len(page), "a setting stands there twice"
    assert page == {setting: values[setting][0] for setting in page}
    assert {setting for setting, (_, default) in values.items() if not default} <= page.keys() | UNLISTED.keys()
