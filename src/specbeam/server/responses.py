"""``/v1/responses``: OpenAI's newer endpoint. Nothing is stored, so each request has all of its conversation."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from specbeam.errors import shown
from specbeam.models.prompts import Rendering
from specbeam.results import Piece, Result
from specbeam.server.answers import FINISH_REASONS, AnswerStream, ReadCall
from specbeam.server.call import Call
from specbeam.server.chat import ROLES
from specbeam.server.errors import Refusal
from specbeam.server.fields import Integer, NewTokens, TopLogprobs, content_of
from specbeam.server.formats import FlatFormat
from specbeam.server.http import frame, to_json
from specbeam.server.ignored_fields import Fields, Reasoning, TextAlone, Verbosity, with_ignored_fields
from specbeam.server.limits import Limits
from specbeam.server.models import ServedModel
from specbeam.server.tokens import Part, chat_log_probs
from specbeam.server.tools import (
    MAX_TOOLS,
    CalledFunction,
    FlatFunctionTool,
    FlatToolChoice,
    ToolFields,
    conversation,
)
from specbeam.server.usage import costs, token_counts
from specbeam.structured.thoughts import thinking_variables


@with_ignored_fields
class InputPart(Fields):
    """A part of a message. Answers of the assistant are given back as "output_text"."""

    type: Annotated[Literal["input_text", "output_text"], TextAlone]
    text: str


@with_ignored_fields
class InputMessage(Fields):
    """A message of the conversation so far."""

    role: str
    content: str | Annotated[list[InputPart], Field(min_length=1)] | None = Field(None, validate_default=True)

    _content_of = field_validator("content")(content_of)

    @field_validator("type", mode="before", check_fields=False)
    @classmethod
    def _is_known(cls, kind: Any) -> Any:
        if isinstance(kind, str) and kind != "message":
            known = ", ".join(["message", *ITEMS])
            raise ValueError(f"items of the type {shown(kind)} are not supported: give {known}")
        return kind


@with_ignored_fields
class ReasoningItem(Fields):
    """Thoughts in the history. They have no effect: chat templates leave out those before a user's message."""

    type: Literal["reasoning"]


@with_ignored_fields
class CallItem(CalledFunction):
    """A tool call of the assistant."""

    type: Literal["function_call"]
    call_id: str

    @property
    def call(self) -> dict[str, Any]:
        """The call as chat templates read it."""
        return {"id": self.call_id, "type": "function", "function": self.called}


@with_ignored_fields
class ResultItem(Fields):
    """What a tool call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[InputPart], Field(min_length=1)]


ITEMS = {"reasoning": "ReasoningItem", "function_call": "CallItem", "function_call_output": "ResultItem"}
"""The classes of items by type. All other items are messages."""


def _kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return ITEMS.get(kind, "InputMessage") if isinstance(kind, str) else "InputMessage"


InputItem = Annotated[
    Annotated[InputMessage, Tag("InputMessage")]
    | Annotated[ReasoningItem, Tag("ReasoningItem")]
    | Annotated[CallItem, Tag("CallItem")]
    | Annotated[ResultItem, Tag("ResultItem")],
    Discriminator(_kind),
]


class TextConfig(Fields):
    """The form of the answer."""

    format: FlatFormat | None = None
    verbosity: Verbosity | None = None


LOGPROBS = "message.output_text.logprobs"
PartOfOtherModels = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
]
"""What ``include`` may ask for, and no answer here has."""


@with_ignored_fields
class ResponseRequest(ToolFields):
    """A request for the next message of a conversation."""

    input: Annotated[str, Field(min_length=1)] | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = Field(None, description="A system message to put first.")
    tools: Annotated[list[FlatFunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: FlatToolChoice | None = None
    max_output_tokens: NewTokens | None = None
    include: list[Literal["message.output_text.logprobs"] | PartOfOtherModels] | None = None
    top_logprobs: TopLogprobs | None = None
    n: Annotated[Integer, Field(ge=1, le=1)] | None = Field(None, description="This endpoint gives one text.")
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    response_format: None = None  # it is in text.format
    format_field: ClassVar[str] = "text"

    @property
    def format(self) -> Any:
        return None if self.text is None else self.text.format

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def call(self, model: ServedModel, limits: Limits) -> Call:
        model.check_chat_template()
        if self.top_logprobs and not self.has_logprobs:
            raise Refusal(f'top_logprobs goes with include: ["{LOGPROBS}"]', "top_logprobs")
        top = (self.top_logprobs or 0) if self.has_logprobs else None
        plan = self.plan(model, limits, "max_output_tokens", limits.max_tokens, top)
        if plan.draws > 1:
            raise Refusal("best_of needs several texts, and this endpoint gives one: leave it out", "best_of")
        messages = self.with_schema(model, self._messages())
        tools = self.tool_use(model, limits.max_tool_calls, messages)
        messages, variables = conversation(model, messages, self.offered if tools and tools.max_calls else (), "input")
        effort = None if self.reasoning is None else self.reasoning.effort
        thinking, _ = thinking_variables(model.template, None, effort)
        rendering = Rendering(chat_template_kwargs=thinking, tools=variables)
        plan = plan.after_thoughts(model.thought_format) if tools is None else tools.plan(plan, model.thought_format)
        return Call(model, [messages], plan, limits, field="input", rendering=rendering, tools=tools)

    def _messages(self) -> list[dict[str, Any]]:
        """The conversation as chat templates read it. The calls of one answer are one message."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            if isinstance(item, CallItem):
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(item.call)
            elif isinstance(item, ResultItem):
                messages.append({"role": "tool", "content": _text(item.output), "tool_call_id": item.call_id})
            elif isinstance(item, InputMessage):
                messages.append({"role": ROLES.get(item.role, item.role), "content": _text(item.content or "")})
        return messages

    def answer(self, call: Call) -> ResponseAnswer:
        return ResponseAnswer(call, self)


