"""The work before and after each request: keys, hosts, the size of the body, ids, the log, and the counts."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specbeam.server.bodies import Bodies, Body
from specbeam.server.errors import Refusal, stopping
from specbeam.server.limits import AUDIO_PATHS, LOOPBACK_ADDRESSES, Access, Limits
from specbeam.server.metrics import Metrics, Tally
from specbeam.server.notes import KEY, Notes
from specbeam.server.page import is_page
from specbeam.server.streams import ClientGone

logger = logging.getLogger("specbeam.server")
MAX_BEGINNING = 8
"""Requests that are parsed and submitted at once. Others wait here, so that a crowd does not hold up /health."""
REQUEST_ID = "x-request-id"
"""The header with a request's id. OpenAI's clients show it as ``_request_id``."""
VALID_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
"""The ids that clients or proxies may give. Other ones could damage the log, and are replaced."""
MAX_SHOWN_PATH = 200
"""The log shows this many characters of a path."""
HOST = re.compile(r"([\w.-]+|\[[0-9a-f:.]+\])(?::(\d{1,5}))?", re.ASCII | re.IGNORECASE)
"""A host, and a port if there is one. Anything more, such as the name of a user, is refused."""
ANNOUNCED_BYTES = "specbeam_announced_bytes"
"""The key of a request's scope with the size that its body will have at least, if it comes in chunks."""
OUTCOMES = {401: "denied", 403: "denied", 429: "queue_full", 503: "stopping"}


