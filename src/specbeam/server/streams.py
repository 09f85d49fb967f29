"""Streams of frames (server-sent events), and clients that go away."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable
from typing import Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specbeam.server.errors import ANTHROPIC_PATHS, OLLAMA_PATHS, Refusal, failed
from specbeam.server.notes import Notes

logger = logging.getLogger("specbeam.server")
T = TypeVar("T")


class Cancellable(Protocol):
    """A call, which ends when its client goes away."""

    def cancel(self) -> object: ...


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


async def gone(receive: Receive) -> None:
    """Wait until the client closes the connection. The body of its request was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Awaitable[T], call: Cancellable | None = None) -> T:
    """The outcome of work. If the client goes away meanwhile, the work and the call are cancelled.

    Raises:
        ClientGone: it went away.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    except BaseException:
        if call is not None:
            call.cancel()
        raise
    finally:
        leaving.cancel()
        working.cancel()


class EventStream(Response):
    """Sends frames as they are made. When it ends, for whatever reason, the call is over."""

    def __init__(self, frames: AsyncIterator[bytes], call: Cancellable, media_type: str = "text/event-stream") -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type=media_type)
        del self.headers["content-length"]
        self._frames = frames
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send, scope), self._call)
        except ClientGone:
            Notes.of(scope).outcome = "cancelled"
        finally:
            self._call.cancel()

    async def _send(self, send: Send, scope: Scope) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for one in self._frames:
                await send({"type": "http.response.body", "body": one, "more_body": True})
        except Exception as error:
            if not isinstance(error, Refusal) or error.status >= 500:
                logger.exception("the stream of request %s failed", Notes.of(scope).id)
            await send({"type": "http.response.body", "body": error_frame(error, scope["path"]), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def frame(data: str, event: str | None = None) -> bytes:
    """A frame with data, and the name of its event if it has one. Half a surrogate pair becomes a question mark."""
    head = "" if event is None else f"event: {event}\n"
    return f"{head}data: {data}\n\n".encode(errors="replace")


def error_frame(error: Exception, path: str) -> bytes:
    """An error as the last frame of a stream, as the clients of a path read it."""
    data = json.dumps((error if isinstance(error, Refusal) else failed()).body_at(path))
    if path.startswith(OLLAMA_PATHS):
        return f"{data}\n".encode()
    return frame(data, "error" if path.startswith(ANTHROPIC_PATHS) else None)
