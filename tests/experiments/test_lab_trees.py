"""Trees counted from ranks: the words that keep them, the jobs, speeds by costs of rows, and what is said of them."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.lab import ranks
from experiments.lab.builder_claims import builder_sections
from experiments.lab.domain_claims import scores_of
from experiments.lab.jobs import all_jobs
from experiments.lab.lab import Lab
from experiments.lab.ranks import (
    accuracy_of,
    count_trees,
    decode_trees,
    filled_tree,
    keep_ranks,
    plans_of,
    ranks_from,
    words_of,
)
from experiments.lab.row_costs import Costs, cpu_costs, gpu_costs
from experiments.lab.size_claims import size_sections
from experiments.lab.speeds import Counted, at_every_size, verdict
from experiments.lab.tree_claims import SPEEDS, tree_sections
from experiments.lab.tree_tables import BUILDERS, DECODED_SIZES, PPD_SIZES, TREES
from jaxspec.bench.metrics import Estimate
from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.drafter import make_drafter
from jaxspec.methods import PPD
from jaxspec.trees import chain, sparse_tree
from jaxspec.trees.plan import plan_to_json
from jaxspec.tuning.latency import RowLatency
from tests.helpers.experiments import put

ACCURACY = [[0.5, 0.2], [0.4, 0.1], [0.3, 0.1]]


def job_of(name):
    """One of the lab's."""
    return next(job for job in all_jobs() if job.name == name)


# Ranks and trees


def test_ranks_in_words():
    found = np.array([[0, -1], [11, 3], [-1, -1]])
    assert words_of(found) == ["0b.", ".3."]
    assert ranks_from(words_of(found)).tolist() == found.tolist()


def test_trees_are_counted(lab):
    """Of one answer all tokens are first candidates, of the other none is any."""
    job = job_of("shipped/ppd/trees")
    put(lab, "shipped/ppd/ranks", {
        "tokens": [4, 4], "accuracy": ACCURACY, "probe_rows": 1, "ranks": [["0000"] * 3, ["...."] * 3],
    })  # fmt: skip
    found = count_trees(lab, job)
    assert found["tokens"] == [4, 4] and found["trees"].keys() == TREES["ppd"].keys()
    rows = {label: tree["rows"] for label, tree in found["trees"].items()}
    assert all(rows[f"filled, size {size}"] <= rows[f"stripped, size {size}"] for size in PPD_SIZES)
    assert all(tree["steps"][1] == 4 for tree in found["trees"].values())  # a step for every token
    assert found["trees"]["exact, size 4"]["steps"][0] == 2 and found["trees"]["exact, size 128"]["steps"][0] == 1
    assert found["trees"]["full, size 4"] == {"rows": 4, "expected": 1.5, "expected_here": 1.5, "steps": [2, 4]}


def test_ranks_of_a_recording(lab, model, monkeypatch):
    """Of the answers that the job asks for; the words are as long as the answers, less the first token."""
    trainable = PPD().init(jax.random.key(0), model.base)
    tree = plan_to_json(chain(2))
    adapter = Adapter(PPD(), trainable, model.fingerprint, {"accuracy": ACCURACY, "tree": tree})
    texts = [([1, 2, 3], [4, 5, 6, 7]), ([3, 2], [9, 8, 7, 6, 5]), ([3], [1, 2])]
    monkeypatch.setattr(ranks, "drafter_of", lambda lab, job, vocabulary: make_drafter(adapter, model))
    monkeypatch.setattr(ranks, "scored_texts", lambda model, data: texts)
    monkeypatch.setattr(Lab, "data", None)
    job = dataclasses.replace(job_of("shipped/ppd/ranks"), settings={"answers": 2})
    found = keep_ranks(lab, job)
    assert found["tokens"] == [3, 4] and found["accuracy"] == ACCURACY and found["probe_rows"] == 1
    assert [[*map(len, words)] for words in found["ranks"]] == [[3] * 3, [4] * 3]


def test_sizes_are_decoded_on_the_first_answers(lab, model, monkeypatch):
    trainable, info = PPD().init(jax.random.key(0), model.base), {"accuracy": ACCURACY, "tree": plan_to_json(chain(2))}
    drafter = make_drafter(Adapter(PPD(), trainable, model.fingerprint, info), model)
    monkeypatch.setattr(ranks, "drafter_of", lambda lab, job, vocabulary: drafter)
    monkeypatch.setattr(ranks, "scored_texts", lambda model, data: [([n], [1, 2]) for n in range(9)])
    monkeypatch.setattr(ranks, "measure_speeds", lambda *given: given)
    monkeypatch.setattr(Lab, "data", None)
    drafters, prompts, tokens = decode_trees(lab, job_of("shipped/ppd/sizes"))
    assert [*drafters] == ["4", "8", "16", "32", "64"] and prompts == [[0], [1], [2], [3], [4], [5]] and tokens == 64
    assert [drafter.num_rows for drafter in drafters.values()] == sorted({d.num_rows for d in drafters.values()})


