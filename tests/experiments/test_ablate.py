"""Ablations on a tiny model: trainings that are shared and resumed, decoding, similarity, and what the page says."""

import dataclasses
import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import ablate
from experiments import decoding_studies as ablation_decoding
from experiments.decoding_studies import (
    ACCEPTED,
    DECODING_STUDIES,
    STEP_METHODS,
    DecodingStudy,
    Entry,
    run_acceptance,
    run_coverage,
    run_decoding,
)
from experiments.early_exit import EarlyExit
from experiments.probing import similarity, step_times
from experiments.report import not_run, write_report
from experiments.studies import STUDIES, Conclusion, Study
from experiments.trainings import _LARGE, run_name, run_studies
from jaxspec.config import DataConfig, TrainConfig
from jaxspec.decoding.acceptance import Rejection
from jaxspec.drafting.adapter import Adapter, adapter_plan, make_drafter, save_adapter
from jaxspec.drafting.tree import chain, parse_tree
from jaxspec.errors import UserError
from jaxspec.files import alone_in
from jaxspec.methods import PPD, SPACE, BiTA, HiddenTransfer
from jaxspec.model.base import Base
from jaxspec.model.decoder import causal_mask
from jaxspec.training.configs import load_config
from jaxspec.training.data import Answer
from jaxspec.training.run_config import RunConfig
from jaxspec.versions import code_version
from jaxspec.weights.shapes import SMOLLM2_135M
from tests.helpers.tiny import make_text_model
from tests.helpers.training import write_at_once
from tests.methods.test_probes import batch_of, predict, sequence, trained


@pytest.fixture(scope="module")
def model():
    return make_text_model()


@pytest.fixture(scope="module")
def base_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablations")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(12)))
    data = DataConfig(
        prompts=str(prompts), answers=8, held_out=3, max_prompt_tokens=16, max_answer_tokens=24,
        held_out_tokens=24, batch_size=4, cache=str(folder / "cache"),
    )  # fmt: skip
    train = TrainConfig(steps=4, batch_size=2, sequence_length=40, insertions=8, save_every=2, eval_every=0)
    return RunConfig(model="tiny-text", method=PPD(), data=data, train=train)


SMALL = (
    Study(
        "entry", "Late entry", "a paper", 1e-2, {"0": PPD(), "1": PPD(entry=1)},
        (Conclusion("0", "1", "early is better"),), "layer",
    ),
    Study(
        "prompts", "Prompts", "a paper", 1e-2, {"masks": BiTA(prompting="none"), "deep": BiTA(prompts=2)},
        training={"insertions": 7},
    ),
    Study(
        "shared", "Shared", "a paper", 1e-2, {"the same": PPD(), "exit": EarlyExit((1, 2, 2))},
        own={"exit": {"learning_rate": 2e-3}},
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def done(model, base_run, tmp_path_factory):
    """A folder with all small studies, their results, and what was said."""
    folder, said = tmp_path_factory.mktemp("studies"), []
    return folder, run_studies(base_run, model, folder, SMALL, said.append), said


def test_trainings_are_shared_and_done_once(model, base_run, done):
    folder, results, said = done
    assert len(said) == 6 and len(list(folder.iterdir())) == 5  # PPD() is in two tables
    assert results["shared"]["the same"] == results["entry"]["0"]
    assert results["prompts"]["deep"]["method"]["prompts"] == 2
    assert [results[s][v]["training"]["insertions"] for s, v in (("prompts", "deep"), ("entry", "0"))] == [7, 8]
    assert [r["training"]["learning_rate"] for r in results["shared"].values()] == [1e-2, 2e-3]
    assert all(np.shape(r["accuracy"]) == (3, 10) for study in results.values() for r in study.values())
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}
    assert run_studies(base_run, model, folder, SMALL, print) == results
    assert before == {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}


def test_a_killed_training_goes_on(model, base_run, done, tmp_path, monkeypatch):
    import jaxspec.training.trainer as module

    whole = done[1]["prompts"]
    write_at_once(monkeypatch)
    real, calls = module.train_step, []

    def dies(*args, **settings):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*args, **settings)

    monkeypatch.setattr(module, "train_step", dies)
    with pytest.raises(KeyboardInterrupt):
        run_studies(base_run, model, tmp_path / "killed", SMALL[1:2], print)
    (again,) = run_studies(base_run, model, tmp_path / "killed", SMALL[1:2], print).values()
    assert len(calls) == 4 + 2 + 4  # the last checkpoint was after two of four updates
    for label in whole:
        assert again[label]["accuracy"] == whole[label]["accuracy"]


