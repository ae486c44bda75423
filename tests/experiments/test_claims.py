"""Claims judged by benchmarks, accuracies and ablations made by hand."""

import dataclasses

import pytest

from experiments.claims import CLAIMS, Decoded, Evidence, Faster, GainsMore, Predicts, Trained
from experiments.decoding_studies import DECODING_STUDIES
from experiments.results import claims_table
from experiments.studies import STUDIES
from jaxspec.bench.metrics import figures
from jaxspec.bench.report import Results, control_line
from jaxspec.bench.ways import AGAIN
from jaxspec.methods import METHODS
from tests.bench.test_metrics import row

REFERENCE = "autoregressive"


def timed(seconds, lengths, category):
    """Answers of five tokens each, which took so long."""
    return [[row(number, [5], [s], [s + 1], [lengths]) | {"category": category} for number, s in enumerate(seconds)]]


def benchmark(ways, groups=("all",), accuracies=None, category="coding", **settings):
    """Results of {way: (seconds of every question, lengths of its steps)}, the same in every group."""
    rows = {way: timed(*found, category) for way, found in ways.items()}
    found = {way: {g: figures(rows[way], rows[REFERENCE]) for g in groups} for way in ways}
    named = {way: {"accuracy": accuracies[way]} if accuracies else {} for way in ways}
    named = {
        way: info | ({"adapter": "a digest"} if way in METHODS and way != REFERENCE else {})
        for way, info in named.items()
    }
    same = {"fingerprint": "a base", "dtype": "float32", "device": "a machine"}
    return Results({"ways": named, "settings": settings, "code": "this"} | same, rows, found, {}, {}, {})


PLAIN = ([4.0] * 8, [1, 1, 1, 1])


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [
        ([1.0] * 8, "holds"),
        ([4.0] * 8, "does not hold"),
        ([1.0, 4.0] * 4, "undecided"),
        ([1.98] * 8, "no difference"),
        ([1.98, 2.02] * 4, "no difference"),
        ([1.9] + [1.98] * 7, "no difference"),
        ([1.0, 1.0, 1.98, 1.98] * 2, "undecided"),  # it may be as little as autoregressive decoding against itself
    ],
)
def test_a_way_is_faster_where_the_whole_interval_says_so(seconds, verdict):
    found = benchmark({REFERENCE: PLAIN, "ppd": (seconds, [2, 2]), "medusa": ([2.0] * 8, [3, 1])})
    judged = Faster("ppd", "medusa").judge(Evidence([found], {}))
    assert judged.holds == verdict and "2.00 against 2.00 tokens per step" in judged.measured
    if seconds == [1.0] * 8:
        assert judged.measured.startswith("2.00 (2.00 to 2.00) times its speed")
    assert Faster("ppd", "bita").judge(Evidence([found], {})) is None


@pytest.mark.parametrize(
    ("again", "verdict", "words"),
    [(4.08, "holds", "0.980 (0.980 to 0.980), within 0.03"), (4.4, "undecided", "**not within** 0.03")],
)
def test_a_difference_that_autoregressive_decoding_has_from_itself_shows_nothing(again, verdict, words):
    ways = {REFERENCE: PLAIN, AGAIN: ([again] * 8, [1, 1, 1, 1])}
    ways |= {"ppd": ([1.9] * 8, [2, 2]), "medusa": ([2.0] * 8, [2, 2])}
    found = benchmark(ways)
    assert Faster("ppd", "medusa").judge(Evidence([found], {})).holds == verdict
    assert words in "".join(control_line(found))


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        ([[0.1], [0.4], [0.3]], "holds"),
        ([[0.9], [0.2], [0.1]], "does not hold"),  # distance 1 is not asked for
        ([[0.5], [0.305], [0.198]], "no difference"),
        ([[0.5], [0.4], [0.198]], "holds"),
        ([[0.5], [0.4], [0.1]], "in part"),
    ],
)
def test_predictions_are_compared_from_a_distance_on(ours, verdict):
    ways = {REFERENCE: PLAIN, "ppd": PLAIN, "medusa": PLAIN}
    accuracies = {REFERENCE: [], "ppd": ours, "medusa": [[0.5], [0.3], [0.2]]}
    evidence = Evidence([benchmark(ways, accuracies=accuracies)], {})
    judged = Predicts("ppd", "medusa", (10,), 2).judge(evidence)
    assert judged.holds == verdict
    assert judged.measured.startswith("top-10 at distance 2/3: ") and "0.300 / 0.200" in judged.measured
    assert Predicts("ppd", REFERENCE).judge(evidence) is None  # no distance in common


