"""The work before and after each request: keys, hosts, its body, ids, the log, and the counts."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable
from tempfile import SpooledTemporaryFile
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specbeam.server.errors import Refusal, stopping
from specbeam.server.http import ClientGone, error_response
from specbeam.server.limits import AUDIO_PATHS, LOOPBACK_ADDRESSES, Access, Limits
from specbeam.server.page import is_page
from specbeam.server.request_log import KEY, RequestLog
from specbeam.server.usage import Metrics, Tally

logger = logging.getLogger("specbeam.server")
MAX_BEGINNING = 8
"""Requests that are parsed and submitted at once. Others wait here, so that a crowd does not hold up /health."""
REQUEST_ID = "x-request-id"
"""The header with a request's id. OpenAI's clients show it as ``_request_id``."""
VALID_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
"""The ids that clients or proxies may give. Others could forge lines of the log, and are replaced."""
MAX_SHOWN_PATH = 200
"""The log shows this many characters of a path."""
HOST = re.compile(r"([\w.-]+|\[[0-9a-f:.]+\])(?::(\d{1,5}))?", re.ASCII | re.IGNORECASE)
"""Anything more than a host and a port, such as the name of a user, is refused."""
ANNOUNCED_BYTES = "specbeam_announced_bytes"
"""The key of a request's scope with the size that its body will have at least, if it comes in chunks."""
MAX_BODY_SECONDS = 60.0
"""A client has this time to send its body."""
MAX_BYTES_IN_MEMORY = 1 << 20
"""A larger body is in a file without a name."""
OUTCOMES = {401: "denied", 403: "denied", 429: "queue_full", 503: "stopping"}


class Middleware:
    """Checks each request, and logs and counts it when it has ended.

    A request with a log was checked by the front's middleware (:mod:`specbeam.server.replicas`).
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
        client_id = Headers(scope=scope).get(REQUEST_ID, "")
        log = scope[KEY] = RequestLog(client_id if VALID_ID.fullmatch(client_id) else uuid.uuid4().hex)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                log.status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = log.id
            await send(message)

        def check_size(num_bytes: int) -> None:
            self._check_size(scope, max(num_bytes, scope.get(ANNOUNCED_BYTES, 0)))

        try:
            with Body(self._bodies) as body:
                try:
                    self._check(scope)
                    if scope["method"] == "POST":
                        receive = await body.complete(receive, check_size)
                        await self._turns.acquire()
                        log.turn.callback(self._turns.release)
                except Refusal as refusal:
                    await error_response(refusal, scope["path"])(scope, receive, send_with_id)
                except ClientGone:
                    log.outcome = "cancelled"
                else:
                    await self._app(scope, receive, send_with_id)
        finally:
            log.turn.close()
            self._log(scope, log, time.monotonic() - begin)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        self._check_host(scope, headers)
        if is_page(scope["path"]):
            return
        self._check_origin(headers)
        if scope["path"] != "/health":
            self._check_key(headers)
            self._check_body(scope, headers)

    @property
    def _checks_names(self) -> bool:
        return bool(self._access.is_local or self._access.allowed_hosts)

    def _check_host(self, scope: Scope, headers: Headers) -> None:
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 and (hosts or scope["http_version"] != "1.0"):
            raise Refusal(f"the request has {len(hosts)} headers Host: send one", None, "invalid_host")
        if len(origins) > 1:
            raise Refusal(f"the request has {len(origins)} headers Origin: send one", None, "invalid_origin")
        header = "".join(hosts)
        host = _hostname(header)
        if header and host is None:
            shown = header[:MAX_SHOWN_PATH]
            raise Refusal(f"the host {shown!r} is not of the form NAME or NAME:PORT: send that", None, "invalid_host")
        if self._checks_names and host not in self._hosts:
            named = "without a host" if host is None else f"to the host {host!r}"
            raise Refusal(
                f"this server does not answer requests {named}: if that is one of its names, start it with "
                "--allowed-host",
                None,
                "host_not_allowed",
                403,
            )

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if self._checks_names and origin is not None and not self._allows(origin):
            raise Refusal(
                f"this server does not answer pages of {origin!r}: start it with --allowed-host if clients reach "
                "it under that name, or with --cors-origin for another site",
                None,
                "origin_not_allowed",
                403,
            )

    def _check_key(self, headers: Headers) -> None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        token = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")  # Anthropic's header
        key, keys = token.encode("latin-1"), self._access.api_keys
        if keys and not any(hmac.compare_digest(key, allowed.encode()) for allowed in keys):
            raise Refusal(
                "the API key is wrong or missing: send Authorization: Bearer KEY", None, "invalid_api_key", 401
            )

    def _check_body(self, scope: Scope, headers: Headers) -> None:
        if scope["method"] == "POST" and scope["app"].state.is_stopping:
            raise stopping()
        if scope["method"] == "POST" and scope["path"] in AUDIO_PATHS and not scope["app"].state.models.transcribes:
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
        has_audio = scope["path"] in AUDIO_PATHS
        limit = self._limits.max_audio_bytes if has_audio else self._limits.max_body_bytes
        if num_bytes > limit:
            raise Refusal(f"the body is larger than this server's limit of {limit} bytes", None, "body_too_large", 413)

    def _log(self, scope: Scope, log: RequestLog, seconds: float) -> None:
        status = log.status
        outcome = log.outcome or OUTCOMES.get(status)
        if outcome is None:
            outcome = "finished" if status < 400 else "refused" if status < 500 else "failed"

        def write(later_tokens: int = 0) -> None:
            line = f"{scope['method']} {_path(scope)} {status} {outcome} {seconds:.3f} s"
            line += f" client={_client(scope)} id={log.id}"
            if (tally := log.tally) is not None:
                line += f" model={tally.model} prompt_tokens={tally.prompt_tokens}"
                line += f" new_tokens={tally.new_tokens + later_tokens}"
            if log.prompts is not None:
                line += f" prompts={log.prompts!r}"
            logger.info(line)

        def end(later: Tally) -> None:  # texts that ended after their client had gone
            self._metrics.add(later)
            write(later.new_tokens)

        is_final = log.settle(scope, end)
        self._metrics.count(log.endpoint, outcome, log.tally)
        if is_final:
            write()


def _path(scope: Scope) -> str:
    """The path as the client wrote it: a line break is %0A, so that it stays one line of the log."""
    raw: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    return raw.decode("ascii", "backslashreplace")[:MAX_SHOWN_PATH]


def _client(scope: Scope) -> str:
    """The client's address. Behind a trusted proxy it is a text of the proxy."""
    host = (scope.get("client") or ("unknown",))[0]
    return re.sub(r"[^\w.:%-]", "?", host, flags=re.ASCII)[:64]


