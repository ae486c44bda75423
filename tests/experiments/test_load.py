"""Load on a server: what of its runs is a pair."""

import pytest

from experiments.load import report, speedup

FIGURES = dict.fromkeys(
    ("tokens_per_step", "drafted_steps", "first_median", "first_95", "token_median", "token_95"), 1.0
)


def run(concurrency, number, drafting, *seconds):
    """What load.json has of a run."""
    return {
        "concurrency": concurrency,
        "round": number,
        "drafting": drafting,
        "tokens_per_second": 10.0 * (number + 1),
        "seconds": list(seconds),
    } | FIGURES


def test_a_request_is_compared_with_itself_in_the_same_round():
    """Whichever run of a round came first; a round that was interrupted has no pairs."""
    results = [
        run(1, 0, True, 1.0, 2.0, 4.0),
        run(1, 0, False, 2.0, 4.0, 8.0),
        run(1, 1, False, 20.0, 40.0, 80.0),
        run(1, 1, True, 10.0, 20.0, 40.0),
        run(1, 2, True, 100.0, 100.0, 100.0),
        run(4, 0, True, 1.0),
        run(4, 0, False, 0.5),
    ]
    made = speedup(results, 1)
    assert (made.value, made.low, made.high) == pytest.approx((2, 2, 2))
    assert speedup(results, 4).value == 0.5
    lines = report(results).splitlines()
    assert [line.split("|")[2:5] for line in lines[2:]] == [
        [" no ", " 15.0 ", "  "],
        [" yes ", " 20.0 ", " 2.00 (2.00 to 2.00) "],
        [" no ", " 10.0 ", "  "],
        [" yes ", " 10.0 ", " 0.50 "],
    ]
