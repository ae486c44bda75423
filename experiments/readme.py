"""README's figures and its picture, made from stored results: python -m experiments.readme."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path
from typing import Any

from jaxspec.bench.config import REFERENCE
from jaxspec.bench.metrics import Estimate
from jaxspec.bench.report import interval
from jaxspec.bench.results import ALL
from jaxspec.cli.options import parse
from jaxspec.cli.program import run_main
from jaxspec.errors import UserError
from jaxspec.files import read_json, read_text, write_atomically
from jaxspec.markdown import table
from jaxspec.plotting import picture

BEGIN, END = "<!-- begin: python -m experiments.readme writes this -->", "<!-- end -->"
_RESULTS, _GPU, _PICTURE = Path("docs/results.json"), Path("docs/h100.json"), Path("docs/speed.png")
_KINDS = {
    ALL: "all",
    "math_reasoning": "mathematics",
    "mt_bench": "chat",
    "qa": "questions",
    "rag": "retrieval",
    "summarization": "summaries",
    "translation": "translation",
}
_PAPERS = ("bita", "space", "amphista", "hidden_transfer", "ppd")
_TABLE_KINDS = ("math_reasoning", "mt_bench", "translation")


@dataclasses.dataclass(frozen=True)
class Options:
    """Write README's figures and docs/speed.png again from docs/results.json and docs/h100.json.

    Attributes:
      readme: the file to write.
    """

    readme: str = "README.md"


def with_figures(text: str, results: dict[str, Any], gpu: dict[str, Any]) -> str:
    """A README with what stands between its markers written anew.

    Args:
      text: the README.
      results: content of results.json, the summaries of benchmarks.
      gpu: content of a device.json.

    Raises:
      UserError: a text without the two markers, or benchmarks of different devices or code.
    """
    before, begin, rest = text.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise UserError(f"README.md has no two lines {BEGIN} and {END}")
    shown = ["![Speed by kind of text on a CPU, and by method on a GPU](docs/speed.png)", ""]
    figures = [*shown, *_cpu(results["defaults"], results["defaults_sampled"]), "", *_on_gpu(gpu)]
    return "\n".join([before + BEGIN, *figures, END + after])


def _cpu(greedy: dict[str, Any], sampled: dict[str, Any]) -> list[str]:
    """A paragraph about the two benchmarks, and the table of their drafters, the fastest first."""
    setting = greedy["setting"]
    if any(setting[name] != sampled["setting"][name] for name in ("device", "jax", "dtype", "code", "questions")):
        raise UserError("README's table joins two benchmarks, which must be of one device, JAX, dtype, code and size")
    rows = [_row(way, figures, sampled["ways"][way]) for way, figures in ranked(greedy).items()]
    plain = greedy["ways"][REFERENCE][ALL]["tokens_per_second"]
    rows.insert(0, [f"`{REFERENCE}`", "1.00", f"1 ({plain:.0f} tokens/s)"])
    temperature = sampled["setting"]["settings"]["temperature"]
    said = (
        f"{setting['model']} on {setting['device']} in {setting['dtype']}, jax {setting['jax']}, {setting['began']}: "
        f"{setting['questions']} questions of Spec-Bench, at most {setting['settings']['max_new_tokens']} new tokens, "
        "rows chosen in every step, as by default. *Speed* is relative to autoregressive decoding, the median over "
        f"questions with its 95% interval; *sampled* is at temperature {temperature}. "
        "Compare speeds of one machine only."
    )
    heads = ["drafter", "tokens per step", "speed", *(_KINDS[kind] for kind in _TABLE_KINDS)]
    heads += ["sampled: tokens per step", "speed", "same output"]
    return [*_filled(said), "", *table(heads, rows)]


def ranked(benchmark: dict[str, Any]) -> dict[str, Any]:
    """Figures of a benchmark's drafters by group of questions, the fastest drafter first."""
    drafting = {way: groups for way, groups in benchmark["ways"].items() if groups[ALL]["acceptance"]}
    return dict(sorted(drafting.items(), key=lambda item: -item[1][ALL]["speedup"]["value"]))


