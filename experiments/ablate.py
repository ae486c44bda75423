"""The papers' tables on a small base: python -m experiments.ablate [--studies NAME ...] [--report].

The lab trains the rows of the tables of accuracies (`python -m experiments.lab run --only ablations`). This measures
what the others compare: speeds of trees, steps, rules of acceptance, draft vocabularies and pseudo states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.decoding_studies import DECODING_STUDIES, SAMPLED, TEMPERATURES
from experiments.lab.jobs import variants
from experiments.lab.lab import Lab
from experiments.lab.terms import answers_of
from experiments.lab.training import run_of, train_run
from experiments.lab.unpack import RESULTS, WORK
from experiments.measurements import (
    load_drafters,
    measure_acceptance,
    measure_coverage,
    measure_similarity,
    measure_speeds,
    measure_steps,
)
from experiments.studies import STUDIES, Study
from jaxspec.bench.metrics import Estimate
from jaxspec.bench.report import interval
from jaxspec.cli.options import parse
from jaxspec.cli.program import enable_compilation_cache, run_main
from jaxspec.drafters import load_drafter, open_adapter
from jaxspec.errors import UserError, check_at_least, differences, suggest
from jaxspec.files import exclusive, read_json, writable, write_atomically, write_json
from jaxspec.machine import device_name
from jaxspec.markdown import table
from jaxspec.training.evaluate import top

SAMPLED_PROMPTS = 40  # held-out prompts that are sampled from
WATCHED = "hidden_transfer"  # whose pseudo states are compared with real ones
COUNTED = "ppd"  # whose counts of tokens are judged; all adapters that ship have the same
FILE = "ablations.json"


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure what the papers' tables of speeds compare, and write all tables.

    Attributes:
      studies: names of tables of speeds, or of `coverage`, `steps`, `similarity` and `acceptance`; they are measured
        again. Default: all that have not been measured.
      decode_prompts: held-out prompts that trees are compared on.
      eval_answers: held-out answers whose pseudo states are watched.
      max_new_tokens: per answer that is decoded.
      results: folder of the lab's results.
      work: the lab's work folder; adapters that tables of speeds need are trained there.
      output: folder of ablations.json and ablations.md.
      report: write the page from what was measured before, and stop.
    """

    studies: tuple[str, ...] = ()
    decode_prompts: int = 12
    eval_answers: int = 32
    max_new_tokens: int = 64
    results: str = RESULTS
    work: str = WORK
    output: str = "runs/ablations"
    report: bool = False


# Measuring


def choose(names: Collection[str], measured: Mapping[str, Any]) -> set[str]:
    """What to measure: what is named, or else all that is missing. Raises UserError for an unknown name."""
    studies = [*(study.name for study in DECODING_STUDIES), *MEASURES]
    for name in names:
        if name not in studies:
            raise UserError(f"unknown study {name!r}{suggest(name, studies)}; studies: {', '.join(studies)}")
    finished = {name for name in measured if name != "acceptance"}  # which is measured drafter by drafter
    finished |= {"acceptance"} if SAMPLED.keys() <= measured.get("acceptance", {}).keys() else set()
    return {*(names or [name for name in studies if name not in finished])}


def trained(lab: Lab, study: str, label: str) -> Path:
    """The folder of a training's adapter, which is trained first where it is missing: the lab keeps none of these."""
    [job] = [job for job in variants() if job.seed == 0 and job.settings == {"study": study, "label": label}]
    folder = lab.work / "ablations-trained" / study / label.replace("w/o", "without")
    if not (folder / "adapter.json").exists():
        run = run_of(lab.terms, lab.data, job.entry, job.seed, job.entry.rate, lab.terms.updates)
        train_run(lab, run, folder)
    return folder


