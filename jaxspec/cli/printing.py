"""What decode.py shows: records for programs, a line and coloured text for people."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from jaxspec.decoding.divergence import NEAR_TIE, Divergence
from jaxspec.decoding.generate import Generation
from jaxspec.weights.load import Model

_GREEN, _PLAIN = "\033[32m", "\033[0m"


def record(
    method: str,
    model: str,
    answer: Generation,
    reference: Generation | None = None,
    divergence: Divergence | None = None,
) -> dict[str, Any]:
    """One prompt's result as plain values for JSON.

    Args:
      method: name.
      model: name.
      answer: the method's answer.
      reference: autoregressive decoding's, where it was run for comparison.
      divergence: where the two part.
    """
    row = {
        "method": method,
        "model": model,
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
    }
    if reference is not None:
        speed = reference.tokens_per_second
        row["identical_to_autoregressive"] = answer.tokens == reference.tokens
        row["autoregressive_tokens_per_second"] = round(speed, 2)
        row["speedup"] = round(answer.tokens_per_second / speed, 3) if speed else None
        row["first_divergence"] = divergence.as_json() if divergence else None
    return row


def summary(name: str, answer: Generation) -> str:
    """One line: tokens, speed, tokens per step, acceptance by depth, compile time apart."""
    parts = [
        f"{name}: {answer.new_tokens} tokens",
        f"{answer.tokens_per_second:.1f} tokens/s",
        f"{answer.tokens_per_step:.2f} tokens per step",
    ]
    rates = [f"{a / o:.0%}" for a, o in zip(answer.accepted, answer.offered, strict=True) if o]
    if rates:
        parts.append(f"accepted {'/'.join(rates)} at depth {'/'.join(str(d + 1) for d in range(len(rates)))}")
    parts.append(f"prefill {answer.prefill_seconds:.2f} s, compile {answer.compile_seconds:.1f} s")
    return ", ".join(parts)


def comparison(answer: Generation, reference: Generation, divergence: Divergence | None) -> str:
    """One line: whether the outputs are identical, where they part if not, and how much faster one is."""
    line = "identical: yes" if answer.tokens == reference.tokens else "identical: no, nor need it be"
    if divergence:
        near = " (a near-tie)" if divergence.gap < NEAR_TIE else ""
        line = f"identical: no, from token {divergence.index + 1} on, by a gap of {divergence.gap:.2g}{near}"
    if reference.tokens_per_second:
        line += f", {answer.tokens_per_second / reference.tokens_per_second:.2f}x autoregressive"
    return line


class TextPrinter:
    """Prints an answer as it grows; tokens that were drafted and accepted are green on a terminal.

    Args:
      model: decodes tokens.
      out: where to print; default stdout.
    """

    def __init__(self, model: Model, out: TextIO | None = None):
        self._model, self._out = model, out or sys.stdout
        self._colour = self._out.isatty()
        self._answer: Generation | None = None
        self._shown, self._text = 0, ""

    def show(self, answer: Generation) -> None:
        """Print what is new since the last call; a character that is still incomplete waits."""
        self._answer = answer
        for count in range(self._shown + 1, answer.new_tokens + 1):
            text = self._model.decode(answer.tokens[:count])
            if not text.endswith("\ufffd"):
                self._write(text, count)
        self._out.flush()

    def _write(self, text: str, count: int) -> None:
        """Print what `text`, the first `count` tokens, adds, in the colour of the last of them."""
        piece = text[len(self._text) :]
        coloured = self._colour and self._answer.drafted[count - 1]
        self._out.write(f"{_GREEN}{piece}{_PLAIN}" if coloured else piece)
        self._text, self._shown = text, count

    def end(self) -> None:
        """Print what still waits, and finish the line."""
        if self._answer and self._shown < self._answer.new_tokens:
            self._write(self._answer.text, self._answer.new_tokens)
        self._out.write("\n")
        self._out.flush()
