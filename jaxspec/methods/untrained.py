"""What methods that need no training share: how long they draft."""

from __future__ import annotations

import dataclasses

from jaxspec.decoding.draft import DraftContext
from jaxspec.decoding.method import Method, check_least


@dataclasses.dataclass(frozen=True)
class UntrainedMethod(Method):
    """Settings that all of them have.

    Attributes:
      length: M, tokens of a draft at most, in a tree that is so deep.
    """

    length: int = 16

    def __post_init__(self) -> None:
        check_least(self, length=1)

    @property
    def max_distance(self) -> int:
        """M."""
        return self.length

    @property
    def default_depth(self) -> int:
        """Few: where a draft is wrong, it mostly is from the first token on."""
        return min(self.length, 3)

    def distances(self, context: DraftContext) -> int:
        """M', how many of them are wanted."""
        return min(self.length, context.depth)
