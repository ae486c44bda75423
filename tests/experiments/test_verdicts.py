"""What a difference of two trainings says, against the spread of seeds."""

import math

import pytest

from experiments.studies import Conclusion
from experiments.verdicts import by_accuracy, spreads, verdict


def test_verdicts():
    assert verdict(0.02, 0.01) == "holds" and verdict(-0.02, 0.01) == "does not hold"
    assert verdict(0.009, 0.01) == verdict(-0.009, 0.01) == "undecided"
    assert verdict(0.02, 0.01, gains=False) == "does not hold" and verdict(-0.02, 0.01, gains=False) == "holds"
    assert verdict(0.009, 0.01, gains=False) == "holds"


def seeds_of(*tops):
    """Results of trainings with these accuracies [M] of the best candidate; four others bring .1 more."""
    return [{"accuracy": [[x, 0.1, *[0.0] * 8] for x in each]} for each in tops]


def test_spreads_by_hand():
    """Twice the deviation of a difference: of means over two distances, and at one."""
    one, other = seeds_of((0.3, 0.2), (0.36, 0.2)), seeds_of((0.5, 0.4), (0.5, 0.46))
    results = {f"{name}, seed {i}": r for name, rs in (("A", one), ("B", other)) for i, r in enumerate(rs)}
    found = spreads(results)
    assert found[1, True] == found[5, True] == pytest.approx(2 * math.sqrt(2 * 0.03**2 / 2))
    assert found[1, False] == pytest.approx(2 * math.sqrt(2 * 0.06**2 / 2 / 2))
    assert spreads({}) == {(k, mean): 0.01 for k in (1, 5) for mean in (True, False)}
    assert spreads({f"A, seed {i}": r for i, r in enumerate(seeds_of((0.3,), (0.3,)))})[1, True] == 0.01
    lost = seeds_of((0.01, 0.2))[0]
    assert spreads(results | {"A, seed 2": lost, "C, seed 0": one[0], "C, seed 1": lost}) == found


@pytest.mark.parametrize(
    ("one", "word"),
    [
        ([[0.3, 0.1], [0.2, 0.1]], "holds"),
        ([[0.2, 0.2], [0.1, 0.2]], "in part"),  # top-5 alone
        ([[0.1, 0.3], [0.1, 0.15]], "undecided"),  # not by top-1, and top-5 does not tell
        ([[0.1, 0.1], [0.05, 0.1]], "does not hold"),
        ([[0.3, 0.1], [0.02, 0.02]], "not judged"),
    ],
)
def test_top_1_and_top_5_have_to_agree(one, word):
    close = {(k, mean): 0.03 for k in (1, 5) for mean in (True, False)}
    other = [[0.2, 0.2], [0.1, 0.1]]
    assert by_accuracy(Conclusion("", "", ""), {"accuracy": one}, {"accuracy": other}, close)[0] == word


def test_one_distance_is_judged_as_one():
    close = {(k, mean): 0.01 if mean else 0.2 for k in (1, 5) for mean in (True, False)}
    pair = [{"accuracy": [[x, 0.2], [0.2, 0.1]]} for x in (0.4, 0.3)]
    single = [{"accuracy": r["accuracy"][:1]} for r in pair]
    assert by_accuracy(Conclusion("", "", ""), *pair, close)[0] == "holds"
    for conclusion, results in ((Conclusion("", "", "", distance=1), pair), (Conclusion("", "", ""), single)):
        word, measured = by_accuracy(conclusion, *results, close)
        assert word == "undecided" and measured == "at distance 1, top-1 +0.100, top-5 +0.100"
