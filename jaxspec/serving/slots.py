"""The slots of an engine: rows of one decoding state, which requests enter and leave between chunks of steps.

The number of rows follows the number of running requests: 1, 2, 4 and so on up to all slots, because a step takes
longer with more rows, used or not. The settings of the requests are arguments, as arrays: no request recompiles. All
methods run in the context of the model's mesh (`in_mesh`).
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.acceptance import Acceptance
from jaxspec.decoding.draft import Draft
from jaxspec.decoding.loop import decode, insert
from jaxspec.decoding.parts import Part, cut
from jaxspec.decoding.prompt import read
from jaxspec.decoding.sampling import make_row_sampler
from jaxspec.decoding.scores import Scores
from jaxspec.decoding.state import DecodeState, Decoding
from jaxspec.drafters.drafter import Drafter
from jaxspec.errors import UserError
from jaxspec.generation.job import bucket, cache_capacity
from jaxspec.generation.prompts import pad_tokens
from jaxspec.generation.sizes import SizeTimes
from jaxspec.parallel.sharding import put_beside
from jaxspec.serving.prefixes import Prefixes
from jaxspec.serving.reader import PromptReader
from jaxspec.serving.request import Limits, Piece, Request
from jaxspec.tuning.memory import free_memory
from jaxspec.tuning.sizes import SAMPLINGS, measure_sizes

_log = logging.getLogger(__name__)
_PATIENCE = 16  # calls of `release` in a row that find half of the rows free before their number is halved
ROUNDS = 9  # steps measured per size, at most
_SECONDS = 20  # no round of these begins later than that


class Slots:
    """Rows of one decoding state, which requests share.

    Args:
      drafter: the drafter, on its base.
      acceptance: the acceptance rule of all requests.
      limits: the limits of the engine, with its `max_length`.
      penalties: whether requests may have penalties.

    Raises:
      UserError: the slots would take more memory than there is.

    Attributes:
      times: of steps of each size, of greedy ones and of sampled ones, by the number of rows; `warm_up` measures them.
    """

    def __init__(self, drafter: Drafter, acceptance: Acceptance, limits: Limits, penalties: bool = False):
        self._model, self._least_rows = drafter.model, drafter.least_rows
        self._count, self._width = limits.slots, limits.max_length
        self._chunk = bucket(min(limits.prompt_chunk, self._width), 1)
        least = cache_capacity(self._width, drafter.on_device.shape.depth)
        self._capacity = max(least, bucket(self._width, self._chunk, self._chunk))  # the longest prompt in whole chunks
        self._best = None if limits.top_logprobs < 0 else min(limits.top_logprobs, self._model.config.vocab_size)
        constants = (drafter.on_device, jnp.array(self._model.eos or (-1,), jnp.int32))
        self._drafter, self._eos = put_beside(self._model.params, constants)
        self._acceptance, self._penalties = acceptance, penalties
        self._idle = 0  # calls in a row that found half of the rows free
        self.times: dict[int, list[SizeTimes]] = {}
        self._model.base_for(self._least_rows)  # copies kernels: not within a trace
        self._prefixes = Prefixes(0, self._chunk)  # keeps nothing of a trace
        self._row_bytes, self._part_bytes = _size_of(self._free_row), _size_of(self._part)
        if 0 < limits.prefix_bytes < self._part_bytes:  # of a large base the default is too small
            _log.warning(
                "beginnings of prompts are read again every time: limits.prefix-bytes is %d, and %d tokens take %d",
                *(limits.prefix_bytes, self._chunk, self._part_bytes),
            )
        self._prefixes = Prefixes(limits.prefix_bytes // self._part_bytes, self._chunk)
        self._check_memory()
        self.clear()

    def clear(self) -> None:
        """Forget all requests, and begin with one free row: after an error the old state is lost."""
        self.forget_prefixes()
        self._requests: list[Request | None] = [None]
        self._state = self._free_row()

    def _free_row(self) -> DecodeState:
        """The state of one row without a request."""
        reader = self.reader(Request([0], max_new_tokens=0))
        reader.read_chunk()
        return reader.state(self._width)

    def _part(self) -> Part:
        """What is kept of a chunk."""
        base, decoding = self._model.base, self._decoding([None])
        chunk = (*pad_tokens([[0] * self._chunk], self._chunk), np.zeros(1, np.uint32))
        return cut(decoding, read(base, decoding, None, *chunk, capacity=self._capacity))

    def _check_memory(self) -> None:
        """Raise UserError where the slots take more memory than there is, before anything is compiled."""
        if self.memory > (free := free_memory(self._model.params)):
            raise UserError(
                f"{self._count} slots of {self._width} tokens take {_gigabytes(self.memory)}, and "
                f"{_gigabytes(free)} are free; lower limits.slots or limits.max-length, or limits.prefix-bytes"
            )

    def forget_prefixes(self) -> None:
        """Forget readings of prompts: after an error they may be what failed."""
        self._prefixes.clear()

    @property
    def free(self) -> int:
        """Number of further requests that there is room for."""
        return self._count - len(self._used)

    @property
    def _used(self) -> list[int]:
        """Rows that have a request."""
        return [row for row, request in enumerate(self._requests) if request is not None]

    @property
    def memory(self) -> int:
        """Bytes at most: all slots and, while rows are added, the former ones; a prompt and the kept prefixes.

        A prompt that is read also keeps the hidden states of its last chunk.
        """
        former, base = _fewer(self._count) if self._count > 1 else 0, self._model.base
        states = (1 + len(self._drafter.taps(base))) * self._chunk * base.decoder.config.hidden_size
        prompt = self._row_bytes + states * base.dtype.itemsize
        return (self._count + former) * self._row_bytes + prompt + self._prefixes.count * self._part_bytes

    def reader(self, request: Request) -> PromptReader:
        """A reader of a request's prompt."""
        decoding = self._decoding([request])
        return PromptReader(self._model.base, decoding, request, self._capacity, self._best, self._prefixes)

    def place(self, request: Request, reader: PromptReader) -> None:
        """Begin to decode a request whose prompt was read. There must be room."""
        if None not in self._requests:
            self._resize(min(2 * len(self._requests), self._count))
        pace = self._state.pace
        state = reader.state(self._width, 0 if pace is None else int(jax.device_get(pace.idle)[0]))
        row = self._requests.index(None)
        if self._used:  # the size of its own draft was chosen by the costs of one row, and would be that of all
            state = state.replace(draft=_resting(state.draft))
        self._state = insert(self._state, state, np.array([row], np.int32))
        self._requests[row] = request

    def advance(self, steps: int, waiting: int = 0) -> None:
        """Run some steps, or fewer where all requests are done.

        Args:
          steps: at most.
          waiting: requests whose prompts are to be read after them. The time of a larger step is also theirs, as far
            as there are free slots: beyond them they wait for the ends of others.
        """
        weight = 1 + min(waiting, self.free) / max(len(self._used), 1)
        self._state = decode(self._decoding(self._requests, weight), self._state, np.int32(steps))

    def progress(self) -> Iterator[tuple[Request, Piece, Scores | None]]:
        """For each request its answer so far, without text, and the scores of all tokens if a request asks for any."""
        state, used = self._state, self._used
        wanted = (state.done, state.counts, state.tokens, state.drafted_by, state.stats, state.finite)
        done, counts, tokens, drafted_by, stats, finite = jax.device_get(wanted)
        scores = jax.device_get(state.scores) if any(self._requests[row].logprobs for row in used) else None
        for row in used:
            emitted = row, slice(counts[row])
            ids = tokens[emitted].tolist()
            ended = ids and ids[-1] in self._model.eos and not self._requests[row].ignore_eos
            end = "stop" if ended else "length"
            so_far = Piece(
                tokens=ids,
                drafted_by=drafted_by[emitted].tolist(),
                steps=int(stats.steps[row]),
                drafts=int(stats.offered[row, 0, :1].sum()),
                drafted=int(stats.drafted[row]),
                predicted=0 if stats.predicted is None else int(stats.predicted[row]),
                finish=end if done[row] else None,
                finite=finite is None or bool(finite[row]),
            )
            yield self._requests[row], so_far, jax.tree.map(operator.itemgetter(emitted), scores)

    def release(self, ended: Sequence[Request]) -> None:
        """Free the rows of requests that have ended."""
        rows = [row for row in self._used if self._requests[row] in ended]
        for row in rows:
            self._requests[row] = None
        self._free_rows(rows)
        self._idle = self._idle + 1 if 2 * len(self._used) <= len(self._requests) else 0
        if self._idle > _PATIENCE and len(self._requests) > 1:
            self._resize(_fewer(len(self._requests)))

    def warm_up(self) -> None:
        """Compile all programs, while there are no requests, and measure the time of a step of each size."""
        ids = [0] * min(self._chunk + 1, self._width)  # two chunks, where a prompt may have two
        reader = self.reader(Request(ids, prompt_logprobs=self._best is not None))
        while not reader.finished:
            reader.read_chunk()
        fresh = reader.state(self._width)
        fresh = fresh.replace(draft=_resting(fresh.draft))
        self.reader(Request(ids))  # from the first chunk's reading
        self.forget_prefixes()
        while True:
            outside = np.array([len(self._requests)], np.int32)  # a row that does not exist: nothing is written
            self._state = insert(self._state, fresh, outside)
            self.advance(1)
            list(self.progress())
            self._measure()
            if len(self._requests) == self._count:
                break
            self._resize(min(2 * len(self._requests), self._count))
        while len(self._requests) > 1:
            self._resize(_fewer(len(self._requests)))

    def _measure(self) -> None:
        """Measure the milliseconds of steps of each size with the present number of rows, greedy and sampled."""
        if self._drafter.shape.costs is None:
            return
        rows = len(self._requests)
        decodings = [self._decoding([Request([], sampling=sampling)] * rows) for sampling in SAMPLINGS]
        self.times[rows], self._state = measure_sizes(decodings, self._state, ROUNDS, _SECONDS)
        self._free_rows(range(rows))

    def _decoding(self, requests: Sequence[Request | None], weight: float = 1.0) -> Decoding:
        """Constants of decoding rows with these requests; free rows are greedy.

        `weight` is how many times the further time of larger steps counts.
        """
        asked = [request or Request([]) for request in requests]
        drafter = self._drafter
        if drafter.shape.costs is not None:
            costs = self._costs(len(requests), weight)
            drafter = drafter.replace(shape=drafter.shape.replace(costs=costs))
        return Decoding(
            base=self._model.base_for(len(requests) * self._least_rows),
            drafter=drafter,
            sampler=make_row_sampler([request.sampling for request in asked], self._penalties),
            eos=self._eos,
            acceptance=self._acceptance,
            drafts=np.array([request.drafting for request in asked]),
            scored=None if self._best is None else np.array([request.logprobs for request in asked]),
            least=np.array([request.min_new_tokens for request in asked], np.int32),
            endless=np.array([request.ignore_eos for request in asked]),
        )

    def _costs(self, rows: int, weight: float) -> np.ndarray:
        """[2, K] float32, of a step of each size with so many rows, as measured, else as they were given."""
        times = self.times.get(rows)
        costs = np.array([each.sizes for each in times]) if times else np.asarray(self._drafter.shape.costs)
        costs = self._drafter.shape.rising(costs)
        return (costs[:, :1] + weight * (costs - costs[:, :1])).astype(np.float32)

    def _free_rows(self, rows: Sequence[int]) -> None:
        """Mark rows as done, so that steps skip them."""
        if rows:
            freed = np.isin(np.arange(len(self._requests)), rows)
            self._state = self._state.replace(done=self._state.done | freed)

    def _resize(self, size: int) -> None:
        """Change the number of rows; those with a request come first."""
        used = self._used
        rows = (used + [0] * size)[:size]
        self._state = _select(self._state, np.array(rows, np.int32))
        self._requests = ([self._requests[row] for row in used] + [None] * size)[:size]
        self._free_rows(range(len(used), size))
        self._idle = 0


def _size_of(make: Callable[[], Any]) -> int:
    """Bytes of what a function makes, without running it."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(make)))


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"


def _fewer(rows: int) -> int:
    """The next lower power of two, at least half of the rows."""
    return 1 << (rows - 1).bit_length() - 1


_resting = jax.jit(Draft.resting)


@jax.jit
def _select(state: DecodeState, rows: jax.Array) -> DecodeState:
    """The rows [F] int32 of a state, as a state of F rows."""
    return jax.tree.map(lambda x: x[rows], state)
