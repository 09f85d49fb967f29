"""``/v1/chat/completions``: the next message of a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from specbeam.errors import SpecbeamError
from specbeam.models.prompts import Rendering
from specbeam.server.answers import Answer, AnswerStream, ReadCall
from specbeam.server.call import Call
from specbeam.server.errors import Refusal
from specbeam.server.fields import NewTokens, TopLogprobs, content_of
from specbeam.server.ignored_fields import Effort, Fields, TextAlone, with_ignored_fields, without_nulls
from specbeam.server.limits import Limits
from specbeam.server.models import ServedModel
from specbeam.server.tokens import Part, chat_log_probs
from specbeam.server.tools import (
    MAX_TOOLS,
    AsSent,
    FunctionTool,
    OpenAIToolChoice,
    ToolCall,
    ToolFields,
    conversation,
)
from specbeam.structured.thoughts import thinking_variables
from specbeam.structured.tools.reader import Delta
from specbeam.text import chat_templates

ROLES = {"developer": "system"}
"""OpenAI's newer name of a role, and the name that chat templates know."""
NAME = r"^[^\s<|\\/>]+$"
"""The names that OpenAI takes. So none can look like a control token such as ``<|im_end|>``."""


@with_ignored_fields
class TextPart(Fields):
    """A part of a message."""

    type: Annotated[Literal["text"], TextAlone]
    text: str
    source_lang_code: str | None = Field(None, description="For the chat template of TranslateGemma.")
    target_lang_code: str | None = Field(None, description="For the chat template of TranslateGemma.")


@with_ignored_fields
class Message(AsSent):
    """A message of a conversation. The chat template of the model says which roles there are."""

    role: str
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = Field(None, validate_default=True)
    name: Annotated[str, Field(pattern=NAME)] | None = Field(None, description="For the chat template: message.name.")
    reasoning_content: str | None = Field(None, description="Thoughts, for the chat template.")
    reasoning: str | None = Field(None, description="reasoning_content, in the words of vLLM.")
    tool_calls: list[ToolCall] | None = Field(None, description="The calls in an answer of the assistant.")
    tool_call_id: str | None = Field(None, description="The call that a message of the role tool answers.")

    _content_of = field_validator("content")(content_of)

    @property
    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        content: Any = self.content
        if isinstance(content, list):
            content = [
                part.model_dump(include={"type", "text", *chat_templates.LANGUAGES}, exclude_none=True)
                for part in content
            ]
        more = {
            "name": self.name,
            "reasoning_content": self.reasoning if self.reasoning_content is None else self.reasoning_content,
            "tool_calls": [call.for_template for call in self.tool_calls or ()] or None,
            "tool_call_id": self.tool_call_id,
        }
        return self.in_sent_order(role=ROLES.get(self.role, self.role), content=content, **without_nulls(more))


class TemplateFields(Fields):
    """How the chat template renders messages, as in vLLM and llama.cpp."""

    add_generation_prompt: bool | None = Field(
        None, description="The assistant begins a new message. If it is left out: unless the last one is continued."
    )
    continue_final_message: bool | None = Field(
        None, description="Continue the last message. If both are left out: if it is the assistant's."
    )
    chat_template_kwargs: dict[str, str | bool | int | float | None] | None = Field(
        None, description="Further variables of the chat template."
    )

    reasoning_effort: Effort | None = Field(
        None,
        description="For the chat template. One that only knows thoughts or none has none with none and minimal.",
    )

    def thinking(self, model: ServedModel) -> tuple[dict[str, Any], list[str]]:
        """The variables of the chat template that say how much the model thinks, and the fields without effect."""
        asked = (self.chat_template_kwargs or {}).get("enable_thinking")
        return thinking_variables(model.template, asked if isinstance(asked, bool) else None, self.reasoning_effort)

    def rendering(self, model: ServedModel) -> Rendering:
        variables = self.thinking(model)[0] | (self.chat_template_kwargs or {})
        for name in variables:
            if name in chat_templates.OWN_NAMES or name in model.lm.tokenizer.special_tokens_map:
                raise Refusal(f"chat_template_kwargs cannot set {name}: remove it", "chat_template_kwargs")
        try:
            return Rendering(self.add_generation_prompt, self.continue_final_message, variables)
        except SpecbeamError as error:
            raise Refusal(str(error), "continue_final_message") from error


