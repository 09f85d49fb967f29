"""The server process: its socket, and its signals."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette

from specbeam.errors import SpecbeamError
from specbeam.server.connection import CONNECTION_SECONDS, Connection
from specbeam.server.limits import LOOPBACK_ADDRESSES

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
        raise _cannot_listen(host, port, error) from error
    return bound


def accept(bound: socket.socket) -> None:
    """Let clients connect.

    Raises:
        SpecbeamError: another server has begun to listen there since the socket was bound. uvloop would not say so.
    """
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        host, port, *_ = bound.getsockname()
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: Exception) -> SpecbeamError:
    says = getattr(error, "strerror", None) or str(error)
    return SpecbeamError(f"cannot listen on {host} port {port}: {says}. Give another --host or --port")


class Server(uvicorn.Server):
    """Serves an application until a signal. Then it refuses new requests, and finishes the others.

    Args:
        app: made by :func:`specbeam.server.app.make_app` or :func:`specbeam.server.replicas.make_front`.
        grace: seconds after which the requests that are left end with the text so far.
        when_ready: called in a thread, once clients can connect.
        trusted_proxies: as in :class:`specbeam.server.limits.Access`.
    """

    def __init__(
        self,
        app: Starlette,
        grace: float | None = None,
        when_ready: Callable[[], object] | None = None,
        trusted_proxies: Sequence[str] = LOOPBACK_ADDRESSES,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=True,
                forwarded_allow_ips=[*trusted_proxies],
                timeout_keep_alive=int(CONNECTION_SECONDS),
                timeout_graceful_shutdown=int(LAST_SECONDS),
                backlog=BACKLOG,
            )
        )
        self._app = app
        self._grace = grace
        self._when_ready = when_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self._when_ready is not None:
            self._loop.run_in_executor(None, self._when_ready)

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
        self._app.state.is_stopping = True
        await self._app.state.models.stop(grace)
        self.should_exit = True
