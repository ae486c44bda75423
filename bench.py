"""How much faster, and is it the same? python bench.py --methods ppd,bita --data FILE; bench.py report DIR."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from jaxspec import UserError, load_model
from jaxspec.cli import enable_compilation_cache, parse, run_main
from jaxspec.evaluation.bench import BenchConfig, check_bench, run_bench
from jaxspec.evaluation.bench_report import load_results, overall_table, write_bench_report
from jaxspec.model.load import DEFAULT_MODEL


@dataclasses.dataclass(frozen=True)
class Options(BenchConfig):
    """Answer the same questions with several methods in turn; a killed run goes on with the same command.

    `python bench.py report DIR` writes the tables and plots of a folder again.

    Attributes:
      model: smollm2-135m (embedded), a Hugging Face directory or hub name, or a GGUF file.
      dtype: of the weights; default float32 on CPU, bfloat16 elsewhere.
      output: folder for the answers, summary.json, report.md and plots.
      json: print summary.json instead of the table.
    """

    model: str = DEFAULT_MODEL
    dtype: str = ""
    output: str = "runs/bench"
    json: bool = False


def show(folder: Path, as_json: bool) -> None:
    """Write the report of a folder and print its main table."""
    report = write_bench_report(folder)
    print((folder / "summary.json").read_text() if as_json else "\n".join(overall_table(load_results(folder))))
    print(f"written to {report}", file=sys.stderr)


def main(args: list[str]) -> None:
    """Ask and report, or report alone."""
    if args[:1] == ["report"]:
        if len(args) != 2:
            raise UserError("give one folder: python bench.py report DIR")
        show(Path(args[1]), as_json=False)
        return
    options = parse(Options, args, prog="bench.py")
    check_bench(options)
    enable_compilation_cache()
    model = load_model(options.model, options.dtype or None)
    run_bench(options, model, Path(options.output), lambda line: print(line, file=sys.stderr))
    show(Path(options.output), options.json)


if __name__ == "__main__":
    run_main(main)
