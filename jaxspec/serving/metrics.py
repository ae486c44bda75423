"""Counters for Prometheus, under the names that dashboards for vLLM use."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from jaxspec.serving.answer import AnswerStream
from jaxspec.serving.engine import Engine
from jaxspec.serving.request import Piece

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
            gauge = Gauge(f"vllm:{name}", what, ["model_name"], registry=self._registry)
            gauge.labels(model).set_function(value)
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self._looked_up = self._counter("prefix_cache_queries", "Tokens of prompts that were read or had been.")
        self._cached = self._counter("prefix_cache_hits", "Those of them that were not read again.")
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
        """Pass on the pieces of an answer, and count them."""
        whole, last = Piece(), answer.asked_at
        try:
            async for piece in answer:
                now = time.monotonic()
                if piece.tokens:
                    self.generation_tokens.inc(len(piece.tokens))
                    if not whole.tokens:
                        self._first.observe(now - last)
                    else:
                        for _ in piece.tokens:
                            self._between.observe((now - last) / len(piece.tokens))
                    last = now
                whole = whole.followed_by(piece)
                yield piece
        finally:
            self._end(answer, whole)

    def _end(self, answer: AnswerStream, whole: Piece) -> None:
        now = time.monotonic()
        reason = whole.finish if whole.finish in ("stop", "length") else "abort"
        self._success.labels(self._model, reason).inc()
        self._whole.observe(now - answer.asked_at)
        if answer.decoded_at:
            self._looked_up.inc(len(answer.request.ids))
            self._cached.inc(answer.cached)
            self._queue.observe(answer.read_at - answer.asked_at)
            self._prefill.observe(answer.decoded_at - answer.read_at)
            self._decode.observe(now - answer.decoded_at)
        self._drafts.inc(whole.drafts)
        self._draft_tokens.inc(whole.drafted)
        depth = 0
        for sources in whole.drafted_by:
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
