"""Counters for Prometheus, under the names that dashboards for vLLM use."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from jaxspec.serving.answer import AnswerStream
from jaxspec.serving.engine import Engine
from jaxspec.serving.request import Finish, Piece

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counters of one engine.

    Args:
      engine: the engine.
      model: the model's name for clients, a label of all counters.
    """

    def __init__(self, engine: Engine, model: str):
        self._registry, self._model = CollectorRegistry(), model
        ProcessCollector(registry=self._registry)
        for name, what, value in (
            ("num_requests_running", "Requests being decoded or read.", lambda: engine.running),
            ("num_requests_waiting", "Requests in the queue.", lambda: engine.waiting),
            ("kv_cache_usage_perc", "Share of the slots in use.", lambda: engine.running / engine.limits.slots),
        ):
            labels = {"documentation": what, "labelnames": ["model_name"], "registry": self._registry}
            Gauge(f"vllm:{name}", **labels).labels(model).set_function(value)
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens of answers.")
        self._drafts = self._counter("spec_decode_num_drafts", "Steps that had a candidate.")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Candidates verified.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Tokens of answers that were drafted.")
        self._accepted_at = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "The same by depth from 0.", "position"
        )
        self._success = self._counter("request_success", "Answers by why they ended.", "finished_reason")
        self._first = self._histogram("time_to_first_token_seconds", "From asking to the first token.")
        self._between = self._histogram("inter_token_latency_seconds", "Between two tokens of an answer.")
        self._whole = self._histogram("e2e_request_latency_seconds", "From asking to the end.")
        self._queue = self._histogram("request_queue_time_seconds", "From asking until the prompt is begun.")
        self._prefill = self._histogram("request_prefill_time_seconds", "Reading the prompt.")
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the end.")

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)

    async def watch(self, answer: AnswerStream) -> AsyncIterator[Piece]:
        """Pass on the pieces of an answer, and count them. A consumer that stops early cancels the answer."""
        last, drafted_by, counted, finish = answer.times.asked, [], Piece(), None
        first = True
        try:
            async for piece in answer:
                now, finish = time.monotonic(), piece.finish
                counted = piece if piece.steps else counted
                if piece.tokens:
                    self._count(piece, now - last, first)
                    first, last = False, now
                    drafted_by += piece.drafted_by
                yield piece
        finally:
            answer.cancel()
            self._end(answer, counted, finish, drafted_by)

    def _count(self, piece: Piece, seconds: float, first: bool) -> None:
        self.generation_tokens.inc(len(piece.tokens))
        if first:
            self._first.observe(seconds)
        else:
            for _ in piece.tokens:
                self._between.observe(seconds / len(piece.tokens))

    def _end(self, answer: AnswerStream, piece: Piece, finish: Finish | None, drafted_by: list[int]) -> None:
        now, times = time.monotonic(), answer.times
        reason = finish if finish in ("stop", "length") else "abort"
        self._success.labels(self._model, reason).inc()
        self._whole.observe(now - times.asked)
        if times.decoded:
            self._queue.observe(times.read - times.asked)
            self._prefill.observe(times.decoded - times.read)
            self._decode.observe(now - times.decoded)
        self._drafts.inc(piece.drafts)
        self._draft_tokens.inc(piece.drafted)
        depth = 0
        for sources in drafted_by:
            depth = depth + 1 if sources else 0
            if depth:
                self._accepted.inc()
                self._accepted_at.labels(self._model, str(depth - 1)).inc()

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        counter = Counter(f"vllm:{name}", what, ["model_name", *labels], registry=self._registry)
        return counter if labels else counter.labels(self._model)

    def _histogram(self, name: str, what: str) -> Histogram:
        whole = Histogram(f"vllm:{name}", what, ["model_name"], registry=self._registry, buckets=_SECONDS)
        return whole.labels(self._model)
