"""Verdicts from figures by hand: of trainings, of speeds, and on the papers' claims."""

import dataclasses
import math

import numpy as np
import pytest

from experiments.claims import CLAIMS
from experiments.studies import Conclusion
from experiments.verdicts import (
    BEST,
    NOT_MEASURED,
    Evidence,
    by_accuracy,
    by_perplexity,
    decoding_is_faster,
    gains_more,
    judge_decoding,
    predicts_better,
    spreads,
    training_is_better,
    way_is_faster,
)
from jaxspec.bench.runs import AGAIN, REFERENCE
from tests.helpers.experiments import benchmark

FIRST = Conclusion("one", "other", "")
PLAIN = ([4.0] * 8, [1, 1, 1, 1])


def spread(mean, single):
    return {(k, over): mean if over else single for k in BEST for over in (True, False)}


def seeds_of(*tops):
    """Trainings with these accuracies [M] of the best candidate; four others bring .1 more."""
    return [{"accuracy": [[x, 0.1, *[0.0] * 8] for x in each]} for each in tops]


def evidence(*benchmarks, trainings=None, decoding=None):
    ablations = {"trainings": trainings or {}, "decoding": decoding or {}}
    return Evidence(benchmarks or [benchmark({REFERENCE: PLAIN})], ablations)


def test_spreads_by_hand():
    """Twice the deviation of a difference: of means over two distances, and at one."""
    one, other = seeds_of((0.3, 0.2), (0.36, 0.2)), seeds_of((0.5, 0.4), (0.5, 0.46))
    results = {f"{name}, seed {i}": r for name, rs in (("A", one), ("B", other)) for i, r in enumerate(rs)}
    found = spreads(results)
    assert found[1, True] == found[5, True] == pytest.approx(2 * math.sqrt(2 * 0.03**2 / 2))
    assert found[1, False] == pytest.approx(2 * math.sqrt(2 * 0.06**2 / 2 / 2))
    assert spreads({}) == spread(0.01, 0.01)
    lost = seeds_of((0.01, 0.2))[0]
    assert spreads(results | {"A, seed 2": lost, "C, seed 0": one[0], "C, seed 1": lost}) == found


@pytest.mark.parametrize(
    ("one", "gains", "word"),
    [
        ([[0.3, 0.1], [0.2, 0.1]], True, "holds"),
        ([[0.2, 0.2], [0.1, 0.2]], True, "in part"),  # by top-5 alone
        ([[0.1, 0.3], [0.1, 0.15]], True, "undecided"),  # not by top-1, and top-5 does not tell
        ([[0.1, 0.1], [0.05, 0.1]], True, "does not hold"),
        ([[0.3, 0.1], [0.02, 0.02]], True, "not judged"),  # a probe was lost
        ([[0.21, 0.2], [0.11, 0.1]], False, "holds"),
        ([[0.3, 0.2], [0.2, 0.1]], False, "does not hold"),
    ],
)
def test_top_1_and_top_5_have_to_agree(one, gains, word):
    conclusion, other = dataclasses.replace(FIRST, gains=gains), [[0.2, 0.2], [0.1, 0.1]]
    assert by_accuracy(conclusion, {"accuracy": one}, {"accuracy": other}, spread(0.03, 0.03)).word == word


def test_one_distance_is_judged_as_one():
    pair = [{"accuracy": [[x, 0.2], [0.2, 0.1]]} for x in (0.4, 0.3)]
    single = [{"accuracy": r["accuracy"][:1]} for r in pair]
    assert by_accuracy(FIRST, *pair, spread(0.01, 0.2)).word == "holds"
    for conclusion, results in ((dataclasses.replace(FIRST, distance=1), pair), (FIRST, single)):
        verdict = by_accuracy(conclusion, *results, spread(0.01, 0.2))
        assert (verdict.word, verdict.measured) == ("undecided", "at distance 1, top-1 +0.100, top-5 +0.100")