def test_decoding_says_what_each_tree_costs_and_brings(model, done):
    folder, results, _ = done
    study = DecodingStudy(
        "trees", "Trees", "a paper",
        {
            "straight": Entry("straightforward:3", study="prompts", variant="deep"),
            "wide": Entry("efficient:2", study="prompts", variant="deep"),
        },
        (Conclusion("straight", "wide", "straight is faster"),),
    )  # fmt: skip

    def runs(name, label):
        return folder / results[name][label]["run"]

    figures = run_decoding(study, model, runs, ["question 1", "another"], 12)
    assert [figures[name]["rows"] for name in figures] == [1, 4 + 3, 7 + 21] and study.axis == ""
    assert all(row["identical"] == 2 and row["tokens_per_step"] >= 1 for row in figures.values())
    assert {row["code"] for row in figures.values()} == {code_version()}


def test_a_method_with_a_base_of_its_own_races_that(model, tmp_path):
    method = SPACE(distances=2, rank=2)
    trainable = jax.tree.map(lambda x: x + 0.1, method.init(jax.random.key(0), model.base))
    save_adapter(tmp_path, Adapter(method, trainable, model.fingerprint, {}))
    study = DecodingStudy(
        "masks", "Masks", "a paper", {str(m): Entry(chain(m), study="s", variant="v") for m in (1, 2)}
    )
    figures = run_decoding(study, model, lambda study, variant: tmp_path, ["question 1", "another"], 12)
    assert [figures[name]["rows"] for name in figures] == [1, 4, 9]
    assert all(row["identical"] == 2 for row in figures.values())


def test_both_lossless_rules_are_measured_at_every_temperature(model, monkeypatch):
    adapter = Adapter(PPD(), PPD().init(jax.random.key(0), model.base), model.fingerprint, {})
    monkeypatch.setattr(ablation_decoding, "open_adapter", lambda method, model: (None, adapter))
    rules = run_acceptance(model, "a chain", Entry("chain:2", "ppd"), ["question 1", "another"], 8)
    assert set(rules) == {"match", "rejection"} and {entry.method for entry in ACCEPTED.values()} == {"space", "medusa"}
    cells = [cell for found in rules.values() for cell in found]
    assert len(cells) == 8 and all(c["tokens_per_step"] >= 1 and 0 <= c["accepted"] <= 1 for c in cells)
    assert any(cell["accepted"] > 0 for cell in cells)


