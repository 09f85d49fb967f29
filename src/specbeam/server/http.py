"""How answers leave: as JSON, as frames (server-sent events), and errors as the client of each path reads them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specbeam.server.errors import Refusal, failed
from specbeam.server.request_log import RequestLog

logger = logging.getLogger("specbeam.server")
T = TypeVar("T")
ANTHROPIC_PATHS, OLLAMA_PATHS = "/v1/messages", "/api/"
"""Clients of paths with these prefixes expect errors in the shapes of Anthropic and ollama."""
RETRY_AFTER_SECONDS = 1

to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A value as an answer. A lone surrogate, which UTF-8 cannot encode, becomes a question mark."""
    return Response(to_json(value).encode(errors="replace"), status, headers, "application/json")


def frame(data: str, event: str | None = None) -> bytes:
    """A server-sent event. A lone surrogate becomes a question mark."""
    head = "" if event is None else f"event: {event}\n"
    return f"{head}data: {data}\n\n".encode(errors="replace")


def error_body(refusal: Refusal, path: str) -> dict[str, Any]:
    if path.startswith(OLLAMA_PATHS):
        return {"error": refusal.message}
    return {"type": "error", **refusal.body} if path.startswith(ANTHROPIC_PATHS) else refusal.body


def error_response(refusal: Refusal, path: str) -> Response:
    headers = {"retry-after": str(RETRY_AFTER_SECONDS)} if refusal.status in (429, 503) else {}
    if refusal.status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(error_body(refusal, path), refusal.status, headers)


def error_frame(error: Exception, path: str) -> bytes:
    """An error as the last frame of a stream."""
    data = json.dumps(error_body(error if isinstance(error, Refusal) else failed(), path))
    if path.startswith(OLLAMA_PATHS):
        return f"{data}\n".encode()
    return frame(data, "error" if path.startswith(ANTHROPIC_PATHS) else None)


class Cancellable(Protocol):
    def cancel(self) -> object: ...


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


async def while_connected(receive: Receive, work: Awaitable[T], call: Cancellable | None = None) -> T:
    """The outcome of work. If the client goes away meanwhile, the work and the call are cancelled.

    Raises:
        ClientGone: it went away.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
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


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":  # the body was read before
        pass


class EventStream(Response):
    """Sends frames as they are made. However it ends, the call is cancelled then."""

    def __init__(self, frames: AsyncIterator[bytes], call: Cancellable, media_type: str = "text/event-stream") -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type=media_type)
        del self.headers["content-length"]
        self._frames = frames
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send, scope), self._call)
        except ClientGone:
            RequestLog.of(scope).outcome = "cancelled"
        finally:
            self._call.cancel()

    async def _send(self, send: Send, scope: Scope) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for frames in self._frames:
                await send({"type": "http.response.body", "body": frames, "more_body": True})
        except Exception as error:
            if not isinstance(error, Refusal) or error.status >= 500:
                logger.exception("the stream of request %s failed", RequestLog.of(scope).id)
            await send({"type": "http.response.body", "body": error_frame(error, scope["path"]), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
