"""The slots of an engine: rows of one decoding state, which requests come into and leave between chunks of steps.

There are as many rows as the requests under way need: 1, 2, 4 and so on up to all slots, for a step takes as long as
its rows, whoever uses them. What each request chooses goes with every call as arrays, so that nothing recompiles.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.acceptance import Acceptance
from jaxspec.decoding.loop import decode, insert
from jaxspec.decoding.sampling import make_row_sampler
from jaxspec.decoding.scores import Scores
from jaxspec.decoding.state import DecodeState, Decoding
from jaxspec.drafters.drafter import Drafter
from jaxspec.parallel.sharding import in_mesh, mesh_of, put_beside
from jaxspec.serving.prefixes import Prefixes
from jaxspec.serving.reader import PromptReader
from jaxspec.serving.request import Request

_PATIENCE = 16  # calls that find half of the rows free before these are given up
_MEASURED = 3  # steps of each size, of which the fastest counts


@dataclasses.dataclass(frozen=True)
class RequestState:
    """The progress of a request.

    Attributes:
      done: whether the limit or an end-of-text token was reached.
      tokens: all tokens of its answer so far.
      drafted_by: per token, the sources that offered it, a bit each.
      scores: scores of the tokens, host arrays; None where the engine keeps none.
      steps: forward passes so far.
      drafts: steps that had a candidate.
      drafted: candidates verified, over all steps.
    """

    done: bool
    tokens: list[int]
    drafted_by: list[int]
    scores: Scores | None
    steps: int
    drafts: int
    drafted: int


class Slots:
    """Rows for requests.

    Args:
      drafter: what decodes, and on which base.
      acceptance: which candidates survive, of all requests.
      count: B, requests under way at most.
      capacity: S, slots of each one's cache.
      width: tokens to emit at most.
      chunk: tokens of a prompt to read at once; there is room for the longest prompt in whole chunks.
      best: K, how many of the most probable tokens' scores to keep; None keeps no scores.
      prefixes: beginnings that prompts share, of which the readings are kept.
    """

    def __init__(
        self,
        drafter: Drafter,
        acceptance: Acceptance,
        count: int,
        capacity: int,
        width: int,
        chunk: int,
        best: int | None,
        prefixes: int,
    ):
        self._model, self._rows, self._best = drafter.model, drafter.least_rows, best
        self._count, self._capacity, self._width, self._chunk = count, capacity, width, chunk
        self._mesh = mesh_of(self._model.params)
        rest = (drafter.on_device, jnp.array(self._model.eos or (-1,), jnp.int32))
        self._drafter, self._eos = put_beside(self._model.params, rest)
        self._acceptance = acceptance
        self._prefixes, self._num_prefixes = Prefixes(prefixes, chunk), prefixes
        self._idle = 0
        self._costs: dict[int, np.ndarray] = {}  # by the number of rows
        self._requests: list[Request | None] = [None]
        self._state = self._empty_state()

    @property
    def free(self) -> int:
        """Number of further requests that there is room for."""
        return self._count - sum(request is not None for request in self._requests)

    @property
    def memory(self) -> int:
        """Bytes at most: all slots and, while rows are added, the former ones; a prompt and the shared prefixes."""
        former = _fewer(self._count) if self._count > 1 else 0
        rows = self._count + former + 1 + self._num_prefixes
        return rows * sum(x.nbytes for x in jax.tree.leaves(self._state)) // len(self._requests)

    def reader(self, request: Request) -> PromptReader:
        """What reads a request's prompt."""
        with in_mesh(self._mesh):
            decoding = self._decoding([request])
            where = (self._chunk, self._capacity, self._best, self._prefixes)
            return PromptReader(self._model.base, decoding, request, *where)

    def read_on(self, reader: PromptReader) -> None:
        """Read the next chunk of a prompt."""
        with in_mesh(self._mesh):
            reader.read_on()

    def place(self, request: Request, reader: PromptReader) -> None:
        """Begin to decode a request whose prompt was read. There must be room."""
        if None not in self._requests:
            self._resize(min(2 * len(self._requests), self._count))
        row = self._requests.index(None)
        with in_mesh(self._mesh):
            self._state = insert(self._state, reader.state(self._width), np.array([row], np.int32))
        self._requests[row] = request

    def advance(self, steps: int) -> None:
        """Run some steps, or fewer where all requests are done."""
        with in_mesh(self._mesh):
            self._state = decode(self._decoding(self._requests), self._state, np.int32(steps))

    def progress(self) -> Iterator[tuple[Request, RequestState]]:
        """The progress of each request."""
        state = self._state
        scored = any(request is not None and request.logprobs for request in self._requests)
        wanted = (state.done, state.counts, state.tokens, state.drafted_by, state.stats)
        done, counts, tokens, drafted_by, stats = jax.device_get(wanted)
        scores = jax.device_get(state.scores) if scored else None
        for row, request in enumerate(self._requests):
            if request is None:
                continue
            here = slice(counts[row])
            yield (
                request,
                RequestState(
                    done=bool(done[row]),
                    tokens=tokens[row, here].tolist(),
                    drafted_by=drafted_by[row, here].tolist(),
                    scores=jax.tree.map(lambda x, row=row, here=here: x[row, here], scores),
                    steps=int(stats.steps[row]),
                    drafts=int(stats.offered[row, 0, :1].sum()),
                    drafted=int(stats.drafted[row]),
                ),
            )

    def release(self, leaving: Sequence[Request]) -> None:
        """Free the rows of requests that are done or cancelled."""
        rows = [row for row, request in enumerate(self._requests) if any(request is one for one in leaving)]
        for row in rows:
            self._requests[row] = None
        self._free_rows(rows)
        kept = sum(request is not None for request in self._requests)
        self._idle = self._idle + 1 if 2 * kept <= len(self._requests) else 0
        if self._idle > _PATIENCE and len(self._requests) > 1:
            self._resize(_fewer(len(self._requests)))

    def warm_up(self) -> None:
        """Compile all programs there are, while there are no requests, and measure what steps of each size take."""
        ids = [0] * min(self._chunk + 1, self._width)  # two chunks, where a prompt may have two
        reader = self.reader(Request(ids, prompt_logprobs=self._best is not None))
        while not reader.finished:
            self.read_on(reader)
        with in_mesh(self._mesh):
            fresh = reader.state(self._width)
        while True:
            with in_mesh(self._mesh):
                nowhere = np.array([len(self._requests)], np.int32)
                self._state = insert(self._state, fresh, nowhere)
            self.advance(1)
            list(self.progress())
            self._measure()
            if len(self._requests) == self._count:
                break
            self._resize(min(2 * len(self._requests), self._count))
        while len(self._requests) > 1:
            self._resize(_fewer(len(self._requests)))

    def _measure(self) -> None:
        """The milliseconds of a step of each size, with as many rows as there are now: what a draft's size is worth."""
        shape, rows = self._drafter.shape, len(self._requests)
        if shape.costs is None:
            return
        costs = []
        for size in range(len(shape.sizes)):
            seconds = []
            for _ in range(_MEASURED):
                draft = self._state.draft.replace(size=np.full(rows, size, np.int32))
                # Once drafts do not pay, a step without one mostly makes none: as the third in a row does.
                pace = self._state.pace.replace(active=np.ones(rows, bool), idle=np.full(rows, 2, np.int32))
                free = {"done": np.zeros(rows, bool), "lengths": np.ones(rows, np.int32)}
                idle = self._state.replace(draft=draft, pace=pace, **free)
                began = time.perf_counter()
                with in_mesh(self._mesh):
                    self._state = jax.block_until_ready(decode(self._decoding(self._requests), idle, np.int32(1)))
                seconds.append(time.perf_counter() - began)
            costs.append(1e3 * min(seconds))
        self._costs[rows] = np.array(costs, np.float32)
        self._free_rows(range(rows))

    def clear(self) -> None:
        """Forget all requests, and begin with an empty state: after an error the old one is lost."""
        self._requests = [None]
        self._state = self._empty_state()

    def _decoding(self, requests: Sequence[Request | None]) -> Decoding:
        """What decodes rows of these requests; free rows are greedy ones."""
        asked = [request or Request([]) for request in requests]
        scored = None if self._best is None else np.array([request.logprobs for request in asked])
        drafter, shape = self._drafter, self._drafter.shape
        if len(requests) in self._costs:
            drafter = drafter.replace(shape=shape.replace(costs=self._costs[len(requests)]))
        return Decoding(
            base=self._model.base_for(len(requests) * self._rows),
            drafter=drafter,
            sampler=make_row_sampler([request.sampling for request in asked]),
            eos=self._eos,
            acceptance=self._acceptance,
            drafts=np.array([request.drafting for request in asked]),
            scored=scored,
        )

    def _empty_state(self) -> DecodeState:
        """One row that is free."""
        reader = self.reader(Request([0], max_new_tokens=0))
        self.read_on(reader)
        with in_mesh(self._mesh):
            return reader.state(self._width)

    def _free_rows(self, rows: Sequence[int]) -> None:
        if rows:
            freed = np.isin(np.arange(len(self._requests)), rows)
            self._state = self._state.replace(done=self._state.done | freed)

    def _resize(self, size: int) -> None:
        """Have so many rows, the used ones first."""
        used = [row for row, request in enumerate(self._requests) if request is not None]
        rows = (used + [0] * size)[:size]
        with in_mesh(self._mesh):
            self._state = _select(self._state, np.array(rows, np.int32))
        self._requests = ([self._requests[row] for row in used] + [None] * size)[:size]
        self._free_rows(range(len(used), size))
        self._idle = 0


def _fewer(rows: int) -> int:
    """The next lower power of two, at least half of the rows."""
    return 1 << (rows - 1).bit_length() - 1


@jax.jit
def _select(state: DecodeState, rows: jax.Array) -> DecodeState:
    """A state of these rows [F] int32 of another."""
    return jax.tree.map(lambda x: x[rows], state)