def test_rules_are_compared_in_pairs(model, monkeypatch):
    """By hand, for a rule that needs half the steps on every prompt; with the draft vocabulary of the entry."""
    info, frequent = {"draft_vocabulary": 7}, np.arange(30, dtype=np.int32)
    adapter = Adapter(PPD(), PPD().init(jax.random.key(0), model.base), model.fingerprint, info, frequent)
    asked = []

    def generate(model, drafter, prompts, max_new_tokens, *, acceptance, seed, **settings):
        asked.append((drafter.draft_vocabulary.ids.size, seed, len(prompts)))
        faster = 1 if type(acceptance) is Rejection else 2
        steps = [faster * (seed + 1)] * len(prompts)
        return [SimpleNamespace(new_tokens=5, steps=s, accepted=[1, 0], offered=[3, 1]) for s in steps]

    monkeypatch.setattr(ablation_decoding, "open_adapter", lambda method, model: (None, adapter))
    monkeypatch.setattr(ablation_decoding, "generate", generate)
    found = run_acceptance(model, "", Entry("chain:2", "ppd", draft_vocabulary=20), ["a prompt"] * 22, 8)
    assert asked == [(20, 0, 4), (20, 1, 4), (20, 2, 4), (20, 3, 4), (20, 4, 4), (20, 5, 2)] * 8
    cells = {rule: found[0] for rule, found in found.items()}
    steps = 4 * (1 + 2 + 3 + 4 + 5) + 2 * 6
    assert cells["match"] == {"prompts": 22, "tokens_per_step": pytest.approx(88 / (2 * steps)), "accepted": 0.25}
    assert cells["rejection"]["tokens_per_step"] == pytest.approx(88 / steps)
    assert cells["rejection"]["against_match"] == pytest.approx({"value": 2, "low": 2, "high": 2})


def test_coverage_by_hand(model, monkeypatch):
    frequent = np.arange(20_000)[::-1]
    adapter = Adapter(PPD(), {}, model.fingerprint, {}, frequent)
    monkeypatch.setattr(ablation_decoding, "open_adapter", lambda method, model: (None, adapter))
    answers = [Answer([0], [19_999, 18_976, 18_975]), Answer([7], [19_999])]
    found = run_coverage(model, answers)
    assert list(found) == ["1024", "2048", "4096", "8192", "16384"]
    assert found["1024"] == 0.75 and found["2048"] == 1


def test_early_exit_reads_a_layer_through_a_projection_of_its_own(tiny):
    base, method = Base(tiny.params, tiny.decoder), EarlyExit((1, 2))
    tokens, trainable = sequence(tiny), trained(method, base)
    logits = predict(method, trainable, base, batch_of(tokens, [[4, 9]]))
    positions = jnp.arange(20)[None]
    for d, layer in enumerate(method.layers):
        hidden, _ = base.rows(base.embed(tokens), positions, causal_mask(1, 20), layers=(0, layer))
        wanted = base.normed(hidden)[0, jnp.array([4, 9])] @ trainable[f"head{d + 1}"]
        np.testing.assert_allclose(logits[0, :, d], wanted, rtol=1e-3, atol=1e-3)


def test_similarity_by_hand(tiny):
    """Figure 4: the second step's state against the real one of the token two further, layer by layer."""
    base, method = Base(tiny.params, tiny.decoder), HiddenTransfer(distances=2, layers=(0, 1))
    trainable = trained(method, base)
    tokens = np.asarray(sequence(tiny, 9))[0].tolist()
    curves = similarity(method, trainable, base, [Answer(tokens[:6], tokens[6:])])
    assert [list(curve) for curve in curves] == [[1, 2, 3], [2, 3]]

    p, positions = 6, jnp.arange(9)[None]  # the only insertion point
    read = {}
    for last in (1, 2, 3):
        x = base.embed(jnp.array([tokens]))
        read[last], _ = base.rows(x, positions, causal_mask(1, 9), layers=(0, last))
    x = jnp.concatenate(
        [base.embed(jnp.array([tokens[: p + 1]])), base.embed(jnp.array([[tokens[p]]])) @ trainable["step1"]], 1
    )
    x, _ = base.rows(x, jnp.arange(8)[None], causal_mask(1, 8), layers=(0, 1))
    x = jnp.concatenate([x, x[:, p : p + 1] @ trainable["step2"]], axis=1)
    for last in (2, 3):
        x, _ = base.rows(x, jnp.arange(9)[None], causal_mask(1, 9), layers=(last - 1, last))
        a, b = np.asarray(x[0, p + 2]), np.asarray(read[last][0, p + 2])
        assert curves[1][last] == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), abs=1e-4)


