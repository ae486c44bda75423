"""Settings of methods that need no training."""

from __future__ import annotations

import dataclasses

from jaxspec.config import ModelConfig
from jaxspec.decoding.draft import DraftContext
from jaxspec.decoding.method import Facts, Method, check_least


@dataclasses.dataclass(frozen=True)
class UntrainedMethod(Method):
    """Settings that all of them have.

    Attributes:
      length: M, tokens of a draft at most, in a tree that is so deep.
    """

    length: int = 16

    def __post_init__(self) -> None:
        check_least(self, length=1)

    def facts(self, config: ModelConfig) -> Facts:
        """By default it drafts few tokens: a wrong draft is mostly wrong from its first token on."""
        return Facts(self.length, default_candidates=min(self.length, 3))

    def distances(self, context: DraftContext) -> int:
        """M', how many of them are wanted."""
        return min(self.length, context.depth)
