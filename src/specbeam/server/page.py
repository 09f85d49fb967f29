"""The page at ``/``, whose files load nothing from other hosts, and the rounds of a search that it draws.

``/rounds/chat`` and ``/rounds/completions`` send each round as an event while it happens. They take the bodies of
OpenAI's endpoints, so everything that shapes a text works here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

from specbeam.models.prompts import last_message
from specbeam.options.surfaces import page_script
from specbeam.recording.events import begin, end, event_line, rounds
from specbeam.recording.replay import PAGE, replay_page
from specbeam.results import Piece
from specbeam.server.answers import AnswerStream
from specbeam.server.call import Call
from specbeam.server.chat import ChatRequest
from specbeam.server.completions import CompletionRequest
from specbeam.server.errors import Refusal
from specbeam.server.http import frame
from specbeam.server.limits import Limits
from specbeam.server.models import ServedModel
from specbeam.server.tokens import Part

PREFIX = "/page/"
TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".jsonl": "application/jsonl",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
"""Media types by the suffix of a file. Other files are no part of the page."""
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
    """Whether a path belongs to the page, whose files are public and need no API key."""
    return path == "/" or path.startswith(PREFIX)


def add_page_to(app: FastAPI) -> None:
    """Add a route for each file, and for the page of a replay, which gets its recording in the browser."""
    files = [file for file in PAGE.rglob("*") if file.suffix in TYPES]
    contents = {file.relative_to(PAGE).as_posix(): file.read_bytes() for file in files}
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


class RoundsRequest:
    """A request for one text or one beam search, as OpenAI's endpoint takes it. The answer is its rounds."""

    def __init__(self, fields: ChatRequest | CompletionRequest) -> None:
        self.model = fields.model
        self.stream: bool | None = True
        self._fields = fields

    def call(self, model: ServedModel, limits: Limits) -> Call:
        fields = self._fields
        if fields.stream is False:
            raise Refusal("stream: false is not supported: rounds come as a stream", "stream")
        if fields.stream_options is not None:
            raise Refusal("stream_options is not supported: the last event always has the cost", "stream_options")
        if getattr(fields, "echo", None):
            raise Refusal("echo is not supported: the first event always has the prompt", "echo")
        if fields.return_token_ids:
            raise Refusal("return_token_ids is not supported: events always have token ids", "return_token_ids")
        call = fields.model_copy(update={"trace": True}).call(model, limits)
        if len(call.prompts) > 1:
            raise Refusal("several prompts are not supported: send one request for each", "prompt")
        if call.plan.draws > 1:
            name = "best_of" if fields.best_of else "n"
            raise Refusal(f"{name}: several samples are not supported: send one request for each", name)
        return call

    def answer(self, call: Call) -> Rounds:
        return Rounds(call)


class Rounds:
    """The rounds of a call.

    A model that thinks has events of the kind "answer" beside them, which tell its thoughts from its answer.
    """

    def __init__(self, call: Call) -> None:
        self._call = call

    async def frames(self) -> AsyncIterator[bytes]:
        """The frames of the stream. Rounds that came together leave together."""
        call, plan = self._call, self._call.plan
        (request,) = call.requests
        draft = next(name for name, draft in call.model.drafts.items() if draft is plan.draft)
        message = last_message(call.model.lm, call.prompts[0], raw=call.raw)
        answer = None if call.raw or call.model.thought_format is None else AnswerStream(call)
        first = [begin(call.model.lm, request.prompt_ids, plan.options, draft, message)]
        first += [] if answer is None else [_answer("", "")]
        yield b"".join(frame(event_line(event)) for event in first)
        async for received in call.pieces():
            events = [event for _, piece in received for event in rounds(piece.trace or [])]
            if answer is not None:
                events += [event for _, piece in received for event in _parts(answer, piece)]
            events += [end(piece.result) for _, piece in received if piece.result is not None]
            if events:
                yield b"".join(frame(event_line(event)) for event in events)


def _parts(answer: AnswerStream, piece: Piece) -> Iterator[dict[str, Any]]:
    """The thoughts and the content that a piece adds."""
    changes = answer.push(Part.of(piece, end=None if piece.result is None else piece.result.sequences[0]))
    for change in changes:
        yield _answer(change.thoughts, change.content)


def _answer(thoughts: str, content: str) -> dict[str, Any]:
    return {"event": "answer", "reasoning": thoughts, "content": content}
