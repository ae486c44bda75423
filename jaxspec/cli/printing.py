"""Output of `jaxspec decode`: one JSON object per prompt, or coloured text and a few lines of figures."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from jaxspec.generation.divergence import NEAR_TIE, Divergence
from jaxspec.generation.generate import Generation, SourceStats
from jaxspec.generation.text import TextStream
from jaxspec.weights.model import Model

_COLOURS = {"green": 32, "blue": 34, "magenta": 35, "yellow": 33, "red": 31}  # of one source after the other
_SHARED = ("cyan", 36)  # of tokens that several sources offered


@dataclasses.dataclass(frozen=True)
class Result:
    """One prompt's answer.

    Attributes:
      answer: the method's answer.
      reference: autoregressive decoding's answer, where it was run for comparison.
      divergence: the first divergence of two answers that should be identical.
    """

    answer: Generation
    reference: Generation | None = None
    divergence: Divergence | None = None


class TextPrinter:
    """Prints texts on stdout as they grow, and figures on stderr.

    On a terminal, tokens that were drafted and accepted have their source's colour.

    Args:
      model: decodes tokens.
      names: the drafter's name, and those of others that it is compared with.
      remark: a remark on their texts, printed with their figures.
      compare: whether several texts are printed, so that each needs a title.
    """

    def __init__(self, model: Model, names: Sequence[str], remark: str = "", compare: bool = False):
        self._model, self._names, self._compare = model, names, compare
        self._remark = f" ({remark})" if remark else ""
        self._text: TextStream | None = None

    def show(self, answer: Generation) -> None:
        """Print what an answer has gained since the last call; a character that is still incomplete waits."""
        if self._text is None:
            if self._compare:
                print(f"[{self._names[0]}]")
            self._text = TextStream(self._model.decode)
        for token in answer.tokens[len(self._text.tokens) :]:
            self._write(answer, [token])
        sys.stdout.flush()

    def finish(self, results: Sequence[Result]) -> None:
        """Print the rest of an answer that has been shown, those that it is compared with, and the figures."""
        self._write(results[0].answer, [], final=True)
        print(flush=True)
        self._text = None
        reference, ways = results[0].reference, list(zip(self._names, results, strict=True))
        others = [(name, way.answer) for name, way in ways[1:]]
        for name, other in [*others, ("autoregressive", reference)] if reference else others:
            print(f"[{name}]\n{other.text}", flush=True)
        for name, way in ways:
            print(summary(name, way.answer) + self._remark, file=sys.stderr)
            if len(way.answer.sources) > 1:
                print("\n".join(source_lines(way.answer, sys.stdout.isatty())), file=sys.stderr)
        if reference:
            print(summary("autoregressive", reference), file=sys.stderr)
            for name, way in ways:
                print(comparison(way) + (f" ({name})" if others else ""), file=sys.stderr)

    def _write(self, answer: Generation, tokens: Sequence[int], final: bool = False) -> None:
        """Print what further tokens add, in the colour of the last of them."""
        piece = self._text.add(tokens, final)
        sources = piece and sys.stdout.isatty() and answer.drafted_by[len(self._text.tokens) - 1]
        print(f"\033[{colour(sources)[1]}m{piece}\033[0m" if sources else piece, end="")


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
        told = [f"{a}/{o} ({e / o:.0%} expected)" for a, o, e in counts if o]
        legend = f" ({colour(1 << i)[0]})" if coloured else ""
        lines.append(f"  {name}{legend}: accepted {', '.join(told) or 'nothing'} by depth")
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
        "accepted_prediction": answer.accepted_prediction,
        "rejected_prediction": answer.rejected_prediction,
        "sources": {name: _stats_json(stats) for name, stats in answer.sources.items()},
        "drafted_by": [[name for i, name in enumerate(answer.sources) if bits >> i & 1] for bits in answer.drafted_by],
    }
    if reference is not None:
        speed = reference.tokens_per_second
        row["identical_to_autoregressive"] = answer.tokens == reference.tokens
        row["autoregressive_tokens_per_second"] = round(speed, 2)
        row["speedup"] = round(answer.tokens_per_second / speed, 3) if speed else None
        row["first_divergence"] = result.divergence.as_json() if result.divergence else None
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
    if answer.sources and answer.steps and not any(answer.offered):
        parts.append("nothing drafted: no candidate was worth its time")
    if answer.draft_passes:
        parts.append(f"{answer.draft_passes} drafting passes")
    if answer.accepted_prediction or answer.rejected_prediction:
        parts.append(f"{answer.accepted_prediction} predicted, {answer.rejected_prediction} predicted wrong")
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
