"""Claims judged by benchmarks, accuracies and ablations made by hand."""

import pytest

from jaxspec.evaluation.bench_report import Results
from jaxspec.evaluation.metrics import figures
from jaxspec.evaluation.results import Evidence, claims_table, faster, gains_more, predicts, trained
from tests.evaluation.test_metrics import row

REFERENCE = "autoregressive"


def timed(seconds, lengths):
    """Answers of five tokens each, which took so long."""
    return [[row(number, [5], [s], [s + 1], [lengths]) for number, s in enumerate(seconds)]]


def benchmark(ways, groups=("all",), accuracies=None):
    """Results of {way: (seconds of every question, lengths of its steps)}, the same in every group."""
    rows = {way: timed(*found) for way, found in ways.items()}
    found = {way: {g: figures(rows[way], rows[REFERENCE]) for g in groups} for way in ways}
    named = {way: {"accuracy": accuracies[way]} if accuracies else {} for way in ways}
    return Results({"ways": named}, rows, found, {}, {})


PLAIN = ([4.0] * 8, [1, 1, 1, 1])


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [([1.0] * 8, "holds"), ([4.0] * 8, "does not hold"), ([1.0, 4.0] * 4, "undecided")],
)
def test_a_way_is_faster_where_the_whole_interval_says_so(seconds, verdict):
    found = benchmark({REFERENCE: PLAIN, "ppd": (seconds, [2, 2]), "medusa": ([2.0] * 8, [3, 1])})
    judged = faster("ppd", "medusa")(Evidence([found], {}))
    assert judged.holds == verdict and "2.00 against 2.00 tokens per step" in judged.measured
    if verdict == "holds":
        assert judged.measured.startswith("2.00 (2.00 to 2.00) times its speed")
    assert faster("ppd", "bita")(Evidence([found], {})) is None


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        ([[0.1], [0.4], [0.3]], "holds"),
        ([[0.9], [0.2], [0.1]], "does not hold"),  # distance 1 is not asked for
        ([[0.5], [0.305], [0.198]], "no difference"),
        ([[0.5], [0.4], [0.1]], "in part"),
    ],
)
def test_predictions_are_compared_from_a_distance_on(ours, verdict):
    ways = {REFERENCE: PLAIN, "ppd": PLAIN, "medusa": PLAIN}
    accuracies = {REFERENCE: [], "ppd": ours, "medusa": [[0.5], [0.3], [0.2]]}
    judged = predicts("ppd", "medusa", 10, 2)(Evidence([benchmark(ways, accuracies=accuracies)], {}))
    assert judged.holds == verdict
    assert judged.measured.startswith("top-10 at distance 2/3: ") and "0.300 / 0.200" in judged.measured


def test_trainings_are_compared():
    trainings = {"bita_prompting": {"deep": {"accuracy": [[0.3, 0.2]]}, "none": {"accuracy": [[0.2, 0.6]]}}}
    evidence = Evidence([benchmark({REFERENCE: PLAIN})], {"trainings": trainings})
    assert trained("bita_prompting", "deep", "none")(evidence).holds == "holds"  # by top-1
    assert trained("bita_prompting", "deep", "shallow")(evidence) is None


def test_gains_of_groups_may_come_from_another_benchmark():
    chat = benchmark({REFERENCE: PLAIN, "ppd": ([2.0] * 8, [2, 2]), "medusa": ([2.0] * 8, [2, 2])}, ("all", "mt_bench"))
    code = benchmark({REFERENCE: PLAIN, "ppd": ([1.0] * 8, [4]), "medusa": ([4.0] * 8, [4])}, ("all", "humaneval"))
    judged = gains_more("humaneval")(Evidence([chat, code], {}))
    assert judged.measured == "ppd 4.00 against 2.00, medusa 1.00 against 2.00" and judged.holds == "for 1 of 2"
    assert gains_more("math_reasoning")(Evidence([chat, code], {})) is None


def test_claims_that_nothing_is_known_of_are_left_out():
    ways = {REFERENCE: PLAIN, "ppd": PLAIN, "medusa": PLAIN}
    lines = claims_table(Evidence([benchmark(ways)], {}))
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| PPD is faster than Medusa"]
    assert lines[2].endswith("| **undecided** |")