@pytest.mark.parametrize(("own", "word"), [(1.49, "holds"), (1.512, "undecided"), (1.8, "does not hold")])
def test_perplexities_are_compared_answer_by_answer(own, word):
    """Six answers of ten tokens: sums of -log P, and numbers of tokens."""
    noise = (-0.01, 0, 0.01, 0.02, -0.01, -0.01)
    one, other = ([[10 * (np.log(p) + x * (p == own)), 10] for x in noise] for p in (own, 1.5))
    verdict = by_perplexity({"answer_entropies": one}, {"answer_entropies": other})
    assert verdict.word == word and verdict.measured.endswith("times its perplexity, 6 answers")


@pytest.mark.parametrize(
    ("seconds", "gains", "lost", "word"),
    [
        ([0.02, 0.03] * 4, True, (), "holds"),
        ([0.02, 0.03] * 4, False, (), "does not hold"),
        ([0.01, 0.06] * 4, True, (), "undecided"),
        ([0.026, 0.039] * 4, True, (), "no difference"),
        ([0.026, 0.039] * 4, False, (), "holds"),
        ([], True, (), "not judged"),
        ([0.02, 0.03] * 4, True, ["other"], "not judged"),
    ],
)
def test_speeds_are_compared_prompt_by_prompt(seconds, gains, lost, word):
    shared = {"tokens_per_step": 1.5, "speedup": 1.0}
    rows = {"one": {"seconds": seconds} | shared, "other": {"seconds": [0.026, 0.039] * 4} | shared}
    assert judge_decoding(dataclasses.replace(FIRST, gains=gains), rows, lost).word == word


@pytest.mark.parametrize(
    ("seconds", "again", "word"),
    [
        (1.0, 4.0, "holds"),
        (4.0, 4.0, "does not hold"),
        (1.98, 4.0, "no difference"),
        (1.9, 4.08, "holds"),
        (1.9, 4.4, "undecided"),  # autoregressive decoding differs as much from itself
    ],
)
def test_a_way_is_faster_where_the_whole_interval_says_so(seconds, again, word):
    ways = {REFERENCE: PLAIN, AGAIN: ([again] * 8, [1] * 4), "ppd": ([seconds] * 8, [2, 2])}
    known = evidence(benchmark(ways | {"medusa": ([2.0] * 8, [3, 1])}))
    speed = f"{2 / seconds:.2f}"
    measured = f"{speed} ({speed} to {speed}) times its speed, 2.00 against 2.00 tokens per step"
    assert dataclasses.astuple(way_is_faster("ppd", "medusa", known)) == (word, measured)
    assert way_is_faster("ppd", "bita", known) == NOT_MEASURED


@pytest.mark.parametrize(
    ("ours", "best", "word"),
    [
        ([[0.1, 0.0], [0.4, 0.0], [0.3, 0.0]], (1,), "holds"),
        ([[0.9, 0.0], [0.2, 0.0], [0.1, 0.0]], (1,), "does not hold"),  # distance 1 is not asked for
        ([[0.5, 0.0], [0.305, 0.0], [0.198, 0.0]], (1,), "no difference"),
        ([[0.5, 0.0], [0.4, 0.0], [0.1, 0.0]], (1,), "in part"),
        ([[0.5, 0.0], [0.2, 0.2], [0.1, 0.2]], (1, 2), "in part"),
    ],
)
def test_predictions_are_compared_from_a_distance_on(ours, best, word):
    ways = dict.fromkeys((REFERENCE, "ppd", "medusa"), PLAIN)
    known = evidence(benchmark(ways, accuracies={"ppd": ours, "medusa": [[0.5], [0.3], [0.2]]}))
    verdict = predicts_better("ppd", "medusa", known, best, first=2)
    assert verdict.word == word and verdict.measured.count(" against 0.300 / 0.200") == len(best)
    assert predicts_better("ppd", REFERENCE, known) == NOT_MEASURED  # no distance in common


