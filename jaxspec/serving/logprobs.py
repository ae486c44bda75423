"""Log-probabilities of tokens in the two forms of the OpenAI interface, with the texts and offsets of the tokens."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from jaxspec.serving.request import TokenScore
from jaxspec.weights.spelling import Spelling, readable

_LEAST = -9999.0  # JSON has no infinity


class TokenTexts:
    """Texts of the tokens of one choice, in order, and where they begin in its text.

    A special token has its own text, and an offset, but takes no place in the text. A token that is part of a character
    begins where the character does.

    Args:
      spelling: of the tokenizer.
      prompt: text of the prompt, where it is echoed.
    """

    def __init__(self, spelling: Spelling, prompt: str = ""):
        self._spelling, self._prompt = spelling, prompt
        self._offset, self._empty = 0, True
        self._may_add = True  # whether the tokenizer may add a space to the prompt here
        self._added = False  # whether it has
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def chat(self, tokens: Sequence[int], scores: Sequence[TokenScore], count: int) -> list[dict[str, Any]]:
        """Entries of a chat's tokens, with their `count` best alternatives."""
        entries = []
        for token, score in zip(tokens, scores, strict=True):
            self._arrive(token)
            best = [self._entry(one, logprob) for one, logprob in score.best[:count]]
            entries.append(self._entry(token, score.logprob) | {"top_logprobs": best})
            self._pass(token)
        return entries

    def lists(self, tokens: Sequence[int], scores: Sequence[TokenScore | None], count: int) -> dict[str, Any]:
        """Lists of a completion's tokens, with their `count` best alternatives and the token itself."""
        made = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, score in zip(tokens, scores, strict=True):
            self._arrive(token)
            made["tokens"].append(self._text(token))
            made["token_logprobs"].append(score and max(score.logprob, _LEAST))
            made["top_logprobs"].append(score and self._named(token, score, count))
            made["text_offset"].append(self._offset)
            self._pass(token)
        return made

    def end_prompt(self) -> None:
        """The next token is the answer's first one, which continues the prompt, echoed or not."""
        self._offset, self._empty, self._may_add = len(self._prompt), False, False
        self._characters.reset()

    def _named(self, token: int, score: TokenScore, count: int) -> dict[str, float]:
        """Log-probabilities by text. Of tokens with one text the others go by their ids, the least probable ones."""
        names = {self._text(token): token}
        for one, _ in score.best[:count]:
            if names.setdefault(self._text(one), one) != one:
                names[f"token_id:{one}"] = one
        logprobs = dict(score.best[:count]) | {token: score.logprob}
        return {name: max(logprobs[one], _LEAST) for name, one in names.items()}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        own = self._shown(token)
        return {"token": readable(own), "logprob": max(logprob, _LEAST), "bytes": list(own)}

    def _text(self, token: int) -> str:
        return readable(self._shown(token))

    def _shown(self, token: int) -> bytes:
        """Bytes of a token here."""
        return self._spelling.shown(token, self._added)

    def _arrive(self, token: int) -> None:
        """Come to the place of a token, whose space may not be the text's: decoders leave such a space out again.

        Tokenizers add a space where a text begins, and behind special tokens in it; some not where it has one already.
        """
        own = self._spelling.bytes(token)
        if token not in self._spelling.special and not self._continues(own):
            self._offset += len(self._characters.decode(b"", final=True))  # of the bytes before, which are no character
        if rest := self._prompt[self._offset :]:
            self._added = self._may_add and not rest.startswith(readable(own))
        else:
            self._added = self._empty or self._may_add

    def _continues(self, own: bytes) -> bool:
        """Whether bytes continue a character that the bytes before them have begun."""
        try:
            codecs.utf_8_decode(self._characters.getstate()[0] + own[:1], "strict", False)
        except UnicodeDecodeError:
            return False
        return True

    def _pass(self, token: int) -> None:
        """Go on to the place after a token."""
        shown, special = self._shown(token), token in self._spelling.special
        # The added space is before those that the text begins with, or behind them: both read alike.
        goes_on = self._may_add and not self._added and shown.startswith(b" ")
        self._may_add = goes_on or (special and self._offset < len(self._prompt))
        if special and not self._prompt.startswith(readable(shown), self._offset):
            return
        self._offset += len(self._characters.decode(shown))
        self._empty = False
