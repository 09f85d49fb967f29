"""The page at ``/``: static files of the package. It loads nothing from other hosts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import FastAPI
from fastapi.responses import Response

PREFIX = "/page/"
TYPES = {
    "css": "text/css",
    "html": "text/html",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "txt": "text/plain",
}
"""Media types by the end of a file's name."""
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
    """Add a route for each file of the page."""
    for name, file in _files(files("specbeam.server") / "page"):
        path = "/" if name == "index.html" else PREFIX + name
        app.add_api_route(path, _sender(file), methods=["GET", "HEAD"], include_in_schema=False)


def _files(folder: Traversable, before: str = "") -> list[tuple[str, Traversable]]:
    found = []
    for entry in folder.iterdir():
        name = before + entry.name
        if entry.is_dir():
            found += _files(entry, f"{name}/")
        elif name.rpartition(".")[2] in TYPES:
            found.append((name, entry))
    return found


def _sender(file: Traversable) -> Callable[[], Awaitable[Response]]:
    content, kind = file.read_bytes(), TYPES[file.name.rpartition(".")[2]]

    async def send() -> Response:
        return Response(content, headers=HEADERS, media_type=kind)

    return send