def shown_drafters(benchmark: dict[str, Any]) -> list[str]:
    """The fastest drafter, `suffix`, which is not trained, and the fastest of the five papers' methods."""
    names = list(ranked(benchmark))
    of_papers = (name for name in names if name in _PAPERS)
    return list(dict.fromkeys([names[0], "suffix", next(of_papers)]))


def _row(way: str, greedy: dict[str, Any], sampled: dict[str, Any]) -> list[Any]:
    tokens, speeds = ([figures[ALL][name] for figures in (greedy, sampled)] for name in ("tokens_per_step", "speedup"))
    tokens, speeds = [f"{value:.2f}" for value in tokens], [interval(Estimate(**speed)) for speed in speeds]
    kinds = [f"{greedy[kind]['speedup']['value']:.2f}" for kind in _TABLE_KINDS]
    same = [greedy[ALL][name] + sampled[ALL][name] for name in ("identical", "answers")]
    return [f"`{way}`", tokens[0], speeds[0], *kinds, tokens[1], speeds[1], f"{same[0]} of {same[1]}"]


def _on_gpu(gpu: dict[str, Any]) -> list[str]:
    """A sentence about the fastest drafter of a device."""
    method, best = next(iter(fastest_on(gpu).items()))
    differing = best["answers"] - best["identical"]
    return _filled(
        f"On one {gpu['machine']['device']} in {best['dtype']}, jax {gpu['jax']}, {gpu['date']}, {best['answers']} "
        f"prompts, `{method}` with {best['rows']} rows was {best['speedup']:.2f} times as fast; "
        f"{differing} of {best['answers']} texts differ, since near-ties round differently in 16 bits."
    )


def fastest_on(gpu: dict[str, Any]) -> dict[str, Any]:
    """The figures of each method of a device with the number of rows that was fastest, the fastest method first."""
    figures = [
        (name.split("/")[2], figure | {"dtype": name.split("/")[1]})
        for name, figure in gpu["figures"].items()
        if "reference_tokens_per_second" in figure
    ]
    best = dict(sorted(figures, key=lambda item: item[1]["speedup"]))  # which keeps a method's last, fastest one
    return dict(sorted(best.items(), key=lambda item: -item[1]["speedup"]))


def draw(results: dict[str, Any], gpu: dict[str, Any], file: Path) -> None:
    """Draw the speed of three drafters by kind of text on a CPU, and of each method on a GPU."""
    greedy, on_gpu = results["defaults"], fastest_on(gpu)
    drafters = shown_drafters(greedy)
    with picture(file, 1, 2, (11, 3.4), 110) as (left, right):
        for number, name in enumerate(drafters):
            speeds = [greedy["ways"][name][kind]["speedup"]["value"] for kind in _KINDS]
            left.bar([place + 0.28 * (number - 1) for place in range(len(_KINDS))], speeds, 0.26, label=name)
        left.set_xticks(range(len(_KINDS)), _KINDS.values(), fontsize=8)
        left.set_title(f"{greedy['setting']['device']}, {greedy['setting']['dtype']}", fontsize=10)
        left.set_ylabel("times autoregressive decoding", fontsize=9)
        left.legend(fontsize=8)
        right.bar(range(len(on_gpu)), [figure["speedup"] for figure in on_gpu.values()], 0.5, color="C4")
        right.set_xticks(range(len(on_gpu)), [f"{name}, {f['rows']} rows" for name, f in on_gpu.items()], fontsize=8)
        right.set_title(f"{gpu['machine']['device']}, {next(iter(on_gpu.values()))['dtype']}", fontsize=10)
        for panel in (left, right):
            panel.axhline(1, color="black", linewidth=0.8)


def _filled(text: str) -> list[str]:
    return textwrap.wrap(text, 118, break_long_words=False, break_on_hyphens=False)


def main(args: list[str]) -> None:
    """Write README's figures."""
    options = parse(Options, args, prog="python -m experiments.readme")
    file = Path(options.readme)
    results, gpu = read_json(_RESULTS, ("defaults", "defaults_sampled")), read_json(_GPU, ("figures",))
    write_atomically(file, with_figures(read_text(file), results, gpu).encode())
    draw(results, gpu, _PICTURE)
    print(f"{file}\n{_PICTURE}")


if __name__ == "__main__":
    run_main(main)
