"""The OpenAI interface over an engine: routes, limits, errors, streams."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jaxspec.errors import UserError
from jaxspec.generation.prompts import TooLong
from jaxspec.serving.chat import Chat
from jaxspec.serving.engine import Engine
from jaxspec.serving.fields import ApiError, one_line, quoted
from jaxspec.serving.merge import merged
from jaxspec.serving.messages import encode_chat
from jaxspec.serving.metrics import Metrics
from jaxspec.serving.protocol import Asked, Prompt, parse
from jaxspec.serving.replies import Choice, Replies
from jaxspec.serving.request import Busy, Closed
from jaxspec.serving.tokens import detokenize, parse_tokens, tokenize

MAX_BODY_BYTES = 4 * 2**20  # largest request body
_PAGE = Path(__file__).parent / "page.html"
_log = logging.getLogger("jaxspec.serving")


def make_app(
    engine: Engine,
    name: str,
    api_key: str = "",
    max_body_bytes: int = MAX_BODY_BYTES,
    grace: float = 60.0,
    *,
    aliases: Sequence[str] = (),
    origins: Sequence[str] = (),
    draft_metrics: bool = False,
) -> Starlette:
    """The web application.

    Args:
      engine: the engine that answers; closed when the application ends.
      name: name of the model, for clients.
      api_key: key that clients must send under /v1, /tokenize and /detokenize; empty for none.
      max_body_bytes: largest request body, in bytes.
      grace: seconds that running requests have when the application ends.
      aliases: further names that the model answers to.
      origins: origins of pages that browsers let read the answers, or "*" for all.
      draft_metrics: whether each answer tells how its drafts fared.
    """
    api = Api(engine, (name, *aliases), api_key, max_body_bytes, draft_metrics)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close, grace)

    routes = [
        Route("/", api.page),
        Route("/health", api.health),
        Route("/metrics", api.metrics_page),
        Route("/v1/models", api.guarded(api.models)),
        Route("/v1/models/{name:path}", api.guarded(api.model)),
        Route("/tokenize", api.guarded(api.tokenize), methods=["POST"]),
        Route("/detokenize", api.guarded(api.detokenize), methods=["POST"]),
        Route("/v1/completions", api.guarded(functools.partial(api.answer, chat=False)), methods=["POST"]),
        Route("/v1/chat/completions", api.guarded(functools.partial(api.answer, chat=True)), methods=["POST"]),
    ]
    allowed = {"allow_origins": origins, "allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
    middleware = [Middleware(CORSMiddleware, **allowed)] if origins else []
    errors = {HTTPException: _http_error}
    return Starlette(routes=routes, lifespan=lifespan, middleware=middleware, exception_handlers=errors)


Handler = Callable[[Request], Awaitable[Response]]


class Api:
    """The handlers of one engine."""

    def __init__(self, engine: Engine, names: Sequence[str], api_key: str, max_body_bytes: int, draft_metrics: bool):
        self._engine, self._names, self._key, self._max_body_bytes = engine, names, api_key, max_body_bytes
        self._name, self._draft_metrics = names[0], draft_metrics
        self._metrics, self._started = Metrics(engine, self._name), int(time.time())
        self._spelling = engine.model.spelling

    def guarded(self, handler: Handler) -> Handler:
        """A handler that checks the key, and whose errors become JSON and a line in the log."""

        async def guard(request: Request) -> Response:
            try:
                self._check_key(request)
                return await handler(request)
            except ApiError as error:
                return _refuse(request, error)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it
            except Exception as error:
                _log.exception("%s failed", one_line(request.url.path))
                return _refuse(request, ApiError(500, f"the request failed: {type(error).__name__}"))

        return guard

    async def page(self, request: Request) -> Response:
        """The page with a chat."""
        return HTMLResponse(
            _PAGE.read_text(), headers={"content-security-policy": "default-src 'self' 'unsafe-inline' data:"}
        )

    async def health(self, request: Request) -> Response:
        """Answer with status 200 while the engine works."""
        return Response(status_code=200 if self._engine.alive else 503)

    async def metrics_page(self, request: Request) -> Response:
        """What Prometheus scrapes."""
        return Response(self._metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        """List the model."""
        return JSONResponse({"object": "list", "data": [self._model(self._name)]})

    async def model(self, request: Request) -> Response:
        """The model by one of its names."""
        name = request.path_params["name"]
        self._check_model(name)
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        model = {"id": name, "object": "model", "created": self._started, "owned_by": "jaxspec"}
        return model | {"max_model_len": self._engine.max_length, "method": self._engine.drafter.name}

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._names:
            message = f"the model {quoted(name)} does not exist; there is {self._name!r}"
            raise ApiError(404, message, "model", "model_not_found")

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text or of a chat."""
        fields, chat = parse_tokens(await self._body(request))
        self._check_model(fields.take("model", str, "a string"))
        found = await asyncio.to_thread(tokenize, fields, chat, self._engine.model)
        return JSONResponse(found | {"max_model_len": self._engine.max_length})

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        fields, found = detokenize(await self._body(request), self._engine.model)
        self._check_model(fields.take("model", str, "a string"))
        return JSONResponse(found)

    async def answer(self, request: Request, chat: bool) -> Response:
        """Continue texts, or answer a chat with its next message."""
        if self._engine.full:  # before anything is read
            raise _busy("too many requests are waiting already; try again later")
        began = time.monotonic()
        engine = self._engine
        asked = parse(await self._body(request), chat, engine.limits.top_logprobs, engine.penalties)
        self._check_model(asked.model)
        choices = await self._submit(asked)
        replies = Replies(asked, self._engine.drafter, self._spelling, self._name, self._draft_metrics)
        logged = self._logged(request.url.path, replies, choices, began)
        if asked.stream:
            return StreamingResponse(self._events(asked, replies, choices, logged), media_type="text/event-stream")
        with logged:
            async for _ in merged(choices, self._metrics, self._engine.limits.seconds, request):
                pass
        return JSONResponse(replies.whole(choices))

    @contextlib.contextmanager
    def _logged(self, path: str, replies: Replies, choices: list[Choice], began: float) -> Iterator[None]:
        """A block that answers a request, with a line in the log at its end."""
        status = 499
        try:
            yield
            status = 200
        except ApiError as error:
            status = error.status
            raise
        finally:
            usage, seconds = replies.usage(choices), time.monotonic() - began
            _log.info(
                f"{path} {status} prompt {usage['prompt_tokens']} new {usage['completion_tokens']} "
                f"steps {usage['decoding_steps']} accepted {usage['accepted_tokens']} {seconds:.2f} s "
                f"{choices[0].whole.finish or 'aborted'}"
            )

    async def _body(self, request: Request) -> bytes:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > self._max_body_bytes:
                raise ApiError(413, f"the body has more than {self._max_body_bytes} bytes", code="body_too_large")
        return body

    async def _submit(self, asked: Asked) -> list[Choice]:
        """Put all answers of a request into the queue, or none."""
        seed = secrets.randbits(31) if asked.seed is None else asked.seed
        choices: list[Choice] = []
        wanted, most = asked.n * len(asked.prompts), self._engine.limits.queue + self._engine.limits.slots
        if wanted > most:
            message = f"prompts times n are {wanted} answers, and this server holds {most} at most"
            raise ApiError(400, message, "n" if asked.n > 1 else "prompt")
        prediction = await asyncio.to_thread(self._encode_prediction, asked)
        try:
            with contextlib.ExitStack() as undo:
                for prompt in asked.prompts:
                    ids = await asyncio.to_thread(self._encode, asked, prompt)
                    room, echo = self._engine.max_length - len(ids), ""
                    if asked.min_tokens > room:
                        raise ApiError(400, f"min_tokens: behind this prompt there is room for {room}", "min_tokens")
                    if asked.echo:
                        echo = prompt if isinstance(prompt, str) else self._engine.model.decode(ids)
                    for i in range(asked.n):
                        answer = self._engine.submit(
                            ids,
                            room if asked.max_tokens is None else asked.max_tokens,
                            sampling=asked.sampling,
                            seed=seed + i,
                            stop=asked.stop,
                            prediction=prediction,
                            drafting=asked.drafting,
                            logprobs=asked.logprobs is not None,
                            prompt_logprobs=asked.logprobs is not None and asked.echo,
                            min_new_tokens=asked.min_tokens,
                            ignore_eos=asked.ignore_eos,
                            continues=not asked.chat,
                        )
                        undo.callback(answer.cancel)
                        choices.append(Choice(answer, echo))
                undo.pop_all()
        except Busy as error:
            raise _busy(str(error)) from None
        except Closed as error:
            raise ApiError(503, str(error)) from None
        except UserError as error:
            raise ApiError(400, str(error), "messages" if asked.chat else "prompt") from None
        for choice in choices[:: asked.n]:
            self._metrics.prompt_tokens.inc(len(choice.answer.request.ids))
        return choices

    def _encode(self, asked: Asked, prompt: Prompt) -> list[int]:
        """Token ids of a prompt that leaves room for an answer. Raises ApiError or UserError for another."""
        ids, most = prompt, self._engine.max_length
        if isinstance(prompt, Chat):
            ids = encode_chat(self._engine.model, prompt)
        try:
            return self._engine.encode(ids, asked.max_tokens or 1, chat=False)
        except TooLong as error:
            length, new = error.length, max(asked.max_tokens or 1, 1)
            fits = length < most and new > 1
            advice = f"lower {asked.limit} to {most - length}" if fits else "shorten it"
            told = f"the prompt has {length} tokens: with {new} new ones it exceeds max-length, {most}, of this server"
            field = asked.limit if fits else "messages" if asked.chat else "prompt"
            raise ApiError(400, f"{told}; {advice}", field, "context_length_exceeded") from None

    def _encode_prediction(self, asked: Asked) -> list[int] | None:
        """Token ids of the predicted text, if there is one."""
        try:
            return None if asked.prediction is None else self._engine.encode_prediction(asked.prediction)
        except UserError as error:
            raise ApiError(400, str(error), "prediction") from None

    async def _events(
        self, asked: Asked, replies: Replies, choices: list[Choice], logged: contextlib.AbstractContextManager[None]
    ) -> AsyncIterator[str]:
        """Server-sent events."""
        try:
            with logged:
                for opening in replies.openings(choices):
                    yield _event(opening)
                pieces = merged(choices, self._metrics, self._engine.limits.seconds)
                async with contextlib.aclosing(pieces):
                    async for index, piece in pieces:
                        yield _event(replies.chunk(index, choices, piece))
                if asked.usage:
                    yield _event(replies.closing(choices))
        except ApiError as error:
            yield _event(error.body())
        yield "data: [DONE]\n\n"

    def _check_key(self, request: Request) -> None:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if self._key and not (kind == "Bearer" and hmac.compare_digest(given.encode("latin-1"), self._key.encode())):
            raise ApiError(
                401, "missing or wrong API key: send the header Authorization: Bearer KEY", None, "invalid_api_key"
            )


def _refuse(request: Request, error: ApiError) -> Response:
    """The answer to a request that is refused; a line in the log."""
    _log.info("%s %d %s", one_line(request.url.path), error.status, error.message)
    return JSONResponse(error.body(), error.status, error.headers)


def _busy(message: str) -> ApiError:
    return ApiError(429, message, None, "queue_full", {"retry-after": "1"})


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Answer unknown paths and HTTP methods."""
    path = one_line(request.url.path, 200)
    known = {404: f"no such path: {path}", 405: f"{request.method} is not for {path}"}
    message = known.get(error.status_code, error.detail)
    return _refuse(request, ApiError(error.status_code, message, headers=error.headers))