def test_predictions_that_are_better_by_some_counts_alone():
    ways = {REFERENCE: PLAIN, "ppd": PLAIN, "medusa": PLAIN}
    accuracies = {REFERENCE: [], "ppd": [[0.3, 0.4]], "medusa": [[0.5, 0.1]]}
    evidence = Evidence([benchmark(ways, accuracies=accuracies)], {})
    judged = Predicts("ppd", "medusa", (1, 2)).judge(evidence)
    assert judged.holds == "in part"
    assert judged.measured == "top-1 at distance 1: 0.300 against 0.500; top-2 at distance 1: 0.700 against 0.600"


def test_trainings_are_compared():
    """As the ablations' page does: by top-1 and top-5, against the spread of seeds."""
    variants = {"deep": [[0.3, 0.2]], "masks only": [[0.2, 0.35]], "none": [[0.25, 0.1]]}

    def made(found):
        return {"accuracy": found, "training": {"steps": 36}}

    study = {label: made(found) for label, found in variants.items()}
    trainings = {"bita_prompting": study}
    evidence = Evidence([benchmark({REFERENCE: PLAIN})], {"trainings": trainings})
    judge = Trained("bita_prompting", "deep", "none")
    judged = judge.judge(evidence)
    assert judged.holds == "holds"
    assert judged.measured == "at distance 1, top-1 +0.050, top-5 +0.150 (an ablation of 36 updates)"
    assert Trained("bita_prompting", "deep", "masks only").judge(evidence).holds == "in part"
    assert Trained("bita_prompting", "deep", "shallow").judge(evidence) is None
    trainings["seeds"] = {f"X, seed {seed}": made([[x, 0.2]]) for seed, x in enumerate((0.3, 0.35))}
    assert judge.judge(evidence).holds == "in part"  # 0.05 is less than seeds make


def test_decoding_with_variants_is_compared():
    times = {"deep": [1.0] * 8, "masks only": [1.2] * 8, "of old": None}
    same = {"tokens_per_step": 1.5, "speedup": 0.9, "prompts": 8, "code": "this"}
    study = {label: {"seconds": times[label], **same} for label in times}
    evidence = Evidence([benchmark({REFERENCE: PLAIN})], {"decoding": {"bita_prompting_speed": study}})
    judged = Decoded("bita_prompting_speed", "deep", "masks only").judge(evidence)
    assert judged.holds == "holds"
    measured = "1.20 (1.20 to 1.20) times its speed; tokens per step 1.50 against 1.50"
    assert judged.measured == f"{measured} (an ablation: 8 prompts, 0.90 and 0.90 times autoregressive speed)"
    study["deep"]["code"] = "older"
    judged = Decoded("bita_prompting_speed", "deep", "masks only").judge(evidence)
    assert judged.measured.endswith("speed, with another version of decoding's code than the main benchmark)")
    del study["deep"]["code"]
    judged = Decoded("bita_prompting_speed", "deep", "masks only").judge(evidence)
    assert judged.measured.endswith("speed, of which version of decoding's code was not noted)")
    assert Decoded("bita_prompting_speed", "deep", "of old").judge(evidence).holds == "not judged"
    assert Decoded("bita_prompting_speed", "deep", "shallow").judge(evidence) is None


