"""The engine: requests wait in a queue, share the slots, and get their answers piece by piece.

One thread does all work on devices. In turn it reads a chunk of the oldest waiting prompt, runs a few decoding steps
for all running requests, and hands out the new tokens. Each text is the one that `generate` gives for that request
alone.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from jaxspec.decoding.acceptance import Acceptance, Match
from jaxspec.decoding.sampling import check_sampling
from jaxspec.drafters import load_drafter
from jaxspec.drafters.costs import save_costs
from jaxspec.drafters.defaults import has_default
from jaxspec.drafters.drafter import Drafter
from jaxspec.errors import UserError
from jaxspec.generation.prompts import encode_predictions, encode_prompts
from jaxspec.generation.sizes import BUSY
from jaxspec.parallel.sharding import in_mesh, mesh_of
from jaxspec.serving.answer import AnswerStream, token_scores
from jaxspec.serving.reader import PromptReader
from jaxspec.serving.request import Busy, Closed, Limits, Piece, Request
from jaxspec.serving.slots import ROUNDS, Slots
from jaxspec.tuning.sizes import row_costs
from jaxspec.weights.model import Model

_DEFAULT_MAX_LENGTH = 2048  # tokens of prompt and answer together
_log = logging.getLogger(__name__)


class Engine:
    """Answers requests together, each as if it were alone. Close it, or use it as a context.

    Args:
      model: the base.
      method: a method's name, as `load_drafter` takes it, or a drafter on that base.
      limits: the limits of the engine.
      acceptance: the acceptance rule. `Match` gives each request the text that it would get alone.
      penalties: whether requests may have penalties for tokens that their texts have already: every step then takes
        longer, and counts the tokens of each slot.

    Attributes:
      penalties: likewise.

    Raises:
      UserError: limits that the base does not admit, or the errors of `load_drafter`.
    """

    def __init__(
        self,
        model: Model,
        method: str | Drafter = "autoregressive",
        limits: Limits = Limits(),
        acceptance: Acceptance = Match(),
        penalties: bool = False,
    ):
        self.drafter = load_drafter(method, model, slots=limits.slots) if isinstance(method, str) else method
        self.drafter.check_accepted_by(acceptance)
        self.model, self.limits, self.penalties = self.drafter.model, limits, penalties
        context = self.model.config.max_positions
        self.max_length = limits.max_length or min(_DEFAULT_MAX_LENGTH, context)
        if not 2 <= self.max_length <= context:
            raise UserError(f"max-length must be between 2 and the base's {context}, got {self.max_length}")
        self._mesh = mesh_of(self.model.params)
        with in_mesh(self._mesh):
            limits = dataclasses.replace(limits, max_length=self.max_length)
            self._slots = Slots(self.drafter, acceptance, limits, penalties)
        self._decode = _decoder(self.model)
        self._waiting: deque[AnswerStream] = deque()
        self._reading: AnswerStream | None = None  # whose prompt is being read
        self._reader: PromptReader | None = None  # of that prompt, from its first chunk on
        self._running: dict[Request, AnswerStream] = {}
        self._wake, self._closing = threading.Condition(), False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of running requests, including one whose prompt is being read."""
        return len(self._running) + (self._reading is not None)

    @property
    def full(self) -> bool:
        """Whether a further request would be refused: the queue and the free slots have no room for it."""
        return len(self._waiting) >= self.limits.queue + self.limits.slots - self.running

    @property
    def alive(self) -> bool:
        """Whether the engine works."""
        return self._thread.is_alive()

    @property
    def memory(self) -> int:
        """Bytes of the decoding state with all slots in use, beside the weights."""
        return self._slots.memory

    def warm_up(self) -> None:
        """Compile everything that requests will need, before the first one; measure steps, and keep what they cost."""
        keeps_costs = has_default(self.drafter) and not self.penalties  # with them steps cost more than elsewhere
        with in_mesh(self._mesh):
            self._slots.warm_up()
        if keeps_costs:
            self._keep_costs()

    def _keep_costs(self) -> None:
        """Keep what steps cost; says in the log what was damaged, or why it cannot be kept."""
        try:
            for rows, times in self._slots.times.items():
                if (spread := max(each.spread for each in times)) > BUSY:
                    _log.warning("costs of steps are not kept: of two alike one took %.1f times as long", spread)
                    return
                if note := save_costs(self.model, rows, row_costs(self.drafter, rows, times), ROUNDS):
                    _log.warning(note)
        except UserError as error:
            _log.warning("costs of steps are not kept: %s", error)

    def encode(self, prompt: str | Sequence[int], max_new_tokens: int, chat: bool = True) -> list[int]:
        """Token ids of a prompt; raises UserError for one that is empty or too long for its answer."""
        return encode_prompts(self.model, [prompt], max(max_new_tokens, 1), chat, self.max_length)[0]

    def encode_prediction(self, prediction: str | Sequence[int]) -> list[int]:
        """Token ids of a predicted text; raises UserError for one that nothing drafts from, or that is too long."""
        [ids] = encode_predictions(self.drafter, [prediction], 1)
        if len(ids) > self.max_length:
            raise UserError(f"prediction: it has {len(ids)} tokens, and texts have {self.max_length} at most here")
        return ids

    def submit(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 128,
        *,
        chat: bool = True,
        prediction: str | Sequence[int] | None = None,
        **settings: Any,
    ) -> AnswerStream:
        """Ask for an answer, from a running event loop.

        Args:
          prompt: text or token ids.
          max_new_tokens: stop there, or at an end-of-text token.
          chat: wrap text in the tokenizer's chat template, where it has one.
          prediction: text or token ids that the answer is expected to be, mostly; lookups draft from it.
          **settings: of `Request`: `sampling`, `seed`, `stop`, `drafting`, `logprobs` and so on.

        Returns:
          An async iterator of `Piece`.

        Raises:
          UserError: a prompt or a setting that makes no sense.
          Busy: the queue is full.
          Closed: the engine is closed.
        """
        if max_new_tokens < 0:
            raise UserError(f"max-new-tokens must be at least 0, got {max_new_tokens}")
        settings["prediction"] = () if prediction is None else self.encode_prediction(prediction)
        request = Request(self.encode(prompt, max_new_tokens, chat), max_new_tokens, **settings)
        if not 0 <= request.min_new_tokens <= max_new_tokens:
            raise UserError(
                f"min-new-tokens must be between 0 and max-new-tokens, {max_new_tokens}, got {request.min_new_tokens}"
            )
        check_sampling(request.sampling)
        if request.sampling.penalises and not self.penalties:
            raise UserError("this engine has no penalties; start it with penalties")
        if (request.logprobs or request.prompt_logprobs) and self.limits.top_logprobs < 0:
            raise UserError("logprobs: this engine keeps none; start it with top-logprobs of at least 0")
        if request.stop and (not self.model.tokenizer or not all(request.stop)):
            raise UserError("stop: a stop text must not be empty, and needs a tokenizer")
        answer = AnswerStream(request, self._decode, self.limits.seconds)
        with self._wake:
            if self._closing or not self.alive:
                raise Closed("the engine ends and takes no further requests")
            if self.full:
                raise Busy(f"{len(self._waiting)} requests are waiting already; try again later")
            self._waiting.append(answer)
            self._wake.notify()
        return answer

    def close(self, grace: float = float("inf")) -> None:
        """Take no more requests, finish the present ones, and cancel those left after so many seconds."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(None if grace == float("inf") else grace)
        with self._wake:
            for answer in self._all():
                answer.cancel()
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(float("inf") if kind is None else 0)

    # The engine's thread

    def _all(self) -> list[AnswerStream]:
        reading = [self._reading] if self._reading else []
        return [*self._waiting, *reading, *self._running.values()]

    def _work(self) -> None:
        try:
            with in_mesh(self._mesh):
                while self._wait():
                    self._turn()
        except Exception as error:  # the engine is broken: no client shall wait for it
            _log.exception("the engine ends")
            with self._wake:
                self._closing = True
                for answer in self._all():
                    answer.put(error)
                self._waiting, self._reading, self._running = deque(), None, {}

    def _wait(self) -> bool:
        """Wait until there is work. Returns False where there will be none."""
        with self._wake:
            while not self._all() and not self._closing:
                self._wake.wait()
            return bool(self._all())

    def _turn(self) -> None:
        """Read a chunk of a prompt, and decode a few steps."""
        try:
            self._drop_interrupted()
            if self._read_chunk():
                self._hand_out()
            if self._running:
                waiting = len(self._waiting) + (self._reading is not None)
                self._slots.advance(self.limits.steps_per_chunk, waiting)
                self._hand_out()
        except Exception as error:  # of the devices: the state that all rows share is lost
            _log.exception("requests failed")
            with self._wake:
                for answer in self._running.values():
                    answer.put(error)
                self._running = {}
            self._slots.clear()

    def _drop_interrupted(self) -> None:
        """End answers that were cancelled or took too long."""
        ended = []
        with self._wake:
            for answer in self._all():
                if finish := answer.interruption:
                    answer.put(Piece(finish=finish))
                    ended.append(answer)
            self._waiting = deque(answer for answer in self._waiting if answer not in ended)
            if self._reading in ended:
                self._reading = None
        self._release(ended)

    def _release(self, ended: Sequence[AnswerStream]) -> None:
        """Free the slots of answers that have ended."""
        with self._wake:
            for answer in ended:
                self._running.pop(answer.request, None)
        self._slots.release([answer.request for answer in ended])

    def _read_chunk(self) -> bool:
        """Read a chunk of a prompt. Returns True after the last one: the request has a slot and its first token."""
        if self._reading is None and self._waiting and self._slots.free:
            with self._wake:
                self._reading, self._reader = self._waiting.popleft(), None
            self._reading.read_at = time.monotonic()
        if (answer := self._reading) is None:
            return False
        try:
            self._reader = self._reader or self._slots.reader(answer.request)
            self._reader.read_chunk()
            if not self._reader.finished:
                return False
            answer.cached = self._reader.cached
            answer.prompt_scores = [score for part in self._reader.scores for score in token_scores(part)]
        except Exception as error:  # of this prompt alone
            _log.exception("a prompt could not be read")
            answer.put(error)
            self._reading = None
            self._slots.forget_prefixes()
            return False
        with self._wake:  # the answer must always be in one of the two
            self._reading, self._running[answer.request] = None, answer
        self._slots.place(answer.request, self._reader)
        return True

    def _hand_out(self) -> None:
        """Give every answer its new tokens, and free the slots of those that end."""
        ended = []
        for request, so_far, scores in self._slots.progress():
            answer = self._running[request]
            answer.decoded_at = answer.decoded_at or time.monotonic()  # not before: devices work on after a call
            try:
                piece = answer.extend(so_far, scores)
            except Exception as error:  # of this answer alone
                _log.exception("a request failed")
                answer.put(error)
                ended.append(answer)
                continue
            if piece.tokens or piece.finish:
                answer.put(piece)
            if piece.finish:
                ended.append(answer)
        self._release(ended)


def _decoder(model: Model) -> Callable[[list[int], bool], str]:
    """Ids to text, with a second tokenizer: other threads use the first one."""
    if model.tokenizer is None:
        return lambda ids, continues: ""
    return dataclasses.replace(model, tokenizer=copy.deepcopy(model.tokenizer)).decode