def test_step_times_have_every_drafter(tiny):
    base, drafters = Base(tiny.params, tiny.decoder), {}
    for method in (PPD(), HiddenTransfer(layers=(1, 1, 2))):
        adapter = Adapter(method, method.init(jax.random.key(0), base), tiny.fingerprint, {})
        drafters[method.name] = make_drafter(adapter, adapter_plan(adapter, "chain:2"), tiny)
    times = step_times(tiny, drafters, 64, 2)
    assert set(times) == {"ppd", "hidden_transfer"} and min(times.values()) > 0


def fake_accuracy(method, first):
    return [[first / (d + 1)] + [0.02] * 9 for d in range(method.max_distance)]


def test_the_page_holds_every_study_and_its_verdicts(tmp_path):
    """From made-up figures: deep prompts that do not help, an efficient tree that does."""
    trainings = {
        study.name: {
            label: {"accuracy": fake_accuracy(method, 0.3), "parameters": 1234, "answers": 500, "answers_seen": 72}
            for label, method in study.variants.items()
        }
        for study in STUDIES
    }
    trainings["bita_prompting"]["deep"]["accuracy"] = fake_accuracy(BiTA(), 0.2)
    trainings["bita_prompting"]["deep"]["accuracy"][0][4] = 0.05  # its fifth candidate
    row = {"rows": 9, "tokens_per_step": 1.5, "tokens_per_second": 40.0, "speedup": 1.0, "identical": 2, "prompts": 2}
    row |= {"seconds": [0.026, 0.039] * 4, "code": "a version"}
    decoding = {study.name: {label: dict(row) for label in study.entries} for study in DECODING_STUDIES}
    trees = decoding["bita_decoding"]
    trees["efficient tree"]["seconds"] = [0.02, 0.03] * 4
    trees["full tree, k = 1"]["seconds"] = [0.01, 0.04] * 4  # faster on half of the prompts
    trees["full tree, k = 3"]["seconds"] = [0.0199, 0.0299] * 4
    trees["full tree, k = 4"]["seconds"] = []  # from before times were kept
    trainings["space_training"]["LoRA"]["perplexity"] = {"base": 1.25, "own": 1.5}
    for label, own in zip(trainings["space_quality"], (1.5, 1.8, 1.512), strict=True):
        trainings["space_quality"][label] |= {"perplexity": {"base": 2.0, "own": own}, "answer_entropies": nats(own)}
    trainings["transfer_second"]["25"]["accuracy"][1][0] -= 0.015
    trainings["bita_prompts"]["8"]["accuracy"][1] = [0.01] * 10
    for distance in trainings["ppd_prefix"]["without"]["accuracy"]:
        distance[4] += 0.02
    steps = {name: {"8": 0.02, "16": 0.03} for name in STEP_METHODS}
    steps["Hidden Transfer, layers 10/14/18"] = {"8": 0.015, "16": 0.027}
    results = {
        "setting": {"model": "m", "steps": 3, "eval_answers": 5, "machine": "a machine", "prompts": "p.jsonl"},
        "trainings": trainings,
        "decoding": decoding,
        "steps": steps,
        "similarity": [{"11": 0.5, "12": 0.7, "13": 0.6}],
        "acceptance": {
            "a tree": {
                rule: [{"prompts": 40, "tokens_per_step": made, "accepted": made - 1} for made in found]
                for rule, found in (("match", [1.5, 1.4, 1.3, 1.2]), ("rejection", [1.4, 1.4, 1.35, 1.25]))
            }
        },
        "coverage": {"1024": 0.71234, "2048": 0.8},
    }
    ratios = [(0.93, 0.9, 0.96), (1.0, 0.97, 1.03), (1.04, 1.01, 1.07), (1.04, None, None)]
    for cell, ratio in zip(results["acceptance"]["a tree"]["rejection"], ratios, strict=True):
        cell["against_match"] = dict(zip(("value", "low", "high"), ratio, strict=True))
    page = write_report(results, tmp_path).read_text()
    for study in (*STUDIES, *DECODING_STUDIES):
        assert f"### {study.title}" in page
    assert "| BiTA: prompting design |  |  |  |  | 3 |  |" in page  # what three of the lines under its table say
    said = [line for line in page.splitlines() if line.startswith("- ")]
    for title, ours in (("**all of the papers'**", False), ("questions of ours", True)):
        lines = [line for line in said if line.endswith("our question") == ours]
        counts = [sum(f"**{word}**" in line for line in lines) for word in ("holds", "does not hold", "in part")]
        assert f"| {title} | {' | '.join(str(count or '') for count in counts)} |" in page and counts[1] > 0
    assert "below 0.010 (top-1) and 0.010 (top-5) as a mean over distances" in page
    assert "`python ablate.py --prompts p.jsonl`" in page and "Measured with version a version of what" in page
    where = "mean over distances, top-1"
    assert "instead of the paper's hard labels. Trained on 72 of 500 answers." in page
    assert "learning to guess costs no quality: **does not hold** (1.200 (1." in page
    assert "where masks weigh as much as the text: **undecided** (1.008 (" in page
    assert f"help more by distillation too: **does not hold** ({where} -0.061, top-5 -0.051), our question" in page
    assert f"shallow prompts help a little: **undecided** ({where} +0.000, top-5 +0.000)\n" in page
    assert f"makes predictions worse: **in part** ({where} +0.000: undecided, top-5 +0.020: holds)" in page
    assert "faster than straightforward: **holds** (1.30 (1.30 to 1.30) times its speed; tokens per" in page
    for k, word in enumerate(("undecided", "holds", "no difference", "not judged"), 1):
        assert f"and than full trees of {k}: **{word}**" in page
    assert "Not run yet, or without what verdicts need: `bita_decoding`, `acceptance`.\n" in page
    assert f"beyond 16 nothing is gained: **holds** ({where} +0.000, top-5 +0.000)" in page
    assert "a second step near the top is worse: **holds** (at distance 2, top-1 +0.015, top-5 +0.015)" in page
    assert "with as many rows: **holds** (25% less at 8 rows, 10% less at 16 rows)" in page
    assert "beyond 16 nothing is gained: **holds** (1.00 (1.00 to 1.00) times its speed" in page
    similar = "0.50 after layer 11, 0.70 after layer 12, where it is highest, 0.60 after the last"
    assert f"to the real ones than they begin: **holds** (cosine, step 1: {similar})" in page
    assert "8: the probe at distance 2 was lost. No verdict on accuracies rests on it." in page
    assert "more prompts help, up to about 16: **not judged**" in page
    assert "8: its training lost a probe, and no verdict rests on it." in page
    assert "more are faster, up to about 16: **not judged**" in page
    assert "sixteen are faster than one: **no difference**" in page
    assert "| deep | 0.200 | 0.100 | 0.067 | 0.310 | 0.180 | 0.147 | 1,234 |" in page
    assert "| 1,234 | 0.03 |  |  |" in page and "| 1,234 | 0.001 | 1.250 | 1.500 |" in page
    assert "| a tree | rejection | 1.40, 40% | 1.40, 40% | 1.35, 35% | 1.25, 25% |" in page
    assert "on 40 held-out\nprompts, every 4 with a seed of their own" in page
    ahead = "match, 0.93 (0.90 to 0.96) | undecided, 1.00 (0.97 to 1.03) | rejection, 1.04 (1.01 to 1.07)"
    assert f"| a tree | ahead | {ahead} | undecided, 1.04 |" in page
    assert "| tokens | 1024 | 2048 |" in page and "| share | 0.712 | 0.800 |" in page
    for picture in ("ablations-curves.png", "ablations-similarity.png"):
        assert f"]({picture})" in page and (tmp_path / picture).stat().st_size > 5000
    third = list(trainings["space_quality"])[-1]
    trainings["space_quality"][third]["answer_entropies"] = nats(1.49)
    assert "weigh as much as the text: **holds** (0.993 (" in write_report(results, tmp_path).read_text()
    del trainings["space_quality"][third]["answer_entropies"]  # older results
    page = write_report(results, tmp_path).read_text()
    assert "weigh as much as the text: **not judged**" in page and "need: `space_quality`, `bita_decoding`" in page


