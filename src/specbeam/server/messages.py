"""``/v1/messages``: Anthropic's requests, converted to requests for chat completions, and their answers."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from specbeam.results import Result
from specbeam.server.call import Call
from specbeam.server.chat import ChatCompletion, ChatRequest
from specbeam.server.errors import validated
from specbeam.server.fields import Count, Integer
from specbeam.server.http import frame, to_json
from specbeam.server.ignored_fields import Effort, Fields, TextAlone, with_ignored_fields, without_nulls
from specbeam.server.limits import Limits
from specbeam.server.models import ServedModel
from specbeam.server.tokens import Part
from specbeam.server.tools import MAX_TOOLS

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Anthropic's names, by OpenAI's finish reasons."""


@with_ignored_fields
class TextBlock(Fields):
    type: Annotated[Literal["text"], TextAlone]
    text: str


@with_ignored_fields
class ToolUseBlock(Fields):
    """A call in an answer that is given back."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


@with_ignored_fields
class ToolResultBlock(Fields):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = Field(None, description="Accepted. The content says what went wrong.")


class ThinkingBlock(Fields):
    """Thoughts in an answer that is given back."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


def _kind(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return kind if kind in ("tool_use", "tool_result", "thinking") else "text"


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")],
    Discriminator(_kind),
]


class InMessage(Fields):
    """A message of the conversation so far."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(min_length=1)]

    @property
    def for_chat(self) -> list[dict[str, Any]]:
        """The message as chat completions have it. Results of calls are messages there."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results = [
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content or "")}
            for block in self.content
            if isinstance(block, ToolResultBlock)
        ]
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": to_json(block.input)}}
            for block in self.content
            if isinstance(block, ToolUseBlock)
        ]
        thoughts = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        texts = [block for block in self.content if isinstance(block, TextBlock)]
        if results and not texts:
            return results
        message: dict[str, Any] = {"role": self.role, "content": _text(texts)}
        message |= {"tool_calls": calls} if calls else {}
        message |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
        return [*results, message]


@with_ignored_fields
class InTool(Fields):
    """A tool that the client runs."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    type: Literal["custom"] | None = None

    @property
    def for_chat(self) -> dict[str, Any]:
        options = without_nulls({"description": self.description, "strict": self.strict})
        return {"type": "function", "function": {"name": self.name, **options, "parameters": self.input_schema}}


class ToolChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @property
    def for_chat(self) -> Any:
        named = {"type": "function", "function": {"name": self.name}}
        return {"any": "required", "tool": named}.get(self.type, self.type)


class Thinking(Fields):
    """Whether the chat template lets the model think: its variable ``enable_thinking``."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Integer | None = Field(None, description="Accepted, and has no effect.")
    display: str | None = Field(None, description="Accepted, and has no effect.")


class SchemaOutput(Fields):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    """The form of the answer."""

    effort: Effort | None = Field(None, description="reasoning_effort of chat completions.")
    format: SchemaOutput | None = None


