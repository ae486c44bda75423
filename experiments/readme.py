"""README's figures, written from stored results: python -m experiments.readme."""

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

BEGIN, END = "<!-- begin: python -m experiments.readme writes this -->", "<!-- end -->"
_RESULTS, _GPU = Path("docs/results.json"), Path("docs/h100.json")


@dataclasses.dataclass(frozen=True)
class Options:
    """Write README's figures again from docs/results.json and docs/h100.json.

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
    figures = [*_cpu(results["defaults"], results["defaults_sampled"]), "", *_on_gpu(gpu)]
    return "\n".join([before + BEGIN, *figures, END + after])


def _cpu(greedy: dict[str, Any], sampled: dict[str, Any]) -> list[str]:
    """A paragraph about the two benchmarks, and the table of their drafters, the fastest first."""
    setting = greedy["setting"]
    if any(setting[name] != sampled["setting"][name] for name in ("device", "jax", "dtype", "code", "questions")):
        raise UserError("README's table joins two benchmarks, which must be of one device, JAX, dtype, code and size")
    drafting = {way: groups for way, groups in greedy["ways"].items() if groups[ALL]["acceptance"]}
    ordered = sorted(drafting, key=lambda way: -drafting[way][ALL]["speedup"]["value"])
    rows = [_row(way, drafting[way], sampled["ways"][way]) for way in ordered]
    plain = greedy["ways"][REFERENCE][ALL]["tokens_per_second"]
    rows.insert(0, [f"`{REFERENCE}`", "1.00", f"1 ({plain:.0f} tokens/s)"])
    temperature = sampled["setting"]["settings"]["temperature"]
    said = (
        f"{setting['model']} on {setting['device']} in {setting['dtype']}, jax {setting['jax']}, {setting['began']}: "
        f"{setting['questions']} questions of Spec-Bench, at most {setting['settings']['max_new_tokens']} new tokens, "
        "rows chosen in every step, as by default. *Speed* is relative to autoregressive decoding, the median over "
        f"questions with its 95% interval; *sampled* is at temperature {temperature}."
    )
    heads = ["drafter", "tokens per step", "speed", "mathematics", "chat", "translation"]
    heads += ["sampled: tokens per step", "speed", "same output"]
    return [*_filled(said), "", *table(heads, rows)]


def _row(way: str, greedy: dict[str, Any], sampled: dict[str, Any]) -> list[Any]:
    tokens, speeds = ([figures[ALL][name] for figures in (greedy, sampled)] for name in ("tokens_per_step", "speedup"))
    tokens, speeds = [f"{value:.2f}" for value in tokens], [interval(Estimate(**speed)) for speed in speeds]
    kinds = [f"{greedy[kind]['speedup']['value']:.2f}" for kind in ("math_reasoning", "mt_bench", "translation")]
    same = [greedy[ALL][name] + sampled[ALL][name] for name in ("identical", "answers")]
    return [f"`{way}`", tokens[0], speeds[0], *kinds, tokens[1], speeds[1], f"{same[0]} of {same[1]}"]


def _on_gpu(gpu: dict[str, Any]) -> list[str]:
    """A sentence about the fastest drafter of a device."""
    figures = {name: f for name, f in gpu["figures"].items() if "reference_tokens_per_second" in f}
    name, best = max(figures.items(), key=lambda item: item[1]["speedup"])
    _, dtype, method, _ = name.split("/")
    tried = {name.split("/")[2] for name in figures}
    return _filled(
        f"On one {gpu['machine']['device']} in {dtype}, jax {gpu['jax']}, {gpu['date']}, {best['answers']} prompts: of "
        f"{len(tried)} methods `{method}` is the fastest, {best['speedup']:.2f} times with {best['rows']} rows and "
        f"{best['tokens_per_step']:.2f} tokens per step. {best['identical']} of {best['answers']} texts are the same: "
        "in 16 bits near-ties round differently."
    )


def _filled(text: str) -> list[str]:
    return textwrap.wrap(text, 118, break_long_words=False, break_on_hyphens=False)


def main(args: list[str]) -> None:
    """Write README's figures."""
    options = parse(Options, args, prog="python -m experiments.readme")
    file = Path(options.readme)
    results, gpu = read_json(_RESULTS, ("defaults", "defaults_sampled")), read_json(_GPU, ("figures",))
    write_atomically(file, with_figures(read_text(file), results, gpu).encode())
    print(file)


if __name__ == "__main__":
    run_main(main)
