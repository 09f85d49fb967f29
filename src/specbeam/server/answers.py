"""Answers and streams of choices, which chat and text completions have in common."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import specbeam
from specbeam.results import Piece, Result
from specbeam.results import Sequence as Text
from specbeam.server.call import Call
from specbeam.server.fields import Decoding
from specbeam.server.json import to_json
from specbeam.server.statistics import costs, usage
from specbeam.server.streams import frame
from specbeam.server.tokens import Part

FINISH_REASONS = {"stop": "stop", "length": "length", "cancelled": "length", "timeout": "length"}
"""OpenAI's names. Clients know no other ones. A text that was ended early is not complete, as after "length"."""
LAST_FRAME = frame("[DONE]")
Chunk = tuple[list[dict[str, Any]], dict[str, Any]]
"""Choices, and further values of the same frame."""


class Answer(ABC):
    """The answer to one call, whole or in frames.

    Attributes:
        kind, chunk_kind: OpenAI's names of the objects.
        prefix: with which the answer's id begins.
    """

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(self, call: Call, fields: Decoding) -> None:
        self.call = call
        self.fields = fields
        self._head: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": call.model.name,
            "system_fingerprint": f"specbeam-{specbeam.__version__}",
        }

    @abstractmethod
    def choice(self, index: int, part: Part) -> dict[str, Any]:
        """A choice, or what a frame of a stream adds to it. In frames the end of a text comes without text."""

    @abstractmethod
    def beginning(self, index: int) -> dict[str, Any] | None:
        """The choice of a frame before the text of a choice, if there is one."""

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """The answer as one object."""
        choices = [self.choice(index, Part.of(text, end=text)) for index, text in self._best(results)]
        return {
            **self._head,
            "object": self.kind,
            **self.details(),
            "choices": choices,
            "usage": usage(self.call, results),
            **costs(self.call, results),
        }

    def details(self) -> dict[str, Any]:
        """Further values of the answer, or of the first frame."""
        return {}

    def _best(self, results: Sequence[Result]) -> Iterator[tuple[int, Text]]:
        """The texts to return for each prompt with their index, best first where they are compared."""
        plan = self.call.plan
        for start in range(0, len(results), plan.draws):
            texts = [text for result in results[start : start + plan.draws] for text in result.sequences]
            if not plan.searches and plan.draws > plan.n:
                texts.sort(key=lambda text: text.log_prob / max(len(text.token_ids), 1), reverse=True)
            yield from enumerate(texts[: plan.n], start // plan.draws * plan.n)

    async def frames(self) -> AsyncIterator[bytes]:
        """The frames of the stream. Frames of one iteration of the engine come together."""
        head = to_json({**self._head, "object": self.chunk_kind})[:-1]
        none = {"usage": None} if self.fields.includes_usage else {}
        async for chunks in self.chunks():
            written = []
            for choices, more in chunks:
                extra = "".join(f',"{name}":{to_json(value)}' for name, value in {**none, **more}.items())
                written.append(frame(f'{head},"choices":{to_json(choices)}{extra}}}'))
            yield b"".join(written)
        yield LAST_FRAME

    async def chunks(self) -> AsyncIterator[list[Chunk]]:
        """The chunks of the stream. Chunks of one iteration of the engine come together."""
        plan, requests = self.call.plan, self.call.requests
        results: dict[int, Result] = {}
        has_begun: set[int] = set()
        details = self.details()  # of the first frame
        async for received in self.call.pieces():
            made: list[Chunk] = []
            for number, piece in received:
                indices = range(number * plan.n, (number + 1) * plan.n) if plan.searches else [number]
                if number not in has_begun:
                    has_begun.add(number)
                    for choice in filter(None, map(self.beginning, indices)):
                        made.append(([choice], details))
                        details = {}
                if piece.result is not None:
                    results[number] = piece.result
                more: dict[str, Any] = {}
                if len(results) == len(requests) and not self.fields.includes_usage:
                    more = costs(self.call, [results[i] for i in range(len(requests))])
                choices = [*self._parts(indices[0], piece)]
                for place, choice in enumerate(choices):
                    made.append(([choice], more if place == len(choices) - 1 else {}))
            if made:
                yield made
        if self.fields.includes_usage:
            in_order = [results[i] for i in range(len(requests))]
            yield [([], {"usage": usage(self.call, in_order), **costs(self.call, in_order)})]

    def _parts(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """The parts of choices that a piece has. Other beams than the best one come whole at the end.

        The end of a text is a part of its own, as from OpenAI and llama.cpp: clients drop text beside a finish reason.
        """
        yield from self.changes(index, Part.of(piece))
        for place, text in enumerate([] if piece.result is None else piece.result.sequences):
            if place:
                yield from self.changes(index + place, Part.of(text))
            yield from self.changes(index + place, Part(end=text))
            yield self.choice(index + place, Part(end=text))

    def changes(self, index: int, part: Part) -> Iterator[dict[str, Any]]:
        """The choices of frames that show a part of a text. The end of the text has a frame of its own."""
        if part.text or self.shows_tokens(part):
            yield self.choice(index, part)

    def shows_tokens(self, part: Part) -> bool:
        """Whether the tokens of a part are shown beside its text."""
        return bool(part.token_ids) and (part.top_logprobs is not None or bool(self.fields.return_token_ids))

    def ending(self, part: Part) -> dict[str, Any]:
        """The values of a choice that say how it ended."""
        made: dict[str, Any] = {"finish_reason": None if part.end is None else FINISH_REASONS[part.end.finish_reason]}
        if part.end is not None and part.end.is_complete is not None:
            made["is_complete"] = part.end.is_complete
        if part.end is not None and self.call.plan.searches:
            made["score"] = part.end.score
        return made
