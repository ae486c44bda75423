"""Builders of trees, compared by the tokens that they are expected to make."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.trees import compare, main

DOCS = Path(__file__).parents[2] / "docs"


def test_the_exact_search_makes_most_and_random_trees_fewest():
    shipped = json.loads((DOCS / "trees-builders.json").read_text())
    adapter = json.loads((DOCS.parent / shipped["adapter"] / "adapter.json").read_text())
    found = compare(np.array(adapter["accuracy"]), (4, 20), 20)
    exact, stripped, full, random = (np.array(tokens) for tokens in found.values())
    assert (exact >= stripped).all() and (stripped >= full).all() and (full > random).all()
    for name, tokens in shipped["tokens_per_step"].items():  # the figures of the page
        assert [tokens[shipped["sizes"].index(size)] for size in (4, 20)] == pytest.approx(found[name], abs=1e-4)


def test_figures_and_picture_are_written(tmp_path):
    head = {"accuracy": [[0.5, 0.2], [0.4, 0.1]]}
    (tmp_path / "adapter.json").write_text(json.dumps(head))
    main(["--adapter", str(tmp_path), "--sizes", "3", "7", "--seeds", "2", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "trees-builders.json").read_text())
    assert found["sizes"] == [3, 7] and found["tokens_per_step"]["full"] == [1.5, 1.7]
    assert (tmp_path / "trees-builders.png").stat().st_size > 1000