def test_random_trees_are_several():
    assert len({plan.states for plan in plans_of("random:8", "ppd", ACCURACY)}) > 10


def test_filled_trees_are_the_best_full_ones_within_rows():
    """Of any depth: a tree of fewer levels, whose nodes have fewer probes, may have more of them."""
    accuracy = np.array(ACCURACY)
    for rows in (6, 8, 12, 20, 40):
        filled = filled_tree(accuracy, rows)
        grown = [sparse_tree(accuracy, nodes) for nodes in range(1, rows)]
        fit = [plan.expected_tokens for plan in grown if plan.num_nodes + plan.num_probes <= rows]
        assert filled.num_nodes + filled.num_probes <= rows and filled.expected_tokens >= max(fit)
    assert filled_tree(np.array([[0.5, 0.2], [0.9, 0.0]]), 6).states[0].paths == ((0,), (1,))  # not the deep one


def test_accuracies_on_the_answers_themselves():
    """[M, K]: a rank beyond the last candidate is a miss, and so is what lies behind the end."""
    texts = [np.array([[0, 1], [1, -1]]), np.array([[5, 0], [0, -1]])]
    assert accuracy_of(texts, 2).tolist() == [[0.5, 0.25], [0.25, 0.25]]


# Costs and speeds


def test_costs_of_rows():
    """Never less for more rows; on the GPU one row costs what eight do, to which a step is padded."""
    for costs in (gpu_costs(), cpu_costs()):
        seconds = [costs.seconds("ppd", rows) for rows in (1, 4, 8, 16, 64, 256, 340)]
        assert seconds == sorted(seconds) and costs.autoregressive() <= seconds[0]
    assert gpu_costs().latency(1) == gpu_costs().latency(8) < gpu_costs().latency(64)
    assert gpu_costs().drafting["bita"] > gpu_costs().drafting["ppd"] >= 0  # its prefix
    assert cpu_costs().latency(64) > 5 * cpu_costs().latency(1)


STEPS = {"wide": {"rows": 8, "steps": [50] * 10, "expected_here": 1.6}, "narrow": {"rows": 2, "steps": [80] * 10}}
COSTS = Costs("a device", RowLatency((1, 8), (1.0, 2.0)), {"ppd": 0.5})


def test_speeds_are_steps_times_their_costs():
    counted = Counted("ppd", [100] * 10, STEPS)
    assert counted.against_expected("wide").value == 1.25
    assert counted.tokens_per_step("wide") == 2 and counted.longer("wide", "narrow").value == 1.6
    slow, fast = 2.5, 1 + 1 / 7 + 0.5  # seconds of a step
    assert counted.speedup("wide", COSTS).value == pytest.approx(2 / slow)
    found = counted.faster("wide", "narrow", COSTS)
    assert [found.low, found.value, found.high] == pytest.approx([1.6 * fast / slow] * 3)  # all answers are alike


def test_verdicts_of_ratios():
    assert verdict(Estimate(1.2, 1.1, 1.3)) == "**holds**"
    assert verdict(Estimate(1.3, 1.2, 1.4), least=1.3) == "**undecided**; 1.44 would have been seen"
    assert verdict(Estimate(1.2, 1.1, 1.3), least=1.3) == "**does not hold**"
    assert verdict(Estimate(0.97, 0.95, 0.99)) == "**does not hold**"
    assert verdict(Estimate(1.0, 0.98, 1.02)) == "**no difference**"
    assert verdict(Estimate(1.0, None, None)).startswith("**undecided**")
    assert verdict(Estimate(1.05, 1.0, 1.1)) == "**undecided**; 1.10 would have been seen"


def test_verdicts_at_several_sizes():
    above, below, around = Estimate(1.2, 1.1, 1.3), Estimate(0.8, 0.7, 0.9), Estimate(1.0, 0.9, 1.1)
    assert at_every_size([above, above]) == "**holds**"
    assert at_every_size([above, around, below]) == "**in part**: above at 1, below at 1 of 3"
    assert at_every_size([around, below]) == "**does not hold**: below at 1 of 2"  # above at none
    assert at_every_size([around]) == "**undecided**"
    slightly, even = Estimate(0.99, 0.98, 0.995), Estimate(1.0, 0.99, 1.01)
    assert at_every_size([slightly, even]) == "**no difference**"  # by less than what counts as one


# The page


def test_claims_of_what_was_counted(lab):
    """A draft that takes fewer steps is ahead where its rows cost no more; what was not counted is not reached."""
    assert tree_sections(lambda name: None) == []
    steps = {label: {"rows": 16, "expected": 2.0, "steps": [60] * 20} for label in TREES["bita"]}
    steps["efficient tree"]["steps"] = [40] * 20
    rows = {"shipped/bita/trees": {"result": {"tokens": [100] * 20, "trees": steps}}}
    page = "\n".join(tree_sections(rows.get))
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in page.splitlines() if line.startswith("| ")}
    assert "1.50 (1.50 to 1.50) | **holds**" in lines["by more than 30%"]
    assert "| **no difference** |" in lines["masks on every candidate pay"]
    assert "**not reached**" in lines["five masks are faster than one"] and "PPD's trees" not in page
    assert {claim.text for claim in SPEEDS} < lines.keys()