def _hostname(host: str) -> str | None:
    """The name in a host with or without a port; None if it is damaged."""
    match = HOST.fullmatch(host)
    return None if match is None or int(match[2] or 0) >= 2**16 else match[1].strip("[]").lower()


class Bodies:
    """The bodies of all requests that have no answer yet, together within a limit.

    If a body would exceed the limit, the body that has waited longest for its next bytes is refused. So clients that
    stop in the middle of their bodies do not keep others out.
    """

    def __init__(self, max_bytes: int) -> None:
        self.held_bytes = 0
        self._max_bytes = max_bytes
        self._incomplete: dict[Body, None] = {}  # the one that has waited longest comes first

    def grow(self, body: Body, num_bytes: int) -> None:
        """Count bytes of a body that have come. It is refused if all other bodies are complete."""
        self._incomplete.pop(body, None)
        self._incomplete[body] = None
        body.held_bytes += num_bytes
        self.held_bytes += num_bytes
        while self.held_bytes > self._max_bytes:
            slowest = next(iter(self._incomplete))
            self.drop(slowest)
            if slowest is body:
                raise bodies_full()
            slowest.refuse()

    def complete(self, body: Body) -> None:
        self._incomplete.pop(body, None)

    def drop(self, body: Body) -> None:
        self._incomplete.pop(body, None)
        self.held_bytes -= body.held_bytes
        body.held_bytes = 0


class Body:
    """The body of a request, on the disk if it is large. A context manager that drops it."""

    def __init__(self, bodies: Bodies) -> None:
        self.held_bytes = 0
        self._bodies = bodies
        self._file = SpooledTemporaryFile(MAX_BYTES_IN_MEMORY)  # noqa: SIM115
        self._patience = asyncio.timeout(None)
        self._is_refused = False

    def __enter__(self) -> Body:
        return self

    def __exit__(self, *_: object) -> None:
        self._bodies.drop(self)
        self._file.close()

    def refuse(self) -> None:
        """End the wait for further bytes, since all bodies together are too large."""
        self._is_refused = True
        self._patience.reschedule(asyncio.get_running_loop().time())

    async def complete(self, receive: Receive, check_size: Callable[[int], None]) -> Receive:
        """Wait for all of the body. Returns a callable from which an application receives it, in pieces.

        Args:
            check_size: raises Refusal for a body of that size.
        """
        has_more = True
        try:
            async with self._patience as patience:
                patience.reschedule(asyncio.get_running_loop().time() + MAX_BODY_SECONDS)
                while has_more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    piece = message.get("body", b"")
                    check_size(self.held_bytes + len(piece))
                    self._bodies.grow(self, len(piece))
                    self._file.write(piece)
                    has_more = message.get("more_body", False)
        except TimeoutError:
            if self._is_refused:
                raise bodies_full() from None
            problem = f"the body did not come within {MAX_BODY_SECONDS:.0f} seconds"
            raise Refusal(problem, None, "body_too_slow", 408) from None
        except OSError as error:
            raise Refusal(f"the server cannot keep this body: {error.strerror}", None, "body_not_kept", 503) from error
        self._bodies.complete(self)
        return self._replay(receive)

    def _replay(self, receive: Receive) -> Receive:
        """Receives the body, and then what comes after it."""
        self._file.seek(0)
        left = [self.held_bytes]

        async def replay() -> Message:
            if not left:
                return await receive()
            piece = self._file.read(MAX_BYTES_IN_MEMORY)
            if not (rest := left.pop() - len(piece)):
                return {"type": "http.request", "body": piece, "more_body": False}
            left.append(rest)
            return {"type": "http.request", "body": piece, "more_body": True}

        return replay


def bodies_full() -> Refusal:
    return Refusal("the server has no room for this body beside others: try again later", None, "bodies_full", 503)
