"""The work before and after each request: keys, hosts, the size of the body, the log, and the counts."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specbeam.server.errors import Refusal, stopping
from specbeam.server.limits import Access, Limits
from specbeam.server.metrics import Metrics, Tally
from specbeam.server.page import is_page
from specbeam.server.streams import ClientGone

logger = logging.getLogger("specbeam.server")
LOOPBACK = ("localhost", "127.0.0.1", "::1")
OPEN_PATHS = ("/health",)
"""Paths that need no API key."""
MAX_BODY_SECONDS = 60.0
"""A client has this time to send its body."""
MAX_BEGINNING = 8
"""Requests that are parsed and submitted at once. Others wait here, so that a crowd does not hold up /health."""
OUTCOMES = {401: "denied", 403: "denied", 429: "queue_full", 503: "stopping"}


class Guard:
    """Checks each request, and logs and counts it when it has ended.

    A request that has notes was checked by the guard of another process (:mod:`specbeam.server.replicas`).
    """

    def __init__(self, app: ASGIApp, limits: Limits, access: Access, metrics: Metrics, life: Life) -> None:
        self._app = app
        self._limits = limits
        self._access = access
        self._metrics = metrics
        self._life = life
        self._turns = asyncio.Semaphore(MAX_BEGINNING)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or "specbeam" in scope:
            await self._app(scope, receive, send)
            return
        begin = time.monotonic()
        notes: dict[str, Any] = {"status": 500}
        scope["specbeam"] = notes

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                notes["status"] = message["status"]
            await send(message)

        turn = notes["turn"] = ExitStack()
        try:
            try:
                self._check(scope)
                if scope["method"] == "POST":
                    receive = _first(await self._body(receive), receive)
                    await self._turns.acquire()
                    turn.callback(self._turns.release)
            except Refusal as refusal:
                await refusal.response(scope, receive, noting)
            except ClientGone:
                notes["outcome"] = "cancelled"
            else:
                await self._app(scope, receive, noting)
        finally:
            turn.close()
            self._note(scope, notes, time.monotonic() - begin)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._access.is_local:
            if _hostname(f"//{headers.get('host', '')}") not in LOOPBACK:
                raise Refusal("this server answers requests to localhost only", None, "host_not_allowed", 403)
            origin = headers.get("origin")
            if origin is not None and not self._allows(origin):
                raise Refusal("this server answers no pages of other sites", None, "origin_not_allowed", 403)
        if scope["path"] in OPEN_PATHS or is_page(scope["path"]):
            return
        if (key := self._access.api_key) is not None:
            given = headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), key.encode()):
                raise Refusal(
                    "the API key is wrong or missing: send Authorization: Bearer KEY", None, "invalid_api_key", 401
                )
        if self._life.is_stopping and scope["method"] == "POST":
            raise stopping()
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._limits.max_body_bytes:
            raise Refusal(self._too_large, None, "body_too_large", 413)

    def _allows(self, origin: str) -> bool:
        return origin in self._access.cors_origins or "*" in self._access.cors_origins or _hostname(origin) in LOOPBACK

    @property
    def _too_large(self) -> str:
        return f"the body is larger than this server's limit of {self._limits.max_body_bytes} bytes"

    async def _body(self, receive: Receive) -> Message:
        """The whole body of a request.

        Raises:
            Refusal: it is too large or too slow.
            ClientGone: the client went away before its end.
        """
        body, is_whole = bytearray(), False
        deadline = time.monotonic() + MAX_BODY_SECONDS
        while not is_whole:
            try:
                message = await asyncio.wait_for(receive(), deadline - time.monotonic())
            except TimeoutError:
                problem = f"the body did not come within {MAX_BODY_SECONDS:.0f} seconds"
                raise Refusal(problem, None, "body_too_slow", 408) from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            body += message.get("body", b"")
            is_whole = not message.get("more_body", False)
            if len(body) > self._limits.max_body_bytes:
                raise Refusal(self._too_large, None, "body_too_large", 413)
        return {"type": "http.request", "body": bytes(body)}

    def _note(self, scope: Scope, notes: dict[str, Any], seconds: float) -> None:
        status = notes["status"]
        outcome = notes.get("outcome") or OUTCOMES.get(status)
        if outcome is None:
            outcome = "finished" if status < 400 else "refused" if status < 500 else "failed"
        settle(scope, self._metrics.add)
        endpoint, tally = notes["endpoint"], notes.get("tally")
        self._metrics.count(endpoint, outcome, tally)
        line = f"{scope['method']} {endpoint} {status} {outcome} {seconds:.3f} s"
        if tally is not None:
            line += f" model={tally.model} prompt_tokens={tally.prompt_tokens} new_tokens={tally.new_tokens}"
        if notes.get("prompts") is not None:
            line += f" prompts={notes['prompts']!r}"
        logger.info(line)


def settle(scope: Scope, take_later: Callable[[Tally], object]) -> dict[str, Any]:
    """The notes of a request that has ended, as plain data, which another process can read.

    Args:
        take_later: is given what is not in the tally of the notes. If the client went away, requests to the engine are
            left, and end later.
    """
    notes: dict[str, Any] = scope["specbeam"]
    if "endpoint" not in notes:
        notes["endpoint"] = getattr(scope.get("route"), "path", "other")
    if (call := notes.pop("call", None)) is not None:
        left = [request for request in call.requests if request.outcome is None]
        notes["tally"] = Tally.of(call, left)
        Tally.later(call, left, take_later)
    return notes


class Life:
    """Whether the server takes new requests.

    Attributes:
        is_stopping: no new requests are taken.
    """

    def __init__(self) -> None:
        self.is_stopping = False


def _first(message: Message, receive: Receive) -> Receive:
    """Receives a message that has come, and then the next ones."""
    messages = [message]

    async def first() -> Message:
        return messages.pop() if messages else await receive()

    return first


def _hostname(url: str) -> str | None:
    """The host that a URL names; None if it is damaged."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