def nats(perplexity):
    """Of six answers of ten tokens: their sums of -log P and their numbers of tokens, even where it is 1.5."""
    each = np.log(perplexity) + (perplexity != 1.5) * np.array([-0.01, 0, 0.01, 0.02, -0.01, -0.01])
    return [[10 * x, 10] for x in each]


SHIPPED = {name: load_config(f"{name}_smollm2").method for name in ("ppd", "bita", "hidden_transfer")}
SHIPPED |= {name: load_config(f"{name}_smollm2").method for name in ("medusa", "hydra", "amphista")}
SHIPPED["space"] = load_config("space_smollm2_lora").method


def test_every_study_can_run_on_the_embedded_base():
    """Settings that fit its layers, trees that fit their methods, claims about variants that exist."""
    names = [study.name for study in (*STUDIES, *DECODING_STUDIES)]
    assert len(set(names)) == len(names)
    known = {study.name: study.variants for study in STUDIES}
    for method in {method for variants in known.values() for method in variants.values()}:
        assert jax.tree.leaves(method.abstract(dataclasses.replace(SMOLLM2_135M, vocab_size=64)))
    for study in STUDIES:
        assert {c.one for c in study.conclusions} | {c.other for c in study.conclusions} <= set(study.variants)
        assert set(study.own) <= set(study.variants)
        assert not study.axis or [float(label) for label in study.variants]
    for study in DECODING_STUDIES:
        for entry in study.entries.values():
            method = SHIPPED[entry.method] if entry.method else known[entry.study][entry.variant]
            tree, size = entry.tree, (method.name, method.max_distance, [[0.1] * 10] * method.max_distance)
            plan = parse_tree(tree, *size, method.probe_rows) if isinstance(tree, str) else tree
            assert plan.depth <= method.max_distance
            shapes = jax.tree.leaves(method.abstract(SMOLLM2_135M))
            assert sum(math.prod(x.shape) for x in shapes) < _LARGE  # else its adapter would not be kept
        assert {c.one for c in study.conclusions} | {c.other for c in study.conclusions} <= set(study.entries)
    masks = next(study for study in DECODING_STUDIES if study.name == "bita_masks_speed")
    assert [entry.tree.depth for entry in masks.entries.values()] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--studies", "bita_promting"], "did you mean 'bita_prompting'"),
        (["--steps", "0"], "must be at least 1"),
        (["--report"], "no results there"),
    ],
)
def test_bad_options_are_named(args, message, tmp_path):
    with pytest.raises(UserError, match=message):
        ablate.main([*args, "--docs", str(tmp_path)])


