"""Text of tokens as they come: incomplete characters are held back, and a stop text ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_HALF = "\ufffd"  # decoders return it for bytes that are not yet a character


class TextStream:
    """The text of a growing list of tokens.

    Args:
      decode: token ids to text.
      stop: texts that end it.
      least: number of first tokens in whose text no stop text begins.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = (), least: int = 0):
        self._decode, self._stop, self._least = decode, tuple(stop), least
        self._stoppable = 0  # where in the text a stop text may begin
        self.tokens: list[int] = []
        self.sent = ""
        self.stopped: str | None = None
        # Decoders look at what is before a token, so the last tokens of whole text are decoded again before new ones.
        self._before, self._context = "", ""  # text of all tokens up to the second place, and between both
        self._places = 0, 0

    def add(self, tokens: Sequence[int], final: bool) -> str:
        """Take further tokens, up to the first one that completes a stop text, and return the text they add.

        Args:
          tokens: the next ones.
          final: no tokens follow: hold nothing back.
        """
        known = len(self.tokens)
        self.tokens += tokens
        if known < self._least:
            self._stoppable = len(self._text(min(self._least, len(self.tokens))))
        text = self._text(len(self.tokens))
        if any(stop in text[self._stoppable :] for stop in self._stop):
            # Token by token, so that the end does not depend on how many come at once.
            for count in range(known + 1, len(self.tokens) + 1):
                text = self._text(count)
                begins = [(text.find(stop, self._stoppable), -len(stop), stop) for stop in self._stop]
                if found := [each for each in begins if each[0] >= 0]:
                    place, _, self.stopped = min(found)
                    self.tokens = self.tokens[:count]
                    return self._send(text[:place])
        self._move(text)
        return self._send(text if final else text[: self._whole(text)])

    def _text(self, count: int) -> str:
        """The text of the first tokens, at least those whose text is whole."""
        return self._before + self._decode(self.tokens[self._places[0] : count])[len(self._context) :]

    def _move(self, text: str) -> None:
        """Decode from the newest tokens on from now on, where the text ends whole with something of theirs."""
        context = self._decode(self.tokens[self._places[1] :])
        if context.strip() and not text.endswith(_HALF):
            self._places, self._before, self._context = (self._places[1], len(self.tokens)), text, context

    def _send(self, text: str) -> str:
        new = text[len(self.sent) :]
        self.sent += new
        return new

    def _whole(self, text: str) -> int:
        """Length of the text that may be shown: no half character, and no possible start of a stop text."""
        text = text.rstrip(_HALF)
        return min([len(text), *(self._start(text, stop) for stop in self._stop)])

    def _start(self, text: str, stop: str) -> int:
        """Where a stop text may have begun; the length of the text where it has not."""
        place = text.find(stop[0], max(len(self.sent), self._stoppable))
        while place >= 0 and not stop.startswith(text[place:]):
            place = text.find(stop[0], place + 1)
        return place if place >= 0 else len(text)
