"""``/api/chat`` and ``/api/generate``: ollama's requests, converted to requests for completions, and their answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import Field

import specbeam
from specbeam.results import Result
from specbeam.server.answers import Answer
from specbeam.server.call import Call
from specbeam.server.chat import ChatRequest
from specbeam.server.completions import CompletionRequest
from specbeam.server.errors import Refusal, validated
from specbeam.server.fields import TopLogprobs
from specbeam.server.http import to_json
from specbeam.server.ignored_fields import Fields, with_ignored_fields, without_nulls
from specbeam.server.limits import Limits
from specbeam.server.models import Models, ServedModel

MACHINE_OPTIONS = (
    *("numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap"),
    *("use_mlock", "embedding_only", "num_thread", "num_keep", "penalize_newline"),
)
"""Options that change no text, but where and how ollama runs a model. The last one is about its penalties."""
FIELDS_ELSEWHERE = (
    *("model", "messages", "prompt", "suffix", "tools", "stream", "stream_options", "n", "echo", "logprobs"),
    *("top_logprobs", "return_token_ids", "trace", "response_format", "chat_template_kwargs"),
)
"""Fields of completions that are elsewhere in ollama's requests, or that its answers cannot have."""


class OllamaFunction(Fields):
    name: str
    arguments: dict[str, Any]
    index: int | None = None
    description: str | None = None


class OllamaCall(Fields):
    """A call in an answer that is given back."""

    function: OllamaFunction
    id: str | None = None
    type: str | None = None


@with_ignored_fields
class OllamaMessage(Fields):
    """A message of a conversation."""

    role: str
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