def test_a_run_writes_results_and_the_page(model, base_run, tmp_path, monkeypatch, capsys):
    studies = (dataclasses.replace(SMALL[0], name="ppd_entry"),)
    monkeypatch.setattr(ablate, "STUDIES", studies)
    monkeypatch.setattr(ablate, "load_model", lambda name: model)
    monkeypatch.setattr(ablate, "base_run", lambda options: base_run)
    args = ["--studies", "ppd_entry", "--output", str(tmp_path / "runs"), "--docs", str(tmp_path / "docs")]
    ablate.main(args)
    assert "ablations.md" in capsys.readouterr().out
    saved = json.loads((tmp_path / "docs" / "ablations.json").read_text())
    assert set(saved["trainings"]["ppd_entry"]) == {"0", "1"}
    (tmp_path / "docs" / "ablations.md").unlink()
    ablate.main(["--report", "--docs", str(tmp_path / "docs")])
    page = (tmp_path / "docs" / "ablations.md").read_text()
    assert "Late entry" not in page  # the real study's title
    assert "prompt tokens that join late" in page
    [missing] = (line for line in page.splitlines() if line.startswith("Not run yet, "))
    assert "`bita_decoding`" in missing and "`ppd_entry`" in missing  # whose real variants are others
    with pytest.raises(UserError, match="results of another setting"):
        ablate.main([*args, "--steps", "9"])
    assert saved["setting"]["machine"] == ""  # nothing was timed
    with alone_in(tmp_path / "docs"), pytest.raises(UserError, match="another process is writing there"):
        ablate.main(args)


