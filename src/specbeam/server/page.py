"""The page at ``/``: static files of the package. It loads nothing from other hosts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response

from specbeam.options.surfaces import page_script
from specbeam.recording.replay import PAGE, replay_page

PREFIX = "/page/"
TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".jsonl": "application/jsonl",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
"""Media types by the end of a file's name. Other files are not of the page."""
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def is_page(path: str) -> bool:
    """Whether a path belongs to the page. Its files are no secret, so they need no API key."""
    return path == "/" or path.startswith(PREFIX)


def add_page_to(app: FastAPI) -> None:
    """Add a route for each file of the page, and for the page of a replay, which gets its recording in the browser."""
    found = [file for file in PAGE.rglob("*") if file.suffix in TYPES]
    contents = {file.relative_to(PAGE).as_posix(): file.read_bytes() for file in found}
    contents["declared.js"] = page_script().encode()
    contents["replay.html"] = replay_page([], "A run of specbeam").encode()
    for name, content in contents.items():
        path = "/" if name == "index.html" else PREFIX + name
        send = _sender(content, TYPES[Path(name).suffix])
        app.add_api_route(path, send, methods=["GET", "HEAD"], include_in_schema=False)


def _sender(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return Response(content, headers=HEADERS, media_type=kind)

    return send
