"""The server process: its socket, and its signals."""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from specbeam.errors import SpecbeamError
from specbeam.server.errors import Refusal
from specbeam.server.guard import REQUEST_ID
from specbeam.server.limits import LOOPBACK_ADDRESSES

logger = logging.getLogger("specbeam.server")
UVICORN_SAYS = "Invalid HTTP request received."
CONNECTION_SECONDS = 75.0
"""An idle connection is closed after this time. It is longer than clients and proxies keep theirs.

So is a connection whose client sends no whole request, or takes nothing of its answer, for this time.
"""
MAX_HEAD_BYTES = 1 << 16
"""The request line and the headers of a request take at most about this."""
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


class Connection(HttpToolsProtocol):
    """A connection that ends if its client holds it for too long. uvicorn has no limits for that.

    A body that comes slowly gets an answer first (``MAX_BODY_SECONDS``).
    """

    _end: asyncio.TimerHandle | None = None
    _head_bytes: int | None = 0
    """Of the request that is being read. None once its head is there."""
    _answering: RequestResponseCycle | None = None
    """The request that is being answered. Further ones may have come (``pipeline``), and ``cycle`` is the last one."""

    def _wait(self) -> None:
        """Give the client the time to do its part."""
        self._go_on()
        self._end = self.loop.call_later(CONNECTION_SECONDS, self.transport.abort)

    def _go_on(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._go_on()
        if self._answering is not None:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_bytes is not None and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response(f"the head of the request is too large: send at most {MAX_HEAD_BYTES} bytes")

    def send_400_response(self, msg: str) -> None:
        """Answer a request that cannot be read, as all other errors are answered."""
        if msg == UVICORN_SAYS:
            msg = "the request is not valid HTTP: send HTTP/1.1 without TLS"
        request_id = uuid.uuid4().hex
        logger.info(f"malformed request 400 refused client={(self.client or ('unknown',))[0]} id={request_id}: {msg}")
        response = Refusal(msg).response
        response.headers.update({REQUEST_ID: request_id, "connection": "close"})
        head = [b"%s: %s\r\n" % header for header in response.raw_headers]
        self.transport.write(b"".join([STATUS_LINE[400], *head, b"\r\n", bytes(response.body)]))
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        self._wait()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._head_bytes = None
        if not self.pipeline:
            self._answering = self.cycle
        if self.scope["http_version"] == "1.0":
            self.cycle.send = partial(_send_unchunked, self.cycle)  # type: ignore[method-assign]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._go_on()

    def on_response_complete(self) -> None:
        self._answering = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._go_on()


async def _send_unchunked(cycle: RequestResponseCycle, message: Any) -> None:
    """Send a part of an answer in HTTP/1.0, which has no chunks: the end of the connection ends the answer."""
    cycle.chunked_encoding = False
    cycle.expected_content_length = len(message.get("body", b""))
    await RequestResponseCycle.send(cycle, message)


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
