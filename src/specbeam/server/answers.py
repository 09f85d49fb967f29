"""Answers as choices or as streams of them, and the tool calls that are read from their texts."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import specbeam
from specbeam.models.answers import TokenReader
from specbeam.results import Piece, Result
from specbeam.results import Sequence as Text
from specbeam.server.call import Call
from specbeam.server.fields import Decoding
from specbeam.server.http import frame, to_json
from specbeam.server.tokens import Part
from specbeam.server.usage import costs, usage
from specbeam.structured.tools.reader import Delta, Reader

FINISH_REASONS = {"stop": "stop", "length": "length", "cancelled": "length", "timeout": "length"}
"""OpenAI's names. Clients know no other ones. A text that was ended early is not complete, as after "length"."""
LAST_FRAME = frame("[DONE]")
Chunk = tuple[list[dict[str, Any]], dict[str, Any]]
"""Choices, and further values of their frame."""


class Answer(ABC):
    """The answer to one call, as one object or in frames.

    Attributes:
        kind, chunk_kind: OpenAI's names of the objects.
        prefix: of the answer's id.
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
        """A choice, or the part of it in a frame of a stream, where the end of a text comes without text."""

    @abstractmethod
    def beginning(self, index: int) -> dict[str, Any] | None:
        """The choice of the frame before its text; None for no such frame."""

    def body(self, results: Sequence[Result]) -> dict[str, Any]:
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
        """The texts to return with their index, for each prompt the best first where they are compared."""
        plan = self.call.plan
        for start in range(0, len(results), plan.draws):
            texts = [text for result in results[start : start + plan.draws] for text in result.sequences]
            if not plan.searches and plan.draws > plan.n:
                texts.sort(key=lambda text: text.log_prob / max(len(text.token_ids), 1), reverse=True)
            yield from enumerate(texts[: plan.n], start // plan.draws * plan.n)

    async def frames(self) -> AsyncIterator[bytes]:
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
        """The chunks of the stream, grouped by iteration of the engine."""
        plan, requests = self.call.plan, self.call.requests
        results: dict[int, Result] = {}
        has_begun: set[int] = set()
        details = self.details()  # of the first frame
        async for received in self.call.pieces():
            chunks: list[Chunk] = []
            for number, piece in received:
                indices = range(number * plan.n, (number + 1) * plan.n) if plan.searches else [number]
                if number not in has_begun:
                    has_begun.add(number)
                    for choice in filter(None, map(self.beginning, indices)):
                        chunks.append(([choice], details))
                        details = {}
                if piece.result is not None:
                    results[number] = piece.result
                more: dict[str, Any] = {}
                if len(results) == len(requests) and not self.fields.includes_usage:
                    more = costs(self.call, [results[i] for i in range(len(requests))])
                choices = [*self._parts(indices[0], piece)]
                for position, choice in enumerate(choices, 1):
                    chunks.append(([choice], more if position == len(choices) else {}))
            if chunks:
                yield chunks
        if self.fields.includes_usage:
            in_order = [results[i] for i in range(len(requests))]
            yield [([], {"usage": usage(self.call, in_order), **costs(self.call, in_order)})]

    def _parts(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """The parts of choices that a piece has. All beams but the best one come at the end.

        The end of a text is a part of its own, as from OpenAI and llama.cpp: clients drop text beside a finish reason.
        """
        yield from self.changes(index, Part.of(piece))
        for number, text in enumerate([] if piece.result is None else piece.result.sequences, index):
            if number > index:
                yield from self.changes(number, Part.of(text))
            yield from self.changes(number, Part(end=text))
            yield self.choice(number, Part(end=text))

    def changes(self, index: int, part: Part) -> Iterator[dict[str, Any]]:
        """The choices of the frames with a part of a text, but for the frame with its end."""
        if part.text or self.shows_tokens(part):
            yield self.choice(index, part)

    def shows_tokens(self, part: Part) -> bool:
        """Whether the tokens of a part are shown beside its text."""
        return bool(part.token_ids) and (part.top_logprobs is not None or bool(self.fields.return_token_ids))

    def ending(self, part: Part) -> dict[str, Any]:
        """The values of a choice that say how it ended."""
        ending: dict[str, Any] = {"finish_reason": None if part.end is None else FINISH_REASONS[part.end.finish_reason]}
        if part.end is not None and part.end.is_complete is not None:
            ending["is_complete"] = part.end.is_complete
        if part.end is not None and self.call.plan.searches:
            ending["score"] = part.end.score
        return ending


@dataclass(frozen=True)
class ReadCall:
    """A call in an answer, with the id that it gets."""

    id: str
    name: str
    arguments: str


class AnswerStream:
    """Reads the thoughts and the tool calls in one text of an answer while it grows.

    Attributes:
        is_finished: the text has ended.
    """

    def __init__(self, call: Call) -> None:
        use, calls, marks = call.tools, None, ""
        self._format = None if use is None else use.tool_format
        if use is not None:
            how: dict[str, Any] = {"schemas": use.schemas, "has_form": use.has_form}
            calls, marks = Reader(use.tool_format, use.allowed, use.max_calls, **how), use.tool_format.marks
        lm, prompt_ids, options = call.model.lm, call.requests[0].prompt_ids, call.plan.options
        self._tokens = TokenReader(lm, prompt_ids, options, call.model.thought_format, calls, marks)
        self._reader = self._tokens.answer
        self._call_ids: list[str] = []
        self.is_finished = False
        self._is_cut = False

    @classmethod
    def of(cls, call: Call) -> AnswerStream | None:
        """The reader of a choice; None if its text has neither thoughts nor calls."""
        return None if call.tools is None and call.model.thought_format is None else cls(call)

    @property
    def thoughts(self) -> str:
        """The thoughts so far."""
        return self._reader.thoughts

    @property
    def content(self) -> str | None:
        """The content so far; None if there are calls alone, or the beginning of one."""
        has_calls = self._reader.calls or (self._is_cut and self._format is not None)
        return None if has_calls and not self._reader.content.strip() else self._reader.content

    @property
    def calls(self) -> list[ReadCall]:
        """The calls so far."""
        pairs = zip(self._call_ids, self._reader.calls, strict=True)
        return [ReadCall(call_id, call.name, call.arguments) for call_id, call in pairs]

    def push(self, part: Part) -> list[Delta]:
        """The changes that a part of the text makes."""
        changes = self._tokens.push(part.token_ids)
        if part.end is not None:
            self.is_finished = True
            self._is_cut = FINISH_REASONS[part.end.finish_reason] == "length" or part.end.is_complete is False
            changes += self._tokens.finish(part.end.finish_reason, self._is_cut)
        if self._format is not None:
            self._call_ids += [self._format.call_id for change in changes if change.name is not None]
        return changes