@with_ignored_fields
class TokensRequest(Fields):
    """A request for the number of a prompt's tokens."""

    model: str | None = None
    messages: Annotated[list[InMessage], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[InTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @property
    def for_chat(self) -> dict[str, Any]:
        """The fields of chat completions."""
        system = [] if self.system is None else [{"role": "system", "content": _text(self.system)}]
        choice, form = self.tool_choice, self.output_config and self.output_config.format
        fields = {
            "model": self.model,
            "messages": [*system, *itertools.chain.from_iterable(message.for_chat for message in self.messages)],
            "tools": [tool.for_chat for tool in self.tools] if self.tools else None,
            "tool_choice": choice and choice.for_chat,
            "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
            "chat_template_kwargs": self.thinking and {"enable_thinking": self.thinking.type != "disabled"},
            "reasoning_effort": self.output_config and self.output_config.effort,
            "response_format": form
            and {"type": "json_schema", "json_schema": {"name": "output", "schema": form.schema_}},
        }
        return without_nulls(fields)

    def chat(self) -> ChatRequest:
        """The request for chat completions that it stands for."""
        return validated(ChatRequest, self.for_chat)

    def call(self, model: ServedModel, limits: Limits) -> Call:
        return self.chat().call(model, limits)


@with_ignored_fields
class MessagesRequest(TokensRequest):
    """A request for the next message of a conversation."""

    max_tokens: Count
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    stream: bool | None = None

    def chat(self) -> ChatRequest:
        names = {
            "max_tokens": "max_tokens",
            "stop": "stop_sequences",
            **{n: n for n in ("temperature", "top_p", "top_k")},
        }
        options = without_nulls({ours: getattr(self, theirs) for ours, theirs in names.items()})
        stream = {"stream": True, "stream_options": {"include_usage": True}} if self.stream else {}
        return validated(ChatRequest, self.for_chat | options | stream)

    def answer(self, call: Call) -> MessageAnswer:
        return MessageAnswer(call, self.chat())


class MessageAnswer(ChatCompletion):
    """The answer to one call, in Anthropic's shape."""

    _end: Part = Part()

    def ending(self, part: Part) -> dict[str, Any]:
        self._end = part if part.end is not None else self._end
        return super().ending(part)

    def body(self, results: Sequence[Result]) -> dict[str, Any]:
        completion = super().body(results)
        (choice,) = completion["choices"]
        message = choice["message"]
        thoughts = message.get("reasoning_content")
        content = [{"type": "thinking", "thinking": thoughts, "signature": ""}] if thoughts else []
        content += [{"type": "text", "text": message["content"]}] if message["content"] else []
        content += [
            {**_call_block(call), "input": _arguments(call["function"]["arguments"])}
            for call in message.get("tool_calls", ())
        ]
        return self._message(content) | self._stop(choice) | {"usage": _usage(completion["usage"])}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        return head | {"model": self.call.model.name, "content": content}

    def _stop(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Why the text ended. A stop string is in its tokens, but not in the text."""
        reason, sequence = STOP_REASONS[choice["finish_reason"]], None
        if reason == "end_turn" and (end := self._end.end) is not None:
            written = self.call.model.lm.decode_token(end.token_ids)
            matches = [stop for stop in self.call.plan.options.stop_strings if stop in written]
            reason, sequence = ("stop_sequence", matches[0]) if matches else (reason, None)
        return {"stop_reason": reason, "stop_sequence": sequence}

    async def frames(self) -> AsyncIterator[bytes]:
        """Anthropic's events, grouped by iteration of the engine."""
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None}
        prompt = len(self.call.requests[0].prompt_ids)
        yield _event("message_start", message=message | {"usage": {"input_tokens": prompt, "output_tokens": 0}})
        block, stop = -1, dict[str, Any]()
        kind = ""

        def begin(new: str, content: dict[str, Any]) -> bytes:
            nonlocal block, kind
            end = _event("content_block_stop", index=block) if kind else b""
            block, kind = block + 1, new
            return end + _event("content_block_start", index=block, content_block=content)

        async for chunks in self.chunks():
            events = b""
            for choices, more in chunks:
                for choice in choices:
                    delta = choice["delta"]
                    if thoughts := delta.get("reasoning_content"):
                        empty = {"type": "thinking", "thinking": "", "signature": ""}
                        events += b"" if kind == "thinking" else begin("thinking", empty)
                        added = {"type": "thinking_delta", "thinking": thoughts}
                        events += _event("content_block_delta", index=block, delta=added)
                    if delta.get("content"):
                        events += b"" if kind == "text" else begin("text", {"type": "text", "text": ""})
                        added = {"type": "text_delta", "text": delta["content"]}
                        events += _event("content_block_delta", index=block, delta=added)
                    for call in delta.get("tool_calls", ()):
                        if "id" in call:
                            events += begin("tool_use", {**_call_block(call), "input": {}})
                        if text := call["function"]["arguments"]:
                            added = {"type": "input_json_delta", "partial_json": text}
                            events += _event("content_block_delta", index=block, delta=added)
                    if choice["finish_reason"] is not None:
                        stop = self._stop(choice)
                if "usage" in more:
                    events += _event("content_block_stop", index=block) if kind else b""
                    events += _event("message_delta", delta=stop, usage=_usage(more["usage"]))
                    events += _event("message_stop")
            if events:
                yield events


def _event(kind: str, **values: Any) -> bytes:
    return frame(to_json({"type": kind, **values}), kind)


def _call_block(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}


def _arguments(text: str) -> Any:
    """The arguments of a call. A call that was cut has none, which the stop reason shows."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
