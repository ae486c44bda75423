"""A recorder around the server's application: what each client sent, and what it was answered."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclasses.dataclass
class Exchange:
    """A request and its response.

    Attributes:
      method: such as POST.
      path: without the query.
      body: what was sent.
      status: of the response.
      answer: body of the response.
    """

    method: str
    path: str
    body: bytes = b""
    status: int = 0
    answer: bytes = b""

    @property
    def fields(self) -> dict[str, Any]:
        """The body's JSON object."""
        return json.loads(self.body)

    @property
    def texts(self) -> list[str]:
        """The text of each choice, joined from the events of a stream."""
        if not self.answer.startswith(b"data:"):
            return [_text(choice, "message") for choice in json.loads(self.answer)["choices"]]
        lines = [line.removeprefix("data: ") for line in self.answer.decode().splitlines() if line.startswith("data: ")]
        texts: dict[int, str] = {}
        for event in (json.loads(line) for line in lines if line != "[DONE]"):
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + _text(choice, "delta")
        return [texts[index] for index in sorted(texts)]


def _text(choice: dict[str, Any], part: str) -> str:
    return choice["text"] if part not in choice else choice[part].get("content") or ""


class Recorder:
    """The application, and the exchanges that it has had."""

    def __init__(self, app: ASGIApp):
        self._app = app
        self.exchanges: list[Exchange] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request as the application does."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        exchange = Exchange(scope["method"], scope["path"])
        self.exchanges.append(exchange)

        async def received() -> Message:
            message = await receive()
            exchange.body += message.get("body", b"")
            return message

        async def sent(message: Message) -> None:
            exchange.status = message.get("status", exchange.status)
            exchange.answer += message.get("body", b"")
            await send(message)

        await self._app(scope, received, sent)