def test_sampling_goes_on_where_it_stopped_or_anew_where_it_was_finished(model, base_run, monkeypatch):
    asked = []
    monkeypatch.setattr(ablate, "load_model", lambda name: model)
    monkeypatch.setattr(ablate, "base_run", lambda options: base_run)
    monkeypatch.setattr(ablate, "check_adapters", lambda names, model: None)
    monkeypatch.setattr(ablate, "run_acceptance", lambda model, label, *rest: asked.append(label))
    first, *others = ACCEPTED
    results = {"acceptance": {first: {}}}
    ablate.run(ablate.Options(), ("acceptance",), results, lambda: None)
    assert asked == others and list(results["acceptance"]) == [first, *others]
    ablate.run(ablate.Options(), ("acceptance",), results, lambda: None)
    assert asked == [*others, first, *others]


def test_what_is_timed_is_timed_on_one_machine(tmp_path, monkeypatch):
    def setting(machine, names, before):
        monkeypatch.setattr(ablate, "device_name", lambda: machine)
        return ablate.check_setting(ablate.Options(), names, {"setting": before}, tmp_path)

    untimed = setting("one", ("ppd_exits",), {})
    timed = setting("one", ("steps",), untimed)
    assert (untimed["machine"], timed["machine"]) == ("", "one")
    assert setting("another", ("ppd_exits",), timed) == timed
    with pytest.raises(UserError, match="another setting"):
        setting("another", ("bita_decoding",), timed)


def test_what_a_decoding_study_needs_is_trained_too():
    assert set(ablate.check_names(("bita_masks_speed",), [])) == {"bita_masks_speed", "bita_masks"}
    assert ablate.check_names(("ppd_exits",), ["steps"]) == ("ppd_exits",)


def test_without_names_what_is_missing_is_run():
    assert set(ablate.check_names((), ["steps", "bita_masks_speed"])) == {"steps", "bita_masks_speed", "bita_masks"}
    nothing = {"trainings": {}, "decoding": {}, "steps": {}, "similarity": [], "acceptance": {}, "coverage": {}}
    assert len(not_run(nothing)) == len(STUDIES) + len(DECODING_STUDIES) + 4
    assert "acceptance" in not_run(nothing | {"acceptance": {"SPACE, chain of 3": {}}})  # the others are missing
    assert "acceptance" in not_run(nothing | {"acceptance": {label: {} for label in ("a", "b", "c", "d")}})  # others
    for labels, missing in (("123", False), ("124", True)):
        exits = {label: {"accuracy": []} for label in labels}
        assert ("ppd_exits" in not_run(nothing | {"trainings": {"ppd_exits": exits}})) == missing
    assert "steps" not in not_run(nothing | {"steps": {"PPD": {}}})


def test_another_base_or_other_prompts_are_other_runs(model, base_run):
    other = dataclasses.replace(base_run, data=dataclasses.replace(base_run.data, prompts=""))
    stranger = dataclasses.replace(model, fingerprint="another")
    assert len({run_name(base_run, model), run_name(other, model), run_name(base_run, stranger)}) == 3