@with_ignored_fields
class OllamaRequest(Fields):
    """The fields that both endpoints share."""

    model: str | None = None
    stream: bool | None = Field(None, description="True if it is left out.")
    format: Literal["", "json"] | dict[str, Any] | None = Field(None, description='"json", or a JSON Schema.')
    options: dict[str, Any] | None = Field(None, description="num_predict, and fields of /v1/chat/completions.")
    think: bool | Literal["low", "medium", "high", "max"] | None = Field(
        None, description="Whether the model thinks, or how much, if the chat template has a variable for it."
    )
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    @property
    def for_completions(self) -> dict[str, Any]:
        """The fields that chat and text completions share."""
        options = {name: value for name, value in (self.options or {}).items() if name not in MACHINE_OPTIONS}
        if wrong := [name for name in options if name in FIELDS_ELSEWHERE]:
            raise Refusal(f"options: {', '.join(wrong)} cannot be there: remove it", "options")
        limit = options.pop("num_predict", options.get("max_tokens", -1))
        fields = {**options, "model": self.model, "stream": self.stream, "max_tokens": -1 if limit == -2 else limit}
        if self.stream:
            fields["stream_options"] = {"include_usage": True}
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format:
            fields["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "format", "schema": self.format},
            }
        return without_nulls(fields)

    @property
    def for_chat(self) -> dict[str, Any]:
        """The fields of chat completions."""
        fields: dict[str, Any] = {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        if isinstance(self.think, str):
            fields["reasoning_effort"] = self.think
        elif self.think is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": self.think}
        return self.for_completions | without_nulls(fields)

    def model_post_init(self, _: Any) -> None:
        self.model = self.model and self.model.removesuffix(":latest")
        self.stream = self.stream is not False


class OllamaChat(OllamaRequest):
    """A request for the next message of a conversation."""

    messages: Annotated[list[OllamaMessage], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None

    def chat(self) -> ChatRequest:
        """The request for chat completions that it stands for."""
        tools = {"tools": self.tools} if self.tools else {}
        return validated(ChatRequest, self.for_chat | {"messages": self._messages()} | tools)

    def _messages(self) -> list[dict[str, Any]]:
        """The conversation. Where calls have no ids, a result belongs to the next call of its name."""
        messages, open_calls, num_calls = list[dict[str, Any]](), list[tuple[str, str]](), 0
        for message in self.messages:
            converted: dict[str, Any] = {"role": message.role, "content": message.content or ""}
            if message.thinking:
                converted["reasoning_content"] = message.thinking
            for call in message.tool_calls or ():
                num_calls += 1
                name, call_id = call.function.name, call.id or f"call_{num_calls}"
                open_calls.append((name, call_id))
                function = {"name": name, "arguments": to_json(call.function.arguments)}
                converted.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
            if message.role == "tool":
                asked = message.tool_name, message.tool_call_id
                answered = [
                    (name, call_id)
                    for name, call_id in open_calls
                    if asked == (None, None) or name == asked[0] or call_id == asked[1]
                ]
                if not answered:
                    raise Refusal("messages: a message of the role tool answers no call before it", "messages")
                open_calls.remove(answered[0])
                converted["tool_call_id"] = answered[0][1]
            messages.append(converted)
        return messages

    def call(self, model: ServedModel, limits: Limits) -> Call:
        return self.chat().call(model, limits)

    def answer(self, call: Call) -> OllamaAnswer:
        return OllamaAnswer(self.chat().answer(call), "message")


@with_ignored_fields
class OllamaGenerate(OllamaRequest):
    """A request for a text: the answer to a prompt in the model's chat template, or what goes on from it."""

    prompt: Annotated[str, Field(min_length=1)]
    suffix: str | None = Field(None, description="What comes after the text, for models with fill-in-the-middle.")
    system: str | None = None
    raw: bool | None = Field(None, description="Without the chat template.")

    def inner(self, model: ServedModel) -> ChatRequest | CompletionRequest:
        """The request that it stands for."""
        if self.raw or self.suffix or not model.lm.has_chat_template:
            for name in ("system", "think", "logprobs"):
                if getattr(self, name):
                    raise Refusal(f"{name} goes with a chat template: leave it out, or raw and suffix", name)
            suffix = {"suffix": self.suffix} if self.suffix else {}
            return validated(CompletionRequest, self.for_completions | {"prompt": self.prompt} | suffix)
        system = [{"role": "system", "content": self.system}] if self.system else []
        return validated(ChatRequest, self.for_chat | {"messages": [*system, {"role": "user", "content": self.prompt}]})

    def call(self, model: ServedModel, limits: Limits) -> Call:
        return self.inner(model).call(model, limits)

    def answer(self, call: Call) -> OllamaAnswer:
        return OllamaAnswer(self.inner(call.model).answer(call), "response")


class OllamaAnswer:
    """The answer to one call, in ollama's shape: as one object, or as lines of JSON.

    Args:
        inner: the answer of completions.
        field: "message" or "response", which has the text.
    """

    def __init__(self, inner: Answer, field: str) -> None:
        self._inner = inner
        self._field = field

    def body(self, results: Sequence[Result]) -> dict[str, Any]:
        completion = self._inner.body(results)
        (choice,) = completion["choices"]
        message = choice.get("message", {"content": choice.get("text")})
        content = self._content(message["content"], message.get("tool_calls", ()), message.get("reasoning_content"))
        return self._part(content, choice) | self._end(choice, completion)

    def _content(
        self, text: str | None, calls: Sequence[dict[str, Any]] = (), thoughts: str | None = None
    ) -> dict[str, Any]:
        thinking = {"thinking": thoughts} if thoughts else {}
        if self._field == "response":
            return {"response": text or "", **thinking}
        message: dict[str, Any] = {"role": "assistant", "content": text or "", **thinking}
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        return {"message": message}

    def _part(self, content: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
        part = {"model": self._inner.call.model.name, "created_at": now(), **content, "done": False}
        log_probs = choice.get("logprobs")
        return part | ({"logprobs": log_probs["content"]} if log_probs else {})

    def _end(self, choice: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
        """The values of the last part."""
        usage, stats = more["usage"], more["specbeam"]
        first = stats["time_to_first_token"] or 0.0
        return {
            "done": True,
            "done_reason": "length" if choice["finish_reason"] == "length" else "stop",
            "total_duration": _nanoseconds(stats["seconds"]),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(first),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _nanoseconds(stats["seconds"] - first),
        }

    async def frames(self) -> AsyncIterator[bytes]:
        """The lines, grouped by iteration of the engine. A call comes when it is complete."""
        calls: dict[int, dict[str, Any]] = {}
        last: dict[str, Any] = {}
        async for chunks in self._inner.chunks():
            lines = []
            for choices, more in chunks:
                for choice in choices:
                    delta = choice.get("delta", {"content": choice.get("text")})
                    for call in delta.get("tool_calls", ()):
                        joined = calls.setdefault(
                            call["index"], call | {"function": call["function"] | {"arguments": ""}}
                        )
                        joined["function"]["arguments"] += call["function"]["arguments"]
                    if delta.get("content") or delta.get("reasoning_content"):
                        content = self._content(delta.get("content"), (), delta.get("reasoning_content"))
                        lines.append(self._part(content, choice))
                    last = choice if choice["finish_reason"] is not None else last
                if "usage" in more:
                    if calls:
                        lines.append(self._part(self._content("", [*calls.values()]), {}))
                    lines.append(self._part(self._content(""), {}) | self._end(last, more))
            if lines:
                yield b"".join(to_json(line).encode(errors="replace") + b"\n" for line in lines)


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A call in ollama's shape. A call that was cut has no arguments, which ``done_reason`` shows."""
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
    except ValueError:
        arguments = {}
    return {"id": call["id"], "function": {"name": call["function"]["name"], "arguments": arguments}}


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)


def now() -> str:
    return datetime.now(UTC).isoformat()


class ShowRequest(Fields):
    """A request for the description of a model."""

    model: str
    verbose: bool | None = Field(None, description="Accepted, and has no effect.")


def tags(models: Models) -> dict[str, Any]:
    """The models, as ``/api/tags`` and ``/api/ps`` list them."""
    return {"models": [_about(model) | {"name": model.name, "model": model.name} for model in models]}


def show(model: ServedModel) -> dict[str, Any]:
    has_tools = ["tools"] if model.has_tools else []
    info = {"general.architecture": "unknown", "unknown.context_length": model.lm.backend.context_length}
    thinks = ["thinking"] if model.thought_format is not None else []
    capabilities = ["completion", *has_tools, *thinks]
    template = model.lm.tokenizer.chat_template or ""
    return _about(model) | {"template": template, "model_info": info, "capabilities": capabilities}


def version() -> dict[str, str]:
    return {"version": specbeam.__version__}


def _about(model: ServedModel) -> dict[str, Any]:
    loaded = datetime.fromtimestamp(model.created, UTC).isoformat()
    return {"modified_at": loaded, "details": {"format": "specbeam", "quantization_level": model.lm.precision}}
