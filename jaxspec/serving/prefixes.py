"""Readings of prompts' beginnings, kept so that the next turn of a chat, say, reads nothing but what is new."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from jaxspec.decoding.parts import Part

_Chunk = tuple[int, ...]


@dataclasses.dataclass(eq=False)
class _Node:
    """A chunk behind those above it; a root has none."""

    tokens: _Chunk = ()
    parent: _Node | None = None
    part: Part | None = None
    children: dict[_Chunk, _Node] = dataclasses.field(default_factory=dict)


class Prefixes:
    """A tree of chunks: the path to a node is the beginning of a prompt, and its parts are that beginning's reading.

    Prompts that begin alike share nodes, and a node's path is in use where it is: the node that was not used for the
    longest time never has nodes below it. Long texts, whose positions are others (`Base.for_texts`), have a tree apart.

    Args:
      count: number of chunks to keep.
      width: W, tokens of a chunk.
    """

    def __init__(self, count: int, width: int):
        self.count, self.width = count, width
        self.clear()

    def __len__(self) -> int:
        """Number of chunks kept."""
        return len(self._used)

    def clear(self) -> None:
        """Forget all."""
        self._roots = {long: _Node() for long in (False, True)}
        self._used: dict[_Node, None] = {}  # the most recently used last

    def find(self, ids: Sequence[int], long: bool = False) -> list[Part]:
        """The parts of the longest kept beginning of a prompt that leaves at least its last token to be read."""
        path = list(self._path(ids[:-1], long))
        self._use(path)
        return [node.part for node in path]

    def keep(self, ids: Sequence[int], cut: Callable[[], Part], long: bool = False) -> None:
        """Keep the part that `cut` makes of the last chunk of `ids`, whole chunks, in place of the least recently used.

        Not where it would take the place of a chunk before it: those are the likelier ones to be shared.
        """
        path = list(self._path(ids, long))
        self._use(path)
        if len(path) != len(ids) // self.width - 1 or self.count <= len(path):
            return  # it is there already, or what is before it is not
        while len(self) >= self.count:
            self._forget(next(iter(self._used)))
        parent = path[-1] if path else self._roots[long]
        tokens = tuple(ids[-self.width :])
        node = parent.children[tokens] = _Node(tokens, parent, cut())
        self._use([*path, node])

    def _path(self, ids: Sequence[int], long: bool) -> Iterator[_Node]:
        """The nodes that hold the beginning of some tokens, from the first chunk on."""
        node = self._roots[long]
        for at in itertools.count(0, self.width):
            node = node.children.get(tuple(ids[at : at + self.width]))
            if node is None:
                return
            yield node

    def _use(self, path: list[_Node]) -> None:
        """Mark the nodes of a path as used, the first one last."""
        for node in reversed(path):
            self._used.pop(node, None)
            self._used[node] = None

    def _forget(self, node: _Node) -> None:
        del self._used[node], node.parent.children[node.tokens]
