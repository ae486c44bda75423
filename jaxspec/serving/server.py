"""The server process: it binds its address at the start, and ends cleanly at SIGTERM."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from jaxspec.errors import UserError
from jaxspec.progress import say


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address, to which nobody can connect before it is served; port 0 takes a free one.

    Raises:
      UserError: the address is invalid or in use.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot listen at {host}:{port} ({reason}); choose another --host or --port") from None
    return sock


class Server(uvicorn.Server):
    """The server of uvicorn, which says when it is ready and how it ends.

    Args:
      config: of uvicorn.
      ready: called once clients are admitted.
    """

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]):
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Admit clients."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Let running requests finish; at a second SIGINT end at once."""
        if sig == signal.SIGINT:
            if self.should_exit:  # a step on the device cannot be interrupted
                say("interrupted")
                os._exit(130)
            say("stopping once running requests are finished; Ctrl-C again ends at once")
        super().handle_exit(sig, frame)


def run(app: Starlette, sock: socket.socket, grace: float, ready: Callable[[], None]) -> None:
    """Answer until SIGTERM or SIGINT; a second SIGINT ends the process at once.

    Args:
      app: the application.
      sock: the socket of `bind`.
      grace: seconds that running requests have at the end.
      ready: called once clients are admitted.
    """

    patience = None if math.isinf(grace) else max(int(grace), 1)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=patience, ws="none")
    server = Server(config, ready)

    def end(*_: object) -> None:
        server.should_exit = True

    # Before the server has its own handlers, and once more when it has ended well: it raises the signal again.
    signal.signal(signal.SIGTERM, end)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[sock])