@with_ignored_fields
class ChatRequest(TemplateFields, ToolFields):
    """A request for the next message of a conversation."""

    messages: Annotated[list[Message], Field(min_length=1)] = Field(
        description="A message of the assistant at the end is continued, unless continue_final_message is false."
    )
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: OpenAIToolChoice | None = None
    max_tokens: NewTokens | None = Field(None, description="-1: as many as the context has left.")
    max_completion_tokens: NewTokens | None = Field(None, description="max_tokens.")
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    def call(self, model: ServedModel, limits: Limits) -> Call:
        model.check_chat_template()
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise Refusal("max_tokens and max_completion_tokens are the same limit: leave one out", "max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise Refusal("top_logprobs goes with logprobs: true", "top_logprobs")
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        top = (self.top_logprobs or 0) if self.logprobs else None
        plan = self.plan(model, limits, name, limits.max_tokens, top)
        messages = self.with_schema(model, [message.for_template for message in self.messages])
        tools = self.tool_use(model, limits.max_tool_calls, messages)
        offered = self.offered if tools and tools.max_calls else ()
        messages, variables = conversation(model, messages, offered, "messages")
        rendering = replace(self.rendering(model), tools=variables)
        plan = plan.after_thoughts(model.thought_format) if tools is None else tools.plan(plan, model.thought_format)
        return Call(model, [messages], plan, limits, field="messages", rendering=rendering, tools=tools)

    def answer(self, call: Call) -> ChatCompletion:
        return ChatCompletion(call, self)


class ChatCompletion(Answer):
    """An answer of the assistant."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"
    fields: ChatRequest

    def __init__(self, call: Call, fields: ChatRequest) -> None:
        super().__init__(call, fields)
        self._streams: dict[int, AnswerStream | None] = {}  # by choice

    def choice(self, index: int, part: Part) -> dict[str, Any]:
        stream = self._stream_of(index)
        if self.fields.stream:
            message: dict[str, Any] = {"delta": {"content": part.text} if part.end is None else {}}
        elif stream is None:
            message = {"message": {"role": "assistant", "content": part.text, "refusal": None}}
        else:
            stream.push(part)
            more: dict[str, Any] = _reasoning(stream.thoughts) if stream.thoughts else {}
            more |= {"tool_calls": [*map(_call, stream.calls)]} if stream.calls else {}
            message = {"message": {"role": "assistant", "content": stream.content, "refusal": None, **more}}
        choice = {"index": index, **message, "logprobs": None, **self.ending(part)}
        if stream is not None and stream.calls and part.end is not None and part.end.is_complete:
            choice["finish_reason"] = "tool_calls"
        if self.fields.logprobs and (part.token_ids or not self.fields.stream):
            entries = chat_log_probs(self.call.model.texts, part)
            choice["logprobs"] = {"content": entries, "refusal": None}
        if self.fields.return_token_ids:
            choice["token_ids"] = part.token_ids
        return choice

    def changes(self, index: int, part: Part) -> Iterator[dict[str, Any]]:
        if (stream := self._stream_of(index)) is None:
            yield from super().changes(index, part)
            return
        deltas = [delta for change in stream.push(part) for delta in _deltas(change, stream.calls)]
        if not deltas and self.shows_tokens(part):
            deltas = [{"content": ""}]
        for delta in deltas:
            yield self.choice(index, replace(part, text="", end=None)) | {"delta": delta}
            part = Part()  # its tokens go with its first change

    def _stream_of(self, index: int) -> AnswerStream | None:
        """The reader of a choice; None if its text has neither thoughts nor calls."""
        if index not in self._streams:
            self._streams[index] = AnswerStream.of(self.call)
        return self._streams[index]

    def beginning(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def details(self) -> dict[str, Any]:
        prompt = {"prompt_token_ids": self.call.requests[0].prompt_ids} if self.fields.return_token_ids else {}
        ignored = self.fields.thinking(self.call.model)[1]
        without_effect = {"ignored_fields": ignored} if ignored else {}
        return without_effect | ({} if self.call.tools is None else self.call.tools.details) | prompt


def _reasoning(thoughts: str) -> dict[str, Any]:
    """Thoughts by both names that clients know."""
    return {"reasoning_content": thoughts, "reasoning": thoughts}


def _call(call: ReadCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _deltas(change: Delta, calls: Sequence[ReadCall]) -> Iterator[dict[str, Any]]:
    """The deltas of a message. The name of a call comes before its arguments."""
    if change.thoughts:
        yield _reasoning(change.thoughts)
    if change.call is None:
        if change.content:
            yield {"content": change.content}
        return
    if change.name is not None:
        yield {"tool_calls": [{"index": change.call, **_call(replace(calls[change.call], arguments=""))}]}
    if change.arguments:
        yield {"tool_calls": [{"index": change.call, "function": {"arguments": change.arguments}}]}