def drafts_of_ppd(**steps):
    """Of every builder and size alike, fifty steps for a hundred tokens; others as given by builder."""
    return {
        f"{builder}, size {size}": {
            "rows": size + 4, "expected": 1.5, "expected_here": 2.0, "steps": [steps.get(builder, 50)] * 8
        }
        for builder in BUILDERS for size in PPD_SIZES
    }  # fmt: skip


def test_the_size_that_decodes_fastest():
    """It holds where that size decodes in less time than all others. The smallest one shows no peak."""
    drafts = drafts_of_ppd()
    decoded = {str(size): {"speedup": 4 / size, "seconds": [size / 100] * 8} for size in DECODED_SIZES}
    decoded["8"] = {"speedup": 2.0, "seconds": [0.02] * 8}

    def line_of():
        [page, _] = builder_sections(Counted("ppd", [100] * 8, drafts), decoded)
        return next(line for line in page.splitlines() if "decoded on two cores" in line)

    assert line_of().endswith("| **at the edge of the sizes** |")  # few rows are predicted to be fastest
    drafts["stripped, size 8"]["expected"] = 9.0
    assert "predicted size 8 (12 rows): 2.00 (2.00 to 2.00) times as fast as size 4 (8 rows)" in line_of()
    assert "speedups by size 1.00 with 4" in line_of() and line_of().endswith("| **holds** |")
    decoded["4"] = decoded["8"]
    assert line_of().endswith("| **no difference** |")
    [page, _] = builder_sections(Counted("ppd", [100] * 8, drafts), None)
    assert "decoded on two cores | PPD, Figure 6.6c |  | **not reached** |" in page


def test_claims_about_builders():
    """Full trees are compared at as many rows; accuracies are those on the same answers."""
    [page, _] = builder_sections(Counted("ppd", [100] * 8, drafts_of_ppd(filled=57, full=40, exact=50.5)), None)
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in page.splitlines() if line.startswith("| ")}
    line = lines["dynamic trees make more tokens than full ones of as many rows"]
    assert "1.14 (1.14 to 1.14) at size 4 (8 and 8 rows)" in line and line.endswith("| **holds** |")
    assert lines["dynamic trees make more tokens than full ones sized for three probes"].endswith("| **not judged** |")
    assert lines["tokens per step are as many as the accuracies say"].endswith("| **holds** as far as can be seen |")
    line = lines["the exact search makes more than the thesis's procedure"]
    assert "our question" in line and line.endswith("with fewer rows at 0 of 10 sizes | **no difference** |")


def test_every_claim_about_speed_is_about_trees_that_are_counted():
    assert {label for claim in SPEEDS for label in (claim.better, claim.worse)} <= {
        label for trees in TREES.values() for label in trees
    }


def test_what_ppd_adds_by_shapes():
    """Three embeddings; the thesis's figure for 13B is that of two."""
    [page] = size_sections()
    lines = [line for line in page.splitlines() if "Table 6.1" in line]
    assert "0.000182%, 12,288 | **holds**" in lines[1] and "8.07%" in lines[2]
    assert "0.000118%, 15,360 | **does not hold**" in lines[3] and "7.87e-05%, 10,240 | **holds**" in lines[4]


def test_memory_is_judged_by_what_compiled_steps_take():
    """Of parameters the shares would be as small as the thesis says."""
    [page] = size_sections()
    judged = {line.split(" | ")[0]: line for line in page.splitlines() if "memory" in line and line.startswith("|")}
    for claim, shares, bytes_ in (
        ("runtime memory grows by at most 0.0004%", ("0.28%", "0.00018%"), "38.6 MB of 13.8 GB"),
        ("PPD takes at most 0.004% of the memory that Medusa takes more", ("3.4%", "0.0021%"), "38.6 MB of 1.15 GB"),
    ):
        line = judged[f"| {claim}"]
        assert all(share in line for share in shares) and bytes_ in line and line.endswith("| **does not hold** |")
    assert [line.endswith("| **holds** |") for claim, line in judged.items() if "the base alone" in claim] == [True]


def test_turns_of_a_question_are_counted_together():
    held = {
        "questions": [["conversation", 2], ["code", 1], ["mathematics", 1], ["code", 1]],
        "answer_tokens": [4, 4, 4, 2, 0],
        "drafters": {"ppd": {"accuracy": ACCURACY, "probe_rows": 1, "ranks": [
            ["0000"] * 3, ["...."] * 3, ["0..."] * 3, [".."] * 3, [""] * 3,
        ]}},
    }  # fmt: skip
    scores = scores_of(held, "ppd")
    assert scores["conversation"] == {"tokens": [8], "drafts": {"fixed": {"steps": [1 + 4]}}}
    assert scores["code"]["tokens"] == [4] and scores["mathematics"]["drafts"]["fixed"]["steps"] == [2]