def test_ablations_are_judged_as_on_their_page():
    deep, none = {"accuracy": [[0.3, 0.2]], "training": {"steps": 36}}, {"accuracy": [[0.25, 0.1]]}
    trainings = {"prompting": {"deep": deep, "none": none}}
    verdict = training_is_better("prompting", "deep", "none", evidence(trainings=trainings))
    measured = "at distance 1, top-1 +0.050, top-5 +0.150 (an ablation of 36 updates)"
    assert dataclasses.astuple(verdict) == ("holds", measured)
    trainings["seeds"] = {f"X, seed {i}": r for i, r in enumerate(seeds_of((0.3,), (0.35,)))}
    verdict = training_is_better("prompting", "deep", "none", evidence(trainings=trainings))
    assert verdict.word == "in part"  # 0.05 is less than seeds make
    same = {"tokens_per_step": 1.5, "speedup": 0.9, "prompts": 8, "code": "older"}
    rows = {"deep": {"seconds": [1.0] * 8} | same, "none": {"seconds": [1.2] * 8} | same}
    verdict = decoding_is_faster("speed", "deep", "none", evidence(decoding={"speed": rows}))
    measured = "1.20 (1.20 to 1.20) times its speed; tokens per step 1.50 against 1.50 (an ablation: 8 prompts, "
    measured += "0.90 and 0.90 times autoregressive speed, code older)"
    assert dataclasses.astuple(verdict) == ("holds", measured)


@pytest.mark.parametrize(
    ("chat", "code", "word"),
    [
        ([2.0] * 8, [1.0] * 8, "holds"),
        ([1.0] * 8, [2.0] * 8, "does not hold"),
        ([1.0, 4.0] * 4, [1.0, 3.0] * 4, "undecided"),
        ([2.0] * 4, [1.0] * 8, "not judged"),  # too few for an interval
    ],
)
def test_a_gain_is_larger_where_the_difference_is_clear(chat, code, word):
    chats = {REFERENCE: ([4.0] * len(chat), [1] * 4), "ppd": (chat, [2, 2])}
    known = [benchmark(chats, "humanities", limit=1), benchmark({REFERENCE: PLAIN, "ppd": (code, [4])}, "humaneval")]
    assert gains_more("humaneval", evidence(*known)).word == word


def test_gains_are_compared_with_one_adapter_under_the_same_conditions():
    ways = {REFERENCE: PLAIN, "ppd": ([2.0] * 8, [2, 2]), "medusa": ([2.0] * 8, [2, 2]), "hf": ([1.0] * 8, [2, 2])}
    chat = benchmark(ways, "writing", temperature=0.0, limit=80)
    code = benchmark(ways | {"ppd": ([1.0] * 8, [4])}, "humaneval", temperature=0.0, limit=16)
    word, measured = dataclasses.astuple(gains_more("humaneval", evidence(chat, code)))
    assert word == "more for 1, less for 0, undecided for 1"
    assert measured.startswith("ppd 4.00 against 2.00 (tokens per step 4.00 against 2.00), medusa 2.00 against 2.00 ")
    assert measured.endswith("; tokens per step are higher for 1 of 2; 8 questions against 8")
    assert gains_more("math_reasoning", evidence(chat, code)) == NOT_MEASURED
    assert gains_more("humaneval", evidence(benchmark(ways, "coding", temperature=0.0), code)) == NOT_MEASURED
    retrained = code.setting["ways"] | {"ppd": {"adapter": "another digest"}}
    for change in {"settings": {"temperature": 0.8}}, {"device": "another"}, {"ways": retrained}:
        changed = dataclasses.replace(code, setting=code.setting | change)
        assert "ppd" not in gains_more("humaneval", evidence(chat, changed)).measured


def test_claims_that_nothing_is_known_of_say_so():
    known = evidence(benchmark(dict.fromkeys((REFERENCE, "ppd", "medusa"), PLAIN)))
    words = {claim.text: claim.judge(known).word for claim in CLAIMS}
    assert words.pop("PPD is faster than Medusa") == "no difference" and {*words.values()} == {"not measured"}
