"""The server process: its socket, and its signals."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn
from fastapi import FastAPI

from specbeam.errors import SpecbeamError

CONNECTION_SECONDS = 75.0
"""An idle connection is closed after this time. It is longer than clients and proxies keep theirs."""
LAST_SECONDS = 5.0
"""Clients have this time to take the last bytes, after the last text has ended."""
BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A socket for a server. Clients can connect only once the server serves.

    Raises:
        SpecbeamError: the address is in use, or belongs to another machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError, UnicodeError) as error:
        says = getattr(error, "strerror", None) or str(error)
        raise SpecbeamError(f"cannot listen on {host} port {port}: {says}. Give another --host or --port") from error
    return bound


class Server(uvicorn.Server):
    """Serves an application until a signal. Then it refuses new requests, and finishes the others.

    Args:
        app: made by :func:`specbeam.server.app.make_app`.
        grace: seconds after which the requests that are left end with the text so far.
    """

    def __init__(self, app: FastAPI, grace: float | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=int(CONNECTION_SECONDS),
                timeout_graceful_shutdown=int(LAST_SECONDS),
                backlog=BACKLOG,
            )
        )
        self._app = app
        self._grace = grace
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Take a signal: the first one begins to stop, and a second one ends all requests."""
        self.stop()

    def stop(self) -> None:
        """Begin to stop. May be called from any thread."""
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._begin_to_stop)

    def _begin_to_stop(self) -> None:
        grace = self._grace if self._stopping is None else 0
        self._stopping = asyncio.ensure_future(self._stop(grace))

    async def _stop(self, grace: float | None) -> None:
        self._app.state.life.is_stopping = True
        await self._app.state.models.stop(grace)
        self.should_exit = True