def test_gains_of_groups_may_come_from_another_benchmark_of_the_same_settings():
    ways = {REFERENCE: PLAIN, "ppd": ([2.0] * 8, [2, 2]), "medusa": ([2.0] * 8, [2, 2]), "hf": ([1.0] * 8, [2, 2])}
    chat = benchmark(ways, ("all", "mt_bench"), category="writing", temperature=0.0, limit=80)
    ways |= {"ppd": ([1.0] * 8, [4]), "medusa": ([2.0] * 8, [4])}
    code = benchmark(ways, ("all", "humaneval"), temperature=0.0, limit=16)
    judged = GainsMore("humaneval").judge(Evidence([chat, code], {}))
    assert judged.measured.startswith("ppd 4.00 against 2.00 (tokens per step 4.00 against 2.00), medusa 2.00 against ")
    assert judged.measured.endswith("; tokens per step are higher for 2 of 2; 8 questions against 8")
    assert judged.holds == "more for 1, less for 0, undecided for 1"
    changed = dataclasses.replace(code, setting=code.setting | {"code": "newer"})
    assert "code has changed" in GainsMore("humaneval").judge(Evidence([chat, changed], {})).measured
    assert GainsMore("math_reasoning").judge(Evidence([chat, code], {})) is None
    coding = benchmark(ways, ("all", "mt_bench"), temperature=0.0, limit=80)
    assert GainsMore("humaneval").judge(Evidence([coding, code], {})) is None  # no conversation, although of MT-Bench
    retrained = code.setting["ways"] | {"ppd": {"adapter": "another digest"}}
    retrained = dataclasses.replace(code, setting=code.setting | {"ways": retrained})
    assert "ppd" not in GainsMore("humaneval").judge(Evidence([chat, retrained], {})).measured
    sampled = dataclasses.replace(code, setting=code.setting | {"settings": {"temperature": 0.8}})
    assert GainsMore("humaneval").judge(Evidence([chat, sampled], {})) is None
    elsewhere = dataclasses.replace(code, setting=code.setting | {"device": "another"})
    assert GainsMore("humaneval").judge(Evidence([chat, elsewhere], {})) is None


@pytest.mark.parametrize(
    ("chat", "code", "verdict"),
    [
        ([2.0] * 8, [1.0] * 8, "holds"),
        ([1.0] * 8, [2.0] * 8, "does not hold"),
        ([2.0] * 8, [2.0] * 8, "undecided"),
        ([1.0, 4.0] * 4, [1.0, 3.0] * 4, "undecided"),
        ([2.0] * 4, [1.0] * 8, "not judged"),  # too few for an interval
    ],
)
def test_a_gain_is_larger_where_the_difference_is_clear(chat, code, verdict):
    plain = ([4.0] * len(chat), [1, 1, 1, 1])
    benchmarks = [
        benchmark({REFERENCE: plain, "ppd": (chat, [2, 2])}, ("all", "mt_bench"), category="humanities", limit=1),
        benchmark({REFERENCE: PLAIN, "ppd": (code, [2, 2])}, ("all", "humaneval"), limit=2),
    ]
    assert GainsMore("humaneval").judge(Evidence(benchmarks, {})).holds == verdict


def test_claims_that_nothing_is_known_of_say_so():
    ways = {REFERENCE: PLAIN, "ppd": PLAIN, "medusa": PLAIN}
    lines = claims_table(Evidence([benchmark(ways)], {}))
    verdicts = {line.split(" | ")[0][2:]: line for line in lines[2:-2]}
    assert list(verdicts) == [claim.text for claim in CLAIMS]
    known = verdicts.pop("PPD is faster than Medusa")
    assert known.endswith("| **no difference** |")
    assert all(line.endswith(" |  | **not measured** |") for line in verdicts.values())


def test_claims_name_what_exists():
    studies = {study.name: study.variants for study in STUDIES}
    studies |= {study.name: study.entries for study in DECODING_STUDIES}
    for judge in (claim.judge for claim in CLAIMS):
        if isinstance(judge, Trained | Decoded):
            assert {judge.one, judge.other} <= studies[judge.study].keys()
        elif not isinstance(judge, GainsMore):
            assert {judge.one, judge.other} <= METHODS.keys()
