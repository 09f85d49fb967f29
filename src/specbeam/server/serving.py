"""The server process: its socket, its signals, and connections with limits that uvicorn does not have."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from specbeam.errors import SpecbeamError
from specbeam.server.errors import Refusal
from specbeam.server.http import error_response
from specbeam.server.limits import LOOPBACK_ADDRESSES
from specbeam.server.middleware import ANNOUNCED_BYTES, REQUEST_ID

logger = logging.getLogger("specbeam.server")
UVICORN_SAYS = "Invalid HTTP request received."
CONNECTION_SECONDS = 75.0
"""An idle connection is closed after this time, which is longer than clients and proxies keep theirs.

So is a connection whose client neither completes its request nor takes anything of its answer for this time.
"""
MAX_HEAD_BYTES = 1 << 16
"""All of a request but its body takes at most this: the request line, the headers, and what is around chunks."""
CHUNK_FRAMING_BYTES = 16
"""Each chunk of a body may have these bytes beside its data: its size as digits, and line breaks."""
MAX_PIECE_BYTES = 1 << 14
"""Bytes are parsed in pieces, since the parser does not say where in them a request begins."""
ABSOLUTE_TARGET = re.compile(rb"[a-z][a-z0-9+.-]*://([^/?#]*)", re.IGNORECASE)
"""A target such as http://host/path. Its host counts in place of the header Host (RFC 9112, section 3.2.2)."""
CHUNK_SIZE = re.compile(rb"[0-9a-f]+", re.IGNORECASE)
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
    """Serves an application until a signal, then refuses new requests and finishes the others.

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


@dataclass
class Incoming:
    """The part of a request that has come.

    Attributes:
        in_head: its head is incomplete.
        framing_bytes: all but the body: the head, trailers, and what chunks have beside their data, without
            CHUNK_FRAMING_BYTES for each.
        in_chunk: the data of a chunk is incomplete.
        chunk_bytes: of the last chunk's data.
        line: the beginning of a line that may say how large the next chunk is.
    """

    in_head: bool = True
    is_chunked: bool = False
    framing_bytes: int = 0
    body_bytes: int = 0
    num_chunks: int = 0
    in_chunk: bool = False
    chunk_bytes: int = 0
    line: bytes = b""


class Connection(HttpToolsProtocol):
    """A connection that ends if its client is too slow, or sends too many bytes outside of a body.

    Clients whose body is too slow or too large get an answer first (:mod:`specbeam.server.middleware`).
    """

    _answering: RequestResponseCycle | None = None
    """The request that is being answered. Further ones may have come (``pipeline``), and ``cycle`` is the last one."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._incoming = Incoming()
        self._unparsed = b""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._start_timer("send")

    def _start_timer(self, action: Literal["send", "take"]) -> None:
        """Limit the time in which the client must send the rest of its request, or take some of its answer."""
        self._stop_timer(action)
        self._timers[action] = self.loop.call_later(CONNECTION_SECONDS, self.transport.abort)

    def _stop_timer(self, action: str) -> None:
        if (timer := self._timers.pop(action, None)) is not None:
            timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        for action in [*self._timers]:
            self._stop_timer(action)
        if self._answering is not None:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        self._parse()

    def _parse(self) -> None:
        """Parse the bytes so far. While requests wait for the answer to an earlier one, no further ones are read."""
        while self._unparsed and not self.pipeline and not self.transport.is_closing():
            size = MAX_PIECE_BYTES
            if self._incoming.in_head:  # no head that is too large is completed
                size = min(size, MAX_HEAD_BYTES - self._incoming.framing_bytes)
            piece, self._unparsed = self._unparsed[:size], self._unparsed[size:]
            self._parse_piece(piece)
        if self._unparsed:
            self.flow.pause_reading()

    def _parse_piece(self, piece: bytes) -> None:
        incoming = self._incoming
        body_bytes, num_chunks = incoming.body_bytes, incoming.num_chunks
        super().data_received(piece)
        chunks = self._incoming.num_chunks
        if incoming is self._incoming:  # else the next request begins at an unknown offset in this piece
            chunks -= num_chunks
            beside = len(piece) - (incoming.body_bytes - body_bytes) - CHUNK_FRAMING_BYTES * chunks
            incoming.framing_bytes = max(0, incoming.framing_bytes + beside)
        if not self.transport.is_closing():
            self._limit_framing()
            self._announce_chunk(piece, chunks > 0)

    def _limit_framing(self) -> None:
        framing_bytes = self._incoming.framing_bytes
        if self._incoming.in_head and framing_bytes >= MAX_HEAD_BYTES:
            self.send_400_response(f"the head of the request is too large: send at most {MAX_HEAD_BYTES} bytes")
        elif framing_bytes > MAX_HEAD_BYTES:
            self.send_400_response(f"the body has more than {MAX_HEAD_BYTES} bytes around its chunks: send larger ones")

    def _announce_chunk(self, piece: bytes, has_begun: bool) -> None:
        """Tell the middleware how large the body will be with the next chunk. The parser does not say that."""
        incoming = self._incoming
        if not incoming.is_chunked:
            return
        text = incoming.line + piece
        incoming.line = b"" if incoming.in_chunk else text[text.rfind(b"\n") + 1 :]
        if incoming.in_chunk and has_begun:
            lines = text[: len(text) - incoming.chunk_bytes].rstrip()
            if size := CHUNK_SIZE.match(lines, lines.rfind(b"\n") + 1):
                before = incoming.body_bytes - incoming.chunk_bytes
                self.scope[ANNOUNCED_BYTES] = before + int(size[0], 16)  # type: ignore[literal-required]
                self.cycle.message_event.set()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not valid HTTP, in the shape of all other errors."""
        if msg == UVICORN_SAYS:
            msg = "the request is not valid HTTP: send HTTP/1.1 without TLS"
        request_id = uuid.uuid4().hex
        logger.info(f"malformed request 400 refused client={(self.client or ('unknown',))[0]} id={request_id}: {msg}")
        response = error_response(Refusal(msg), "")
        response.headers.update({REQUEST_ID: request_id, "connection": "close"})
        head = [b"%s: %s\r\n" % header for header in response.raw_headers]
        self.transport.write(b"".join([STATUS_LINE[400], *head, b"\r\n", bytes(response.body)]))
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_timer("send")

    def on_headers_complete(self) -> None:
        self._incoming.in_head = False
        self._incoming.is_chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        if absolute := ABSOLUTE_TARGET.match(self.url):
            self.headers[:] = [(name, absolute[1] if name == b"host" else value) for name, value in self.headers]
        super().on_headers_complete()
        if not self.pipeline:
            self._answering = self.cycle
        if self.scope["http_version"] == "1.0":
            self.cycle.send = partial(_send_unchunked, self.cycle)  # type: ignore[method-assign]

    def on_chunk_header(self) -> None:
        self._incoming.num_chunks += 1
        self._incoming.in_chunk, self._incoming.chunk_bytes = True, 0

    def on_body(self, body: bytes) -> None:
        self._incoming.body_bytes += len(body)
        self._incoming.chunk_bytes += len(body)
        super().on_body(body)

    def on_chunk_complete(self) -> None:
        self._incoming.in_chunk = False

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._incoming = Incoming()
        self._stop_timer("send")

    def on_response_complete(self) -> None:
        self._answering = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        self._parse()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_timer("take")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timer("take")


async def _send_unchunked(cycle: RequestResponseCycle, message: Any) -> None:
    """Send a part of an answer in HTTP/1.0, which has no chunks: the end of the connection ends the answer."""
    cycle.chunked_encoding = False
    cycle.expected_content_length = len(message.get("body", b""))
    await RequestResponseCycle.send(cycle, message)
