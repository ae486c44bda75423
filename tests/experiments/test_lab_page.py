"""The leaderboard's page from results by hand: ranks, intervals, what is ahead, and checks that disagree."""

from pathlib import Path

import numpy as np
import pytest

from experiments.lab.lab import Lab
from experiments.lab.page import Row, half_width, spread_of_seeds, write_page
from tests.helpers.experiments import put


def score(steps, **more):
    """Ten answers of 100 tokens, each in so many steps."""
    labels = [f"alone-{nodes}" for nodes in (4, 16, 64)] + ["same-64", "own-64"]
    drafts = {label: {"rows": 16, "steps": [steps] * 10} for label in labels}
    return {"tokens": [100] * 10, "accuracy": [[0.5, 0.2] + [0.0] * 8], "drafts": drafts, "learned_tokens": 0} | more


def test_entries_are_ranked_and_what_is_ahead_is_said(lab, tmp_path):
    put(lab, "ppd/seed-0/score", score(50))
    put(lab, "medusa/seed-0/score", score(80))
    put(lab, "suffix/score", score(80))
    page = write_page(lab, tmp_path).read_text()
    lines = [line for line in page.splitlines() if line.startswith(("| 1 |", "| 2 |", "| 3 |"))]
    assert "| 1 | `ppd` | 1 | 2.00 ± 0.00 | 2.00 ± 0.00 |" in lines[0] and "| yes |" in lines[0]
    assert "`medusa`" in lines[1] and "| no |" in lines[1]
    assert "`suffix`" in lines[2] and "| yes |" not in lines[2] and "| no |" not in lines[2]
    assert "| `ppd` | .500 | .700 | .700 |" in page and "Adapters that ship" not in page


def test_a_check_that_disagrees_with_the_replay_stands_out(lab, tmp_path):
    put(lab, "ppd/seed-0/score", score(50))
    put(lab, "ppd/seed-0/live", {"nodes": 16, "tokens": [100] * 2, "steps": [49, 50], "identical": 2})
    put(lab, "medusa/seed-0/score", score(80))
    put(lab, "medusa/seed-0/live", {"nodes": 16, "tokens": [100] * 2, "steps": [70, 70], "identical": 1})
    page = write_page(lab, tmp_path).read_text()
    assert "| 2.02 (2 of 2 identical) |" in page and "**1.43, replayed 1.25** (1 of 2 identical)" in page


def test_decoded_answers_take_the_place_of_a_replay(lab, tmp_path):
    for nodes, steps in ((4, 90), (16, 80)):
        result = {"nodes": nodes, "rows": nodes, "tokens": [100] * 3, "steps": [steps] * 3, "identical": 3}
        put(lab, f"jacobi/decode-alone-{nodes}", result)
    assert "| 1 | `jacobi` | 1 | 1.11 ± 0.00 | 1.25 ± 0.00 |  |" in write_page(lab, tmp_path).read_text()


def test_seeds_widen_intervals():
    """Two seeds that lie apart widen also the interval of a method with one."""
    rows = [Row("ppd", [score(50), score(40)], [], None), Row("medusa", [score(80)], [], None)]
    spread = spread_of_seeds(rows, "alone-16")
    assert spread == pytest.approx(np.std([2.0, 2.5], ddof=1))
    assert half_width(np.zeros(5), spread, [1]) == pytest.approx(1.96 * spread)
    assert half_width(np.zeros(5), spread, [2, 2]) == pytest.approx(1.96 * spread)
    assert spread_of_seeds(rows[1:], "alone-16") == 0


def test_the_page_without_results_says_so(lab, tmp_path):
    page = write_page(lab, tmp_path).read_text()
    assert "Nothing is scored yet" in page and "| --- |" not in page and "experiments.lab run" in page


def test_the_page_that_ships_is_made_from_the_results(tmp_path):
    page = write_page(Lab(Path("experiments/results"), tmp_path / "work"), tmp_path).read_text()
    assert page == Path("docs/leaderboard.md").read_text()