class ResponseAnswer:
    """The answer to one call, as one object or as a stream of events."""

    def __init__(self, call: Call, fields: ResponseRequest) -> None:
        self._call = call
        self._fields = fields
        self._id, self._message_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._num_events = 0
        form = fields.format
        self._format = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
        self._has_message = self._has_thoughts = False  # in the stream
        self._last_ended = -1  # item of the stream
        self._log_probs: list[dict[str, Any]] = []  # of all tokens so far
        self._num_sent = 0  # of these, in deltas of the stream

    def body(self, results: Sequence[Result]) -> dict[str, Any]:
        text = results[0].sequences[0]
        part = Part.of(text, end=text)
        self._log_probs = self._entries(part)
        content, calls, thoughts = part.text, list[ReadCall](), ""
        if (answer := self._answer) is not None:
            if not answer.is_finished:
                answer.push(part)
            content, calls, thoughts = answer.content or "", answer.calls, answer.thoughts
        # A stop string may end a text within a call.
        is_complete = FINISH_REASONS[text.finish_reason] == "stop" and not (calls and text.is_complete is False)
        status = "completed" if is_complete else "incomplete"
        output = [_call_item(call, "completed") for call in calls[:-1]]
        output += [_call_item(call, status) for call in calls[-1:]]
        if content or not calls:
            output.insert(0, self._message(status, _output_text(content, self._entries_of(content, bool(calls)))))
        if thoughts:
            output.insert(0, self._reasoning("completed", thoughts))
        prompt, new, reused = token_counts(self._call, results)
        return self._response(
            status,
            output,
            incomplete_details=None if is_complete else {"reason": "max_output_tokens"},
            usage={
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": reused, "cache_write_tokens": 0},
                "output_tokens": new,
                "output_tokens_details": {"reasoning_tokens": self._call.thought_tokens(results)},
                "total_tokens": prompt + new,
            },
            **({} if text.is_complete is None else {"is_complete": text.is_complete}),
            **costs(self._call, results),
        )

    @cached_property
    def _answer(self) -> AnswerStream | None:
        """The reader of thoughts and tool calls; None if there are none."""
        return AnswerStream.of(self._call)

    def _response(self, status: str, output: list[Any], **more: Any) -> dict[str, Any]:
        fields, options, tools = self._fields, self._call.plan.options, self._call.tools
        choice = fields.tool_choice
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
            "parallel_tool_calls": tools is not None and tools.max_calls > 1,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if options.temperature is None and options.samples else options.temperature or 0.0,
            "text": {"format": self._format},
            "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump(by_alias=True, exclude={"return_"}) for tool in fields.tools or []],
            "top_logprobs": fields.top_logprobs or 0,
            "top_p": options["top_p"],
            "truncation": "disabled",
            "usage": None,
            "user": fields.user,
            **({} if tools is None else tools.details),
            **more,
        }

    def _message(self, status: str, *content: dict[str, Any]) -> dict[str, Any]:
        return {"id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _reasoning(self, status: str, thoughts: str | None = None) -> dict[str, Any]:
        content = [] if thoughts is None else [{"type": "reasoning_text", "text": thoughts}]
        item = {"id": self._message_id.replace("msg", "rs"), "type": "reasoning", "status": status}
        return item | {"summary": [], "content": content}

    def _entries(self, part: Part) -> list[dict[str, Any]]:
        """The log-probabilities of a part's tokens, if the request includes them."""
        return chat_log_probs(self._call.model.texts, part) if self._fields.has_logprobs else []

    def _entries_of(self, text: str, has_calls: bool) -> list[dict[str, Any]]:
        """The log-probabilities of the message's tokens, without the tokens of calls that may follow it."""
        num_bytes = len(text.encode())
        for number, entry in enumerate(self._log_probs if has_calls else ()):
            if num_bytes <= 0:
                return self._log_probs[:number]
            num_bytes -= len(entry["bytes"])
        return self._log_probs

    async def frames(self) -> AsyncIterator[bytes]:
        """The events of the stream, grouped by iteration of the engine."""
        response = self._response("in_progress", [])
        yield (
            self._event("response.created", response=response)
            + self._event("response.in_progress", response=response)
            + (self._begin_message() if self._answer is None else b"")
        )
        result = None
        async for received in self._call.pieces():
            events = b""
            for _, piece in received:
                result = piece.result or result
                events += b"".join(self._changes(piece))
            if events:
                yield events
        assert result is not None
        response = self.body([result])
        if response["output"][-1]["type"] == "message" and not self._has_message:  # an answer without a text
            yield self._begin_message()
        yield self._end_item(response["output"][-1]) + self._event(f"response.{response['status']}", response=response)

    def _changes(self, piece: Piece) -> Iterator[bytes]:
        part = Part.of(piece, end=None if piece.result is None else piece.result.sequences[0])
        self._log_probs += self._entries(part)
        answer = self._answer
        if answer is None:
            if piece.text or len(self._log_probs) > self._num_sent:
                yield self._more_text(piece.text, self._log_probs)
            return
        for change in answer.push(part):
            if change.thoughts:
                yield self._more_thoughts(change.thoughts)
                continue
            if change.call is None:
                if not self._has_message:
                    yield self._begin_message()
                yield self._more_text(change.content, self._entries_of(answer.content or "", True))
                continue
            call, location = answer.calls[change.call], {"output_index": change.call + self._num_before_calls}
            if change.name is not None:
                if change.call:
                    yield self._end_item(_call_item(answer.calls[change.call - 1], "completed"))
                elif self._has_message:
                    content = answer.content or ""
                    yield self._end_item(
                        self._message("completed", _output_text(content, self._entries_of(content, True)))
                    )
                else:
                    yield self._end_thoughts()
                item = _call_item(replace(call, arguments=""), "in_progress")
                yield self._event("response.output_item.added", **location, item=item)
            if change.arguments:
                kind = "response.function_call_arguments.delta"
                yield self._event(kind, item_id=_item_id(call), **location, delta=change.arguments)
        if part.end is not None and not answer.calls and self._has_message and len(self._log_probs) > self._num_sent:
            yield self._more_text("", self._log_probs)

    @property
    def _num_before_calls(self) -> int:
        return self._has_thoughts + self._has_message

    def _more_thoughts(self, text: str) -> bytes:
        """A delta of the thoughts, which begin with the first one."""
        events, location = b"", {"output_index": 0, "item_id": self._reasoning("")["id"]}
        if not self._has_thoughts:
            self._has_thoughts = True
            events = self._event("response.output_item.added", output_index=0, item=self._reasoning("in_progress"))
        return events + self._event("response.reasoning_text.delta", **location, content_index=0, delta=text)

    def _end_thoughts(self) -> bytes:
        """The events that end the thoughts before the first item behind them."""
        if not self._has_thoughts or self._last_ended >= 0 or self._answer is None:
            return b""
        return self._end_item(self._reasoning("completed", self._answer.thoughts))

    def _begin_message(self) -> bytes:
        before = self._end_thoughts()
        self._has_message = True
        item = {"output_index": int(self._has_thoughts), "item": self._message("in_progress")}
        added = self._event("response.output_item.added", **item)
        return before + added + self._event("response.content_part.added", **self._location, part=_output_text("", []))

    def _end_item(self, item: dict[str, Any]) -> bytes:
        """The events that end the next item."""
        self._last_ended += 1
        location = {"output_index": self._last_ended}
        if item["type"] == "message":
            (part,) = item["content"]
            text = {"text": part["text"], "logprobs": part["logprobs"]}
            events = self._event("response.output_text.done", **self._location, **text)
            events += self._event("response.content_part.done", **self._location, part=part)
        elif item["type"] == "reasoning":
            text = {"item_id": item["id"], "content_index": 0, "text": item["content"][0]["text"]}
            events = self._event("response.reasoning_text.done", **location, **text)
        else:
            call = {"item_id": item["id"], "name": item["name"], "arguments": item["arguments"]}
            events = self._event("response.function_call_arguments.done", **location, **call)
        return events + self._event("response.output_item.done", **location, item=item)

    def _more_text(self, text: str, log_probs: list[dict[str, Any]]) -> bytes:
        """A delta of the message, with the log-probabilities that were not sent yet."""
        new, self._num_sent = log_probs[self._num_sent :], max(self._num_sent, len(log_probs))
        return self._event("response.output_text.delta", **self._location, delta=text, logprobs=new)

    @property
    def _location(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": int(self._has_thoughts), "content_index": 0}

    def _event(self, kind: str, **values: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._num_events, **values}
        self._num_events += 1
        return frame(to_json(event), kind)


def _output_text(text: str, log_probs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": log_probs}


def _item_id(call: ReadCall) -> str:
    return f"fc_{call.id.removeprefix('call_')}"


def _call_item(call: ReadCall, status: str) -> dict[str, Any]:
    item = {"id": _item_id(call), "type": "function_call", "status": status}
    return item | {"call_id": call.id, "name": call.name, "arguments": call.arguments}


def _text(content: str | list[InputPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
