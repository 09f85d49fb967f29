"""A client's connection: the bytes of requests, and limits on their size and time that uvicorn does not have."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from dataclasses import dataclass
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from specbeam.server.errors import Refusal
from specbeam.server.guard import ANNOUNCED_BYTES, REQUEST_ID

logger = logging.getLogger("specbeam.server")
UVICORN_SAYS = "Invalid HTTP request received."
CONNECTION_SECONDS = 75.0
"""An idle connection is closed after this time. It is longer than clients and proxies keep theirs.

So is a connection whose client sends no whole request, or takes nothing of its answer, for this time.
"""
MAX_HEAD_BYTES = 1 << 16
"""All of a request but its body takes at most this: the request line, the headers, and what is around chunks."""
CHUNK_FRAMING_BYTES = 16
"""Each chunk of a body may have these bytes beside its data: its size as digits, and line breaks."""
MAX_PIECE_BYTES = 1 << 14
"""Bytes are parsed in pieces of this size, since the parser does not say where in a piece a request begins."""
ABSOLUTE_TARGET = re.compile(rb"[a-z][a-z0-9+.-]*://([^/?#]*)", re.IGNORECASE)
"""A target such as http://host/path. Its host counts in place of the header Host (RFC 9112, section 3.2.2)."""
CHUNK_SIZE = re.compile(rb"[0-9a-f]+", re.IGNORECASE)


@dataclass
class Incoming:
    """What has come of a request.

    Attributes:
        in_head: its head is not whole yet.
        is_chunked: its body comes in chunks, and its head does not say how large it is.
        framing_bytes: what is not the body: the head, trailers, and what chunks have beside their data, without
            CHUNK_FRAMING_BYTES for each.
        body_bytes, num_chunks: so far.
        in_chunk: the data of a chunk is coming.
        chunk_bytes: of the last chunk's data, so far.
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
    """A connection with limits: it ends if its client is too slow, or sends too many bytes outside of a body.

    A body that comes slowly gets an answer first (``MAX_BODY_SECONDS``). So does one that is too large.
    """

    _answering: RequestResponseCycle | None = None
    """The request that is being answered. Further ones may have come (``pipeline``), and ``cycle`` is the last one."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._incoming = Incoming()
        self._unparsed = b""
        self._ends: dict[str, asyncio.TimerHandle] = {}
        self._await("request")

    def _await(self, what: str) -> None:
        """Give the client the time to do its part: send the rest of a "request", or make "room" for an answer."""
        self._came(what)
        self._ends[what] = self.loop.call_later(CONNECTION_SECONDS, self.transport.abort)

    def _came(self, what: str) -> None:
        if (end := self._ends.pop(what, None)) is not None:
            end.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        for what in [*self._ends]:
            self._came(what)
        if self._answering is not None:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        self._parse()

    def _parse(self) -> None:
        """Parse what has come. While requests wait for the answer to an earlier one, no further ones are read."""
        while self._unparsed and not self.pipeline and not self.transport.is_closing():
            size = MAX_PIECE_BYTES
            if self._incoming.in_head:  # no head that is too large becomes whole
                size = min(size, MAX_HEAD_BYTES - self._incoming.framing_bytes)
            piece, self._unparsed = self._unparsed[:size], self._unparsed[size:]
            self._parse_piece(piece)
        if self._unparsed:
            self.flow.pause_reading()

    def _parse_piece(self, piece: bytes) -> None:
        coming = self._incoming
        body_bytes, num_chunks = coming.body_bytes, coming.num_chunks
        super().data_received(piece)
        chunks = self._incoming.num_chunks
        if coming is self._incoming:  # else the next request begins within this piece, nobody knows where
            chunks -= num_chunks
            beside = len(piece) - (coming.body_bytes - body_bytes) - CHUNK_FRAMING_BYTES * chunks
            coming.framing_bytes = max(0, coming.framing_bytes + beside)
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
        """Tell the guard how large the body will be with the chunk that is coming. The parser does not say that."""
        coming = self._incoming
        if not coming.is_chunked:
            return
        text = coming.line + piece
        coming.line = b"" if coming.in_chunk else text[text.rfind(b"\n") + 1 :]
        if coming.in_chunk and has_begun:
            lines = text[: len(text) - coming.chunk_bytes].rstrip()
            if size := CHUNK_SIZE.match(lines, lines.rfind(b"\n") + 1):
                before = coming.body_bytes - coming.chunk_bytes
                self.scope[ANNOUNCED_BYTES] = before + int(size[0], 16)  # type: ignore[literal-required]
                self.cycle.message_event.set()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that cannot be read, as all other errors are answered."""
        if msg == UVICORN_SAYS:
            msg = "the request is not valid HTTP: send HTTP/1.1 without TLS"
        request_id = uuid.uuid4().hex
        logger.info(f"malformed request 400 refused client={(self.client or ('unknown',))[0]} id={request_id}: {msg}")
        response = Refusal(msg).response_at("")
        response.headers.update({REQUEST_ID: request_id, "connection": "close"})
        head = [b"%s: %s\r\n" % header for header in response.raw_headers]
        self.transport.write(b"".join([STATUS_LINE[400], *head, b"\r\n", bytes(response.body)]))
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await("request")

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
        self._came("request")

    def on_response_complete(self) -> None:
        self._answering = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        self._parse()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await("room")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._came("room")


async def _send_unchunked(cycle: RequestResponseCycle, message: Any) -> None:
    """Send a part of an answer in HTTP/1.0, which has no chunks: the end of the connection ends the answer."""
    cycle.chunked_encoding = False
    cycle.expected_content_length = len(message.get("body", b""))
    await RequestResponseCycle.send(cycle, message)
