"""Output of `jaxspec decode`: one JSON object per prompt, or coloured text and a few lines of figures."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from jaxspec.generation.divergence import NEAR_TIE, Divergence
from jaxspec.generation.generate import Generation, SourceStats
from jaxspec.serving.text import TextStream
from jaxspec.weights.load import Model

_COLOURS = {"green": 32, "blue": 34, "magenta": 35, "yellow": 33, "red": 31}  # of one source after the other
_SHARED = ("cyan", 36)  # of tokens that several sources offered


@dataclasses.dataclass(frozen=True)
class Result:
    """One prompt's answer.

    Attributes:
      answer: the method's answer.
      reference: autoregressive decoding's answer, where it was run for comparison.
      divergence: the first divergence of two answers that should be identical.
      compared: the same of other drafters, by the texts that name them.
    """

    answer: Generation
    reference: Generation | None = None
    divergence: Divergence | None = None
    compared: dict[str, Result] = dataclasses.field(default_factory=dict)


class TextPrinter:
    """Prints texts on stdout as they grow, and figures on stderr.

    Args:
      model: decodes tokens.
      name: the method's name.
      remark: a remark on the method's text, printed with its figures.
      compare: whether several texts are printed, so that each needs a title.
    """

    def __init__(self, model: Model, name: str, remark: str = "", compare: bool = False):
        self._model, self._name, self._compare = model, name, compare
        self._remark = f" ({remark})" if remark else ""
        self._text: GrowingText | None = None

    def show(self, answer: Generation) -> None:
        """Print what an answer has gained since the last call."""
        if self._text is None:
            if self._compare:
                print(f"[{self._name}]")
            self._text = GrowingText(self._model)
        self._text.show(answer)

    def finish(self, result: Result) -> None:
        """Print the rest of an answer that has been shown, the text it is compared with, and the figures."""
        self._text.end()
        self._text = None
        reference, ways = result.reference, {self._name: result} | result.compared
        others = {name: other.answer for name, other in result.compared.items()}
        others |= {"autoregressive": reference} if reference else {}
        for name, other in others.items():
            print(f"[{name}]\n{other.text}", flush=True)
        for name, way in ways.items():
            print(summary(name, way.answer) + self._remark, file=sys.stderr)
            if len(way.answer.sources) > 1:
                print("\n".join(source_lines(way.answer, sys.stdout.isatty())), file=sys.stderr)
        if reference:
            print(summary("autoregressive", reference), file=sys.stderr)
            for name, way in ways.items():
                print(comparison(way) + (f" ({name})" if result.compared else ""), file=sys.stderr)


class GrowingText:
    """Prints an answer as it grows; on a terminal, tokens that were drafted and accepted have their source's colour.

    Args:
      model: decodes tokens.
      out: where to print; default stdout.
    """

    def __init__(self, model: Model, out: TextIO | None = None):
        self._out = out or sys.stdout
        self._coloured = self._out.isatty()
        self._text = TextStream(model.decode)
        self._drafted_by: list[int] = []

    def show(self, answer: Generation) -> None:
        """Print what is new since the last call; a character that is still incomplete waits."""
        self._drafted_by = answer.drafted_by
        for token in answer.tokens[len(self._text.tokens) :]:
            self._write([token])
        self._out.flush()

    def end(self) -> None:
        """Print what still waits, and finish the line."""
        self._write([], final=True)
        self._out.write("\n")
        self._out.flush()

    def _write(self, tokens: Sequence[int], final: bool = False) -> None:
        """Print what further tokens add, in the colour of the last of them."""
        piece = self._text.add(tokens, final)
        sources = piece and self._coloured and self._drafted_by[len(self._text.tokens) - 1]
        self._out.write(f"\033[{colour(sources)[1]}m{piece}\033[0m" if sources else piece)


def colour(sources: int) -> tuple[str, int]:
    """Name and code of the colour of a token that these sources, a bit each, offered."""
    if sources & (sources - 1):
        return _SHARED
    return list(_COLOURS.items())[(sources.bit_length() - 1) % len(_COLOURS)]


def source_lines(answer: Generation, coloured: bool) -> list[str]:
    """One line per source: accepted and expected over offered candidates, by depth.

    Args:
      answer: an answer of several sources.
      coloured: whether to name the colours that tokens were printed in.
    """
    lines = []
    for i, (name, stats) in enumerate(answer.sources.items()):
        counts = zip(stats.accepted, stats.offered, stats.expected, strict=True)
        told = [f"{a}/{o} ({e / o:.0%})" for a, o, e in counts if o]
        legend = f" ({colour(1 << i)[0]})" if coloured else ""
        lines.append(f"  {name}{legend}: accepted {', '.join(told) or 'nothing'} by depth (expected)")
    return lines


def record(result: Result) -> dict[str, Any]:
    """A result as plain values for JSON."""
    answer, reference = result.answer, result.reference
    row = {
        "prompt": answer.prompt,
        "text": answer.text,
        "tokens": answer.tokens,
        "new_tokens": answer.new_tokens,
        "steps": answer.steps,
        "tokens_per_step": round(answer.tokens_per_step, 4),
        "prefill_seconds": round(answer.prefill_seconds, 4),
        "decode_seconds": round(answer.decode_seconds, 4),
        "tokens_per_second": round(answer.tokens_per_second, 2),
        "compile_seconds": round(answer.compile_seconds, 2),
        "offered_by_depth": answer.offered,
        "accepted_by_depth": answer.accepted,
        "draft_passes": answer.draft_passes,
        "sources": {name: _stats_json(stats) for name, stats in answer.sources.items()},
        "drafted_by": [[name for i, name in enumerate(answer.sources) if bits >> i & 1] for bits in answer.drafted_by],
    }
    if reference is not None:
        speed = reference.tokens_per_second
        row["identical_to_autoregressive"] = answer.tokens == reference.tokens
        row["autoregressive_tokens_per_second"] = round(speed, 2)
        row["speedup"] = round(answer.tokens_per_second / speed, 3) if speed else None
        row["first_divergence"] = result.divergence.as_json() if result.divergence else None
    if result.compared:
        row["compared_with"] = {name: record(other) for name, other in result.compared.items()}
    return row


def _stats_json(stats: SourceStats) -> dict[str, list]:
    return dataclasses.asdict(stats) | {"expected": [round(count, 2) for count in stats.expected]}


def summary(name: str, answer: Generation) -> str:
    """One line: tokens, speed, tokens per step, acceptance by depth, and compile time by itself."""
    parts = [
        f"{name}: {answer.new_tokens} tokens",
        f"{answer.tokens_per_second:.1f} tokens/s",
        f"{answer.tokens_per_step:.2f} tokens per step",
    ]
    rates = [f"{a / o:.0%}" for a, o in zip(answer.accepted, answer.offered, strict=True) if o]
    if rates:
        parts.append(f"accepted {'/'.join(rates)} at depth {'/'.join(str(d + 1) for d in range(len(rates)))}")
    if answer.draft_passes:
        parts.append(f"{answer.draft_passes} drafting passes")
    parts.append(f"prefill {answer.prefill_seconds:.2f} s, compile {answer.compile_seconds:.1f} s")
    return ", ".join(parts)


def comparison(result: Result) -> str:
    """One line: whether the two outputs are identical, where they diverge if not, and which is how much faster."""
    answer, reference, divergence = result.answer, result.reference, result.divergence
    line = "identical: yes" if answer.tokens == reference.tokens else "identical: no, nor need it be"
    if divergence:
        near = " (a near-tie)" if divergence.gap < NEAR_TIE else ""
        line = f"identical: no, from token {divergence.index + 1} on, by a gap of {divergence.gap:.2g}{near}"
    if reference.tokens_per_second:
        line += f", {answer.tokens_per_second / reference.tokens_per_second:.2f}x autoregressive"
    return line
