"""The ways to decode that are compared, each answering the same prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jaxspec.drafters.drafter import Drafter
from jaxspec.generation.generate import Generation, iterate, stream


class Side:
    """One of the ways to decode that are compared.

    Args:
      drafter: what decodes.
      settings: of `stream`.
      batch_size: prompts decoded together.
      streamed: answer prompt by prompt and piece by piece; both sides stop as often, or the comparison would not be
        fair.
    """

    def __init__(self, drafter: Drafter, settings: dict[str, Any], batch_size: int, streamed: bool):
        self._drafter, self._settings, self._streamed = drafter, settings, streamed
        self._batch_size, self._compile_seconds = batch_size, 0.0

    def warm_up(self, prompts: Sequence[str]) -> None:
        """Compile and touch the memory, so that the first timing is like the others."""
        first = prompts[: self._batch_size]
        [warm, *_] = iterate(self._drafter, first, batch_size=self._batch_size, max_steps=2, **self._settings)
        self._compile_seconds = warm.compile_seconds

    def answers(self, prompts: Sequence[str], show: Callable[[Generation], None] | None = None) -> Iterator[Generation]:
        """One answer per prompt; `show` sees it grow. What warming up compiled is counted with the first one."""
        for pieces in self._pieces(prompts):
            for answer in pieces:
                if show:
                    show(answer)
            seconds, self._compile_seconds = self._compile_seconds, 0.0
            yield dataclasses.replace(answer, compile_seconds=answer.compile_seconds + seconds)

    def _pieces(self, prompts: Sequence[str]) -> Iterable[Iterable[Generation]]:
        """For every prompt, its answer so far again and again, or once, alone in a tuple, where it is not streamed."""
        if self._streamed:
            return (stream(self._drafter, prompt, **self._settings) for prompt in prompts)
        return zip(iterate(self._drafter, prompts, batch_size=self._batch_size, **self._settings), strict=True)