def measure(options: Options, lab: Lab, names: set[str], sampled: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield (name, figures) of what is asked for, one by one.

    Args:
      options: of the command line.
      lab: whose base and answers are used.
      names: what to measure.
      sampled: which drafters of `SAMPLED` to measure for `acceptance`.

    Raises:
      UserError: an adapter that is needed does not ship.
    """
    model, tokens = lab.model, options.max_new_tokens
    studies = [study for study in DECODING_STUDIES if study.name in names]
    asked = [row.adapter for study in studies for row in study.rows.values()]
    asked += [WATCHED] * ("similarity" in names) + [COUNTED] * ("coverage" in names)
    asked += [SAMPLED[label].adapter for label in sampled if "acceptance" in names]
    for adapter in {adapter for adapter in asked if isinstance(adapter, str)}:
        open_adapter(adapter, model)  # before hours of training
    _, answers = answers_of(model, lab.data.scoring)
    prompts = [answer.prompt_tokens for answer in answers]
    for study in studies:
        drafters = load_drafters(study.rows, model, lambda *row: trained(lab, *row))
        yield study.name, measure_speeds(drafters, prompts[: options.decode_prompts], tokens)
    if "steps" in names:
        yield "steps", measure_steps(model)
    if "similarity" in names:
        yield (
            "similarity",
            measure_similarity(open_adapter(WATCHED, model), model.base, answers[: options.eval_answers]),
        )
    if "coverage" in names:
        yield "coverage", measure_coverage(open_adapter(COUNTED, model).frequent_tokens, answers)
    for label in sampled if "acceptance" in names else ():
        row = SAMPLED[label]
        drafter = load_drafter(row.adapter, model, tree=row.tree, draft_vocabulary=row.draft_vocabulary)
        yield "acceptance", {label: measure_acceptance(label, drafter, prompts[:SAMPLED_PROMPTS], tokens)}


# Tables


def training_table(lab: Lab, study: Study) -> list[str]:
    """Accuracies by distance of the rows of a study that the lab has trained, the mean over seeds; [] for none."""
    done = [job for job in variants() if job.settings["study"] == study.name and lab.is_done(job)]
    lines = []
    for label in study.rows:
        results = [lab.result(job.name) for job in done if job.settings["label"] == label]
        if results:
            tops = [np.mean([top(result["accuracy"], k) for result in results], axis=0) for k in (1, 5)]
            perplexities = [result["perplexity"]["own"] for result in results if "perplexity" in result]
            perplexity = f"{np.mean(perplexities):.3f}" if perplexities else ""
            accuracies = [" / ".join(f"{value:.3f}" for value in values) for values in tops]
            lines.append([label, len(results), *accuracies, f"{results[0]['parameters']:,}", perplexity])
    heads = ["variant", "seeds", "top-1 by distance", "top-5", "trained parameters", "perplexity of a tuned base"]
    return table(heads, lines) if lines else []


def speed_table(rows: Mapping[str, Any]) -> list[str]:
    """Speeds of a study's rows."""
    heads = ["variant", "rows", "tokens per step", "tokens/s", "speedup", "identical", "code"]
    cells = "{rows} {tokens_per_step:.2f} {tokens_per_second:.1f} {speedup:.2f}"
    lines = [
        [label, *cells.format(**r).split(), f"{r['identical']} of {r['prompts']}", r["code"]]
        for label, r in rows.items()
    ]
    return table(heads, lines)


def steps_table(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Milliseconds of a step by method and rows."""
    lines = [[name, *(f"{1e3 * value:.1f}" for value in seconds.values())] for name, seconds in found.items()]
    return table(["method", *(f"{rows} rows" for rows in next(iter(found.values())))], lines)


def coverage_table(found: Mapping[str, float]) -> list[str]:
    """The share of held-out answers that draft vocabularies hold."""
    return table(["tokens", *found], [["share", *(f"{share:.3f}" for share in found.values())]])


def similarity_table(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Cosine of pseudo and real states by layers passed."""
    layers = [*next(iter(found.values()))]
    lines = [[step, *(f"{curve[n]:.2f}" if n in curve else "" for n in layers)] for step, curve in found.items()]
    return table(["layers passed", *layers], lines)


def acceptance_table(found: Mapping[str, Mapping[str, list[dict[str, Any]]]]) -> list[str]:
    """Tokens per step and accepted drafts by rule and temperature, and the ratio of each rule's tokens to match's."""
    lines = []
    for label, rules in found.items():
        for name, cells in rules.items():
            shares = (f"{cell['tokens_per_step']:.2f}, {100 * cell['accepted']:.0f}%" for cell in cells)
            lines.append([label, name, *shares])
        for name, cells in rules.items():
            if name != "match":
                ratios = (interval(Estimate(**cell["against_match"])) for cell in cells)
                lines.append([label, f"{name} / match", *ratios])
    return table(["", "rule", *(f"T = {t:g}" for t in TEMPERATURES)], lines)


MEASURES: dict[str, tuple[str, Callable[[Any], list[str]]]] = {  # what compares no trees: title and table
    "coverage": ("Draft vocabulary: share of the tokens of held-out answers that it holds", coverage_table),
    "steps": ("Milliseconds of a step by rows, of which a quarter are nodes and the others probes", steps_table),
    "similarity": ("Hidden Transfer Figure 4: cosine of pseudo states and the real ones", similarity_table),
    "acceptance": ("`match`, `rejection` and `block` sampled: tokens per step, accepted drafts", acceptance_table),
}  # fmt: skip


def write_page(lab: Lab, measured: Mapping[str, Any], setting: Mapping[str, Any], folder: Path) -> Path:
    """Write ablations.md: a table of every study that has results. Returns the page."""
    sections = [(study.title, study.source, training_table(lab, study)) for study in STUDIES]
    sections += [(s.title, s.source, speed_table(measured[s.name])) for s in DECODING_STUDIES if s.name in measured]
    sections += [(title, "", write(measured[name])) for name, (title, write) in MEASURES.items() if name in measured]
    terms = f"Base: {lab.terms.model}. Trainings are the lab's, of {lab.terms.updates} updates each."
    parts = ["# The papers' tables on a small base", terms, ", ".join(f"{k}: {v}" for k, v in setting.items())]
    for title, source, lines in sections:
        parts += [f"## {title}", source, "\n".join(lines)] if lines else []
    page = folder / "ablations.md"
    write_atomically(page, ("\n\n".join(filter(None, parts)) + "\n").encode())
    return page


def main(args: list[str]) -> None:
    """Measure what is asked for, save every part, write the page."""
    options = parse(Options, args, prog="python -m experiments.ablate")
    check_at_least(options, {"decode_prompts": 1, "eval_answers": 1, "max_new_tokens": 2})
    folder = writable(Path(options.output))
    with exclusive(folder):
        results = {"setting": {}, "measured": {}}
        results |= read_json(folder / FILE) if (folder / FILE).exists() else {}
        measured, lab = results["measured"], Lab(Path(options.results), Path(options.work))
        names = choose(options.studies, measured)
        if not options.report:
            setting = {name: getattr(options, name) for name in ("decode_prompts", "eval_answers", "max_new_tokens")}
            setting |= {"machine": device_name()}
            if results["setting"] and (changed := differences(results["setting"], setting)):
                raise UserError(f"{folder / FILE} holds other results ({'; '.join(changed)}); give another --output")
            results["setting"] = setting
            enable_compilation_cache()
            left = [label for label in SAMPLED if label not in measured.get("acceptance", {})]  # hours of them
            for name, figures in measure(options, lab, names, left or SAMPLED):
                measured[name] = measured.get(name, {}) | figures if name == "acceptance" else figures
                write_json(folder / FILE, results)
        print(f"written to {write_page(lab, measured, results['setting'], folder)}")


if __name__ == "__main__":
    run_main(main)
