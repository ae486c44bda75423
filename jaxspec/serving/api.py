"""The OpenAI interface over an engine: routes, limits, errors, streams."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jaxspec.errors import UserError
from jaxspec.serving.engine import Engine
from jaxspec.serving.metrics import Metrics
from jaxspec.serving.protocol import ApiError, Asked, Prompt, parse
from jaxspec.serving.replies import Choice, Replies
from jaxspec.serving.request import Busy, Closed, Piece
from jaxspec.weights.templates import own_template, with_variables

MAX_BODY_BYTES = 4 * 2**20  # largest request body
_PAGE = Path(__file__).parent / "page.html"
_log = logging.getLogger("jaxspec.serving")


def make_app(
    engine: Engine, name: str, api_key: str = "", max_body_bytes: int = MAX_BODY_BYTES, grace: float = 60.0
) -> Starlette:
    """The web application.

    Args:
      engine: the engine that answers; closed when the application ends.
      name: name of the model, for clients.
      api_key: key that clients must send under /v1; empty for none.
      max_body_bytes: largest request body, in bytes.
      grace: seconds that running requests have when the application ends.
    """
    api = Api(engine, name, api_key, max_body_bytes)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close, grace)

    routes = [
        Route("/", api.page),
        Route("/health", api.health),
        Route("/metrics", api.metrics_page),
        Route("/v1/models", api.guarded(api.models)),
        Route("/v1/completions", api.guarded(api.completions), methods=["POST"]),
        Route("/v1/chat/completions", api.guarded(api.chat_completions), methods=["POST"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _http_error})


Handler = Callable[[Request], Awaitable[Response]]


class Api:
    """The handlers of one engine."""

    def __init__(self, engine: Engine, name: str, api_key: str, max_body_bytes: int):
        self._engine, self._name, self._key, self._most_bytes = engine, name, api_key, max_body_bytes
        self._metrics, self._started = Metrics(engine, name), int(time.time())

    def guarded(self, handler: Handler) -> Handler:
        """A handler that checks the key, and whose errors become JSON and a line in the log."""

        async def guard(request: Request) -> Response:
            try:
                self._check_key(request)
                return await handler(request)
            except ApiError as error:
                return self._refuse(request, error)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it
            except Exception as error:
                _log.exception("%s failed", request.url.path)
                return self._refuse(request, ApiError(500, f"the request failed: {type(error).__name__}"))

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
        model = {"id": self._name, "object": "model", "created": self._started, "owned_by": "jaxspec"}
        length = {"max_model_len": self._engine.max_length, "method": self._engine.drafter.name}
        return JSONResponse({"object": "list", "data": [model | length]})

    async def completions(self, request: Request) -> Response:
        """Continue texts."""
        return await self._answer(request, chat=False)

    async def chat_completions(self, request: Request) -> Response:
        """Answer a chat with its next message."""
        return await self._answer(request, chat=True)

    async def _answer(self, request: Request, chat: bool) -> Response:
        if self._engine.full:  # before anything is read
            raise _busy("too many requests are waiting already; try again later")
        began = time.monotonic()
        asked = parse(await self._body(request), chat, self._engine.limits.top_logprobs)
        if asked.model not in (None, self._name):
            message = f"the model {asked.model!r} does not exist; there is {self._name!r}"
            raise ApiError(404, message, "model", "model_not_found")
        choices = await self._submit(asked)
        replies = Replies(asked, self._engine.drafter, self._name)

        def log(status: int) -> None:
            usage, piece = replies.usage(choices), choices[0].piece
            _log.info(
                "%s %d prompt %d new %d steps %d accepted %d %.2f s %s",
                request.url.path,
                status,
                usage["prompt_tokens"],
                usage["completion_tokens"],
                usage["decoding_steps"],
                usage["completion_tokens_details"]["accepted_prediction_tokens"],
                time.monotonic() - began,
                piece.finish or "aborted",
            )

        if asked.stream:
            return StreamingResponse(self._events(asked, replies, choices, log), media_type="text/event-stream")
        return await self._whole(request, replies, choices, log)

    async def _body(self, request: Request) -> bytes:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > self._most_bytes:
                raise ApiError(413, f"the body has more than {self._most_bytes} bytes", code="body_too_large")
        return body

    async def _submit(self, asked: Asked) -> list[Choice]:
        """Put all answers of a request into the queue, or none."""
        seed = secrets.randbits(31) if asked.seed is None else asked.seed
        choices: list[Choice] = []
        wanted, most = asked.n * len(asked.prompts), self._engine.limits.queue + self._engine.limits.slots
        if wanted > most:
            raise ApiError(400, f"n answers to each prompt are {wanted}, and this server holds {most} at most", "n")
        try:
            for prompt in asked.prompts:
                ids = await asyncio.to_thread(self._encode, asked, prompt)
                longest, text = asked.max_tokens, ""
                if asked.echo:
                    text = prompt if isinstance(prompt, str) else self._engine.model.decode(ids)
                for i in range(asked.n):
                    answer = self._engine.submit(
                        ids,
                        self._engine.max_length - len(ids) if longest is None else longest,
                        sampling=asked.sampling,
                        seed=seed + i,
                        stop=asked.stop,
                        drafting=asked.drafting,
                        logprobs=asked.logprobs is not None,
                        prompt_logprobs=asked.logprobs is not None and asked.echo,
                    )
                    choices.append(Choice(answer, text))
        except BaseException as error:  # a request that is cancelled, too
            for choice in choices:
                choice.answer.cancel()
            if isinstance(error, Busy):
                raise _busy(str(error)) from None
            if isinstance(error, Closed):
                raise ApiError(503, str(error)) from None
            if isinstance(error, UserError):
                raise ApiError(400, str(error), "messages" if asked.chat else "prompt") from None
            raise
        for choice in choices[:: asked.n]:
            self._metrics.prompt_tokens.inc(len(choice.answer.request.ids))
        return choices

    def _encode(self, asked: Asked, prompt: Prompt) -> list[int]:
        """Token ids of a prompt that leaves room for an answer."""
        if asked.chat:
            prompt = chat_ids(self._engine, prompt, asked.variables)
        return self._engine.encode(prompt, asked.max_tokens or 1, chat=False)

    async def _whole(
        self, request: Request, replies: Replies, choices: list[Choice], log: Callable[[int], None]
    ) -> Response:
        """The complete answer; cancelled when the client disconnects."""

        async def collect() -> None:
            async with contextlib.aclosing(self._merged(choices)) as merged:
                async for _ in merged:
                    pass

        collecting = asyncio.ensure_future(collect())
        leaving = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                raise ClientDisconnect
            collecting.result()
        except ApiError as error:
            log(error.status)
            raise
        except ClientDisconnect:
            log(499)
            raise
        finally:
            for task in (collecting, leaving):
                task.cancel()
            await asyncio.gather(collecting, leaving, return_exceptions=True)
        log(200)
        return JSONResponse(replies.whole(choices))

    async def _events(
        self, asked: Asked, replies: Replies, choices: list[Choice], log: Callable[[int], None]
    ) -> AsyncIterator[str]:
        """Server-sent events."""
        status = 499
        try:
            for index, choice in enumerate(choices):
                if opening := replies.opening(index, choice):
                    yield _event(opening)
            async with contextlib.aclosing(self._merged(choices)) as merged:
                async for index, piece in merged:
                    yield _event(replies.chunk(index, choices[index], piece))
            if asked.usage:
                yield _event(replies.closing(choices))
            status = 200
            yield "data: [DONE]\n\n"
        except ApiError as error:
            status = error.status
            yield _event(error.body())
            yield "data: [DONE]\n\n"
        finally:
            log(status)

    async def _merged(self, choices: list[Choice]) -> AsyncIterator[tuple[int, Piece]]:
        """The pieces of all choices as they come. All are cancelled when it ends early."""
        pieces: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()

        async def pump(index: int, choice: Choice) -> None:
            try:
                async with contextlib.aclosing(self._metrics.watch(choice.answer)) as watched:
                    async for piece in watched:
                        await pieces.put((index, piece))
            except Exception as error:
                await pieces.put((index, error))

        pumps = [asyncio.ensure_future(pump(*item)) for item in enumerate(choices)]
        try:
            unfinished = len(choices)
            while unfinished:
                index, piece = await pieces.get()
                if isinstance(piece, Exception):
                    raise ApiError(500, f"the request failed in the engine: {type(piece).__name__}") from piece
                if piece.finish == "timeout":
                    raise ApiError(
                        504, f"the answer took longer than {self._engine.limits.seconds:g} s", code="timeout"
                    )
                choices[index].add(piece)
                yield index, piece
                unfinished -= piece.finish is not None
        finally:
            for task, choice in zip(pumps, choices, strict=True):
                task.cancel()
                choice.answer.cancel()  # by itself, for a task that has not begun yet
            await asyncio.gather(*pumps, return_exceptions=True)

    def _check_key(self, request: Request) -> None:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if self._key and not (kind == "Bearer" and hmac.compare_digest(given.encode("latin-1"), self._key.encode())):
            raise ApiError(
                401, "missing or wrong API key: send the header Authorization: Bearer KEY", None, "invalid_api_key"
            )

    def _refuse(self, request: Request, error: ApiError) -> Response:
        _log.info("%s %d %s", request.url.path, error.status, error.message)
        return JSONResponse(error.body(), error.status, error.headers)


def chat_ids(engine: Engine, messages: list[dict[str, str]], variables: Mapping[str, Any]) -> list[int]:
    """Token ids of a conversation; for a single message of the user those of `Model.encode`.

    Args:
      engine: the engine, whose model has the template.
      messages: role and content of each.
      variables: values of the template's variables.

    Raises:
      UserError: the template refuses the conversation.
    """
    template = own_template(engine.model.tokenizer)
    try:
        return engine.model.encode_messages(messages, with_variables(template, variables) if template else None)
    except Exception as error:  # templates raise what they like, such as that roles must alternate
        raise UserError(f"the model's chat template refuses these messages: {error}") from None


async def _left(request: Request) -> None:
    """Return once the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _busy(message: str) -> ApiError:
    return ApiError(429, message, None, "queue_full", {"retry-after": "1"})


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Answer unknown paths and HTTP methods."""
    known = {404: f"no such path: {request.url.path}", 405: f"{request.method} is not for {request.url.path}"}
    told = ApiError(error.status_code, known.get(error.status_code, error.detail))
    return JSONResponse(told.body(), error.status_code, error.headers)
