"""The page of the papers' claims from results by hand: verdicts, what is not measured, and how many seeds there are."""

from pathlib import Path

import numpy as np

from experiments.lab.claims import HEADLINES, write_claims
from experiments.lab.entries import TRAINED
from experiments.lab.lab import Lab
from tests.helpers.experiments import put


def put_scores(lab, entry, steps, seeds=1):
    """Forty answers of 100 tokens in some `steps` each; of a method that differs from others by a little noise."""
    for seed in range(seeds):
        noise = np.random.default_rng([seed, len(entry)]).integers(-3, 4, 40)
        drafts = {f"alone-{nodes}": {"rows": 2 * nodes, "steps": (noise + steps).tolist()} for nodes in (4, 16, 64)}
        put(lab, f"{entry}/seed-{seed}/score", {"tokens": [100] * 40, "drafts": drafts, "accuracy": None})
        put(lab, f"{entry}/seed-{seed}/train", {"updates": 500})


def line_of(page, claim):
    """The first line of a claim in the tables."""
    return next(line for line in page.splitlines() if line.startswith(f"| {claim} |"))


def test_headlines_are_few_and_about_entries_of_the_lab():
    assert len(HEADLINES) <= 12 and len({(c.better, c.worse, c.label) for c in HEADLINES}) == len(HEADLINES)
    assert {name for claim in HEADLINES for name in (claim.better, claim.worse)} <= {entry.name for entry in TRAINED}


def test_verdicts(lab, tmp_path):
    for entry, steps in (("medusa", 60), ("amphista", 50), ("ppd", 70), ("bita", 60)):
        put_scores(lab, entry, steps)
    page = write_claims(lab, tmp_path).read_text()
    assert "| **holds** for these trainings; it falls if" in line_of(page, "Amphista is ahead of Medusa")
    assert "| 500 | 1 and 1 | this |" in line_of(page, "Amphista is ahead of Medusa")
    assert "| 32 and 32 | 1.43 against 1.6" in line_of(page, "PPD is ahead of Medusa")
    assert "**the opposite holds**" in line_of(page, "PPD is ahead of Medusa")
    assert "**undecided**; a difference of 0.0" in line_of(page, "BiTA is ahead of Medusa")
    assert "**not measured**" in line_of(page, "Hidden Transfer is ahead of Medusa")
    assert "the spread between seeds is not measured" in page


def test_the_spread_of_seeds_decides_with_the_answers(lab, tmp_path):
    """A difference that all answers share is nothing where seeds of one method lie as far apart."""
    put_scores(lab, "medusa", 60)
    put_scores(lab, "ppd", 50)
    put_scores(lab, "bita", 50)
    assert "**holds**" in line_of(write_claims(lab, tmp_path).read_text(), "PPD is ahead of Medusa")
    put_scores(lab, "bita", 40, seeds=2)
    put_scores(lab, "bita", 60, seeds=1)  # the first seed; the second one stays
    page = write_claims(lab, tmp_path).read_text()
    assert "**undecided**" in line_of(page, "PPD is ahead of Medusa") and "| 1 and 1 |" in page
    assert "| 2 and 1 |" in line_of(page, "BiTA is ahead of Medusa") and "(degrees of freedom: 1)" in page


def test_the_page_without_results_judges_nothing(lab, tmp_path):
    page = write_claims(lab, tmp_path).read_text()
    assert page.count("**not measured**") == len(HEADLINES)
    assert "other drafts" not in page and "## Trees" not in page


def test_the_page_that_ships_is_made_from_the_results(tmp_path):
    page = write_claims(Lab(Path("experiments/results"), tmp_path / "work"), tmp_path).read_text()
    assert page == Path("docs/claims.md").read_text()