class Guard:
    """Checks each request, and logs and counts it when it has ended.

    A request that has notes was checked by the guard of another process (:mod:`specbeam.server.replicas`).
    """

    def __init__(self, app: ASGIApp, limits: Limits, access: Access, metrics: Metrics) -> None:
        self._app = app
        self._limits = limits
        self._access = access
        self._metrics = metrics
        self._bodies = Bodies(max(limits.max_bodies_bytes, limits.max_body_bytes, limits.max_audio_bytes))
        self._turns = asyncio.Semaphore(MAX_BEGINNING)
        self._hosts = {"localhost", *LOOPBACK_ADDRESSES, *access.allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or KEY in scope:
            await self._app(scope, receive, send)
            return
        begin = time.monotonic()
        given = Headers(scope=scope).get(REQUEST_ID, "")
        notes = scope[KEY] = Notes(given if VALID_ID.fullmatch(given) else uuid.uuid4().hex)

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                notes.status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = notes.id
            await send(message)

        def check_size(num_bytes: int) -> None:
            self._check_size(scope, max(num_bytes, scope.get(ANNOUNCED_BYTES, 0)))

        try:
            with Body(self._bodies) as body:
                try:
                    self._check(scope)
                    if scope["method"] == "POST":
                        receive = await body.whole(receive, check_size)
                        await self._turns.acquire()
                        notes.turn.callback(self._turns.release)
                except Refusal as refusal:
                    await refusal.response_at(scope["path"])(scope, receive, noting)
                except ClientGone:
                    notes.outcome = "cancelled"
                else:
                    await self._app(scope, receive, noting)
        finally:
            notes.turn.close()
            self._note(scope, notes, time.monotonic() - begin)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 and (hosts or scope["http_version"] != "1.0"):
            raise Refusal(f"the request has {len(hosts)} headers Host: send one", None, "invalid_host")
        if len(origins) > 1:
            raise Refusal(f"the request has {len(origins)} headers Origin: send one", None, "invalid_origin")
        given = "".join(hosts)
        if given and _hostname(given) is None:
            shown = given[:MAX_SHOWN_PATH]
            raise Refusal(f"the host {shown!r} is not of the form NAME or NAME:PORT: send that", None, "invalid_host")
        checks_names = self._access.is_local or self._access.allowed_hosts
        if checks_names and (host := _hostname(given)) not in self._hosts:
            named = "without a host" if host is None else f"to the host {host!r}"
            raise Refusal(
                f"this server does not answer requests {named}: if that is one of its names, start it with "
                "--allowed-host",
                None,
                "host_not_allowed",
                403,
            )
        if is_page(scope["path"]):
            return
        if checks_names and not all(map(self._allows, origins)):
            raise Refusal(
                f"this server does not answer pages of {origins[0]!r}: start it with --allowed-host if clients reach "
                "it under that name, or with --cors-origin for another site",
                None,
                "origin_not_allowed",
                403,
            )
        if scope["path"] == "/health":  # needs no API key
            return
        if self._access.api_keys:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            given = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")  # Anthropic's header
            key = given.encode("latin-1")
            if not any(hmac.compare_digest(key, one.encode()) for one in self._access.api_keys):
                raise Refusal(
                    "the API key is wrong or missing: send Authorization: Bearer KEY", None, "invalid_api_key", 401
                )
        if scope["app"].state.is_stopping and scope["method"] == "POST":
            raise stopping()
        if scope["path"] in AUDIO_PATHS and scope["method"] == "POST" and not scope["app"].state.models.read_sound:
            raise Refusal("no model of this server transcribes audio: start it with a Whisper model", "model")
        encoding = ", ".join(headers.getlist("content-encoding")) or "identity"
        if encoding.lower() != "identity":
            raise Refusal(
                f"the body has the Content-Encoding {encoding!r}, and this server reads no encoded bodies: send it "
                "as it is, without this header",
                None,
                "unsupported_content_encoding",
                415,
            )
        length = headers.get("content-length", "0")
        if length.isdecimal():
            self._check_size(scope, int(length[:20]))

    def _allows(self, origin: str) -> bool:
        _, _, host = origin.partition("://")
        return bool({origin, "*"} & {*self._access.cors_origins}) or _hostname(host) in self._hosts

    def _check_size(self, scope: Scope, num_bytes: int) -> None:
        has_sound = scope["path"] in AUDIO_PATHS
        limit = self._limits.max_audio_bytes if has_sound else self._limits.max_body_bytes
        if num_bytes > limit:
            raise Refusal(f"the body is larger than this server's limit of {limit} bytes", None, "body_too_large", 413)

    def _note(self, scope: Scope, notes: Notes, seconds: float) -> None:
        status = notes.status
        outcome = notes.outcome or OUTCOMES.get(status)
        if outcome is None:
            outcome = "finished" if status < 400 else "refused" if status < 500 else "failed"

        def log(later_tokens: int = 0) -> None:
            """Write the line. ``later_tokens`` are of texts that ended after their client had gone."""
            line = f"{scope['method']} {_path(scope)} {status} {outcome} {seconds:.3f} s"
            line += f" client={_client(scope)} id={notes.id}"
            if (tally := notes.tally) is not None:
                line += f" model={tally.model} prompt_tokens={tally.prompt_tokens}"
                line += f" new_tokens={tally.new_tokens + later_tokens}"
            if notes.prompts is not None:
                line += f" prompts={notes.prompts!r}"
            logger.info(line)

        def end(later: Tally) -> None:
            self._metrics.add(later)
            log(later.new_tokens)

        is_over = notes.settle(scope, end)
        self._metrics.count(notes.endpoint, outcome, notes.tally)
        if is_over:
            log()


def _path(scope: Scope) -> str:
    """The path as the client wrote it: with a line break as %0A, so that it stays one line of the log."""
    raw: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    return raw.decode("ascii", "backslashreplace")[:MAX_SHOWN_PATH]


def _client(scope: Scope) -> str:
    """The client's address. Behind a trusted proxy it is a text of the proxy."""
    host = (scope.get("client") or ("unknown",))[0]
    return re.sub(r"[^\w.:%-]", "?", host, flags=re.ASCII)[:64]


def _hostname(host: str) -> str | None:
    """The name in a host with or without a port; None if it is damaged."""
    found = HOST.fullmatch(host)
    return None if found is None or int(found[2] or 0) >= 2**16 else found[1].strip("[]").lower()
