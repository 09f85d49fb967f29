"""``/v1/responses``: OpenAI's newer endpoint. Nothing is stored, so each request has its whole conversation."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from specbeam.results import Piece, Result
from specbeam.results import Sequence as Text
from specbeam.server.answers import FINISH_REASONS
from specbeam.server.call import Call
from specbeam.server.chat import ROLES
from specbeam.server.errors import Refusal
from specbeam.server.fields import Count, Decoding, TopLogprobs, Whole, content_of
from specbeam.server.formats import FlatFormat
from specbeam.server.json import to_json
from specbeam.server.limits import Limits
from specbeam.server.models import ServedModel
from specbeam.server.neutral import Fields, with_neutral_fields
from specbeam.server.statistics import costs, token_counts
from specbeam.server.streams import frame
from specbeam.server.tokens import Part, chat_log_probs


@with_neutral_fields
class InputPart(Fields):
    """A part of a message. Answers of the assistant are given back as "output_text"."""

    type: Literal["input_text", "output_text"]
    text: str


@with_neutral_fields
class InputMessage(Fields):
    """A message of the conversation so far."""

    role: str
    content: str | Annotated[list[InputPart], Field(min_length=1)] | None = Field(None, validate_default=True)

    _content_of = field_validator("content")(content_of)


@with_neutral_fields
class ReasoningItem(Fields):
    """An item of another model's history. No chat template here has a place for it, so it has no effect."""

    type: Literal["reasoning"]


def _kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "ReasoningItem" if kind == "reasoning" else "InputMessage"


InputItem = Annotated[
    Annotated[InputMessage, Tag("InputMessage")] | Annotated[ReasoningItem, Tag("ReasoningItem")], Discriminator(_kind)
]


class TextConfig(Fields):
    """The form of the answer."""

    format: FlatFormat | None = None
    verbosity: Literal["medium"] | None = None


@with_neutral_fields
class ResponseRequest(Decoding):
    """A request for the next message of a conversation."""

    input: Annotated[str, Field(min_length=1)] | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = Field(None, description="A system message to put first.")
    max_output_tokens: Count | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: TopLogprobs | None = None
    n: Annotated[Whole, Field(ge=1, le=1)] | None = Field(None, description="This endpoint gives one text.")
    text: TextConfig | None = None
    response_format: None = None  # it is in text.format
    format_field: ClassVar[str] = "text"

    @property
    def format(self) -> Any:
        return None if self.text is None else self.text.format

    def call(self, model: ServedModel, limits: Limits) -> Call:
        """The request to the engine."""
        model.check_chat_template()
        if self.top_logprobs is not None and not self.include:
            raise Refusal('top_logprobs goes with include: ["message.output_text.logprobs"]', "top_logprobs")
        top = (self.top_logprobs or 0) if self.include else None
        plan = self.plan(model, limits, "max_output_tokens", limits.max_tokens, top)
        if plan.draws > 1:
            raise Refusal("best_of needs several texts, and this endpoint gives one: leave it out", "best_of")
        return Call(model, [self._messages()], plan, limits, field="input")

    def _messages(self) -> list[dict[str, str]]:
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for message in self.input:
            if isinstance(message, ReasoningItem):
                continue
            content = message.content or ""
            text = content if isinstance(content, str) else "\n".join(part.text for part in content)
            messages.append({"role": ROLES.get(message.role, message.role), "content": text})
        return messages

    def answer(self, call: Call) -> Answer:
        return Answer(call, self)


class Answer:
    """The answer to one call, whole or as a stream of events."""

    def __init__(self, call: Call, fields: ResponseRequest) -> None:
        self._call = call
        self._fields = fields
        self._id, self._message_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._events = 0
        given = fields.format
        self._format = {"type": "text"} if given is None else given.model_dump(by_alias=True, exclude_none=True)

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """The answer as one object."""
        text = results[0].sequences[0]
        is_whole = FINISH_REASONS[text.finish_reason] == "stop"
        status = "completed" if is_whole else "incomplete"
        message = self._message(status, _output_text(text.text, self._log_probs(text)))
        prompt, new, reused = token_counts(self._call, results)
        return self._response(
            status,
            [message],
            incomplete_details=None if is_whole else {"reason": "max_output_tokens"},
            usage={
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": reused, "cache_write_tokens": 0},
                "output_tokens": new,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + new,
            },
            **({} if text.is_complete is None else {"is_complete": text.is_complete}),
            **costs(self._call, results),
        )

    def _response(self, status: str, output: list[Any], **more: Any) -> dict[str, Any]:
        fields, options = self._fields, self._call.plan.options
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": fields.metadata or {},
            "model": self._call.model.name,
            "output": output,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if options.temperature is None and options.samples else options.temperature or 0.0,
            "text": {"format": self._format},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": fields.top_logprobs or 0,
            "top_p": 1.0 if options.top_p is None else options.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": fields.user,
            **more,
        }

    def _message(self, status: str, *content: dict[str, Any]) -> dict[str, Any]:
        return {"id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _log_probs(self, given: Piece | Text) -> list[dict[str, Any]]:
        return chat_log_probs(self._call.model.texts, Part.of(given)) if self._fields.include else []

    async def frames(self) -> AsyncIterator[bytes]:
        """The events of the stream. Events of one iteration of the engine come together."""
        place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        begun = self._response("in_progress", [])
        yield (
            self._event("response.created", response=begun)
            + self._event("response.in_progress", response=begun)
            + self._event("response.output_item.added", output_index=0, item=self._message("in_progress"))
            + self._event("response.content_part.added", **place, part=_output_text("", []))
        )
        result = None
        async for received in self._call.pieces():
            events = b""
            for _, piece in received:
                log_probs = self._log_probs(piece)
                if piece.text or log_probs:
                    events += self._event("response.output_text.delta", **place, delta=piece.text, logprobs=log_probs)
                result = piece.result or result
            if events:
                yield events
        assert result is not None
        response = self.whole([result])
        (message,) = response["output"]
        (part,) = message["content"]
        yield (
            self._event("response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"])
            + self._event("response.content_part.done", **place, part=part)
            + self._event("response.output_item.done", output_index=0, item=message)
            + self._event(f"response.{response['status']}", response=response)
        )

    def _event(self, kind: str, **values: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._events, **values}
        self._events += 1
        return frame(to_json(event), kind)


def _output_text(text: str, log_probs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": log_probs}
