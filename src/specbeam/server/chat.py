"""``/v1/chat/completions``: the next message of a conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from specbeam import chat_templates
from specbeam.errors import SpecbeamError
from specbeam.prompts import Rendering
from specbeam.server.answers import Answer
from specbeam.server.call import Call
from specbeam.server.errors import Refusal
from specbeam.server.fields import Count, Decoding, TopLogprobs, content_of
from specbeam.server.limits import Limits
from specbeam.server.models import ServedModel
from specbeam.server.neutral import Fields, with_neutral_fields
from specbeam.server.tokens import Part, chat_log_probs

ROLES = {"developer": "system"}
"""OpenAI's newer name of a role, and the name that chat templates know."""
NAME = r"^[^\s<|\\/>]+$"
"""The names that OpenAI takes. So none can look like a control token such as ``<|im_end|>``."""


class TextPart(Fields):
    """A part of a message."""

    type: Literal["text"]
    text: str


@with_neutral_fields
class Message(Fields):
    """A message of a conversation. The chat template of the model says which roles there are."""

    role: str
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = Field(None, validate_default=True)
    name: Annotated[str, Field(pattern=NAME)] | None = Field(None, description="For the chat template: message.name.")

    _content_of = field_validator("content")(content_of)

    @property
    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        content = [part.model_dump() for part in self.content] if isinstance(self.content, list) else self.content
        message = {"role": ROLES.get(self.role, self.role), "content": content}
        return message if self.name is None else message | {"name": self.name}


class TemplateFields(Fields):
    """How the chat template renders messages, as in vLLM and llama.cpp."""

    add_generation_prompt: bool | None = Field(
        None, description="The assistant begins a new message. If it is left out: unless the last one is continued."
    )
    continue_final_message: bool | None = Field(
        None, description="Continue the last message. If both are left out: if it is the assistant's."
    )
    chat_template_kwargs: dict[str, str | bool | int | float] | None = Field(
        None, description="Further variables of the chat template."
    )

    def rendering(self, model: ServedModel) -> Rendering:
        """The rendering that the fields ask for.

        Raises:
            Refusal: they contradict each other, or set what a template has in any case.
        """
        variables = self.chat_template_kwargs or {}
        for name in variables:
            if name in chat_templates.OWN_NAMES or name in model.lm.tokenizer.special_tokens_map:
                raise Refusal(f"chat_template_kwargs cannot set {name}: remove it", "chat_template_kwargs")
        try:
            return Rendering(self.add_generation_prompt, self.continue_final_message, variables)
        except SpecbeamError as error:
            raise Refusal(str(error), "continue_final_message") from error


@with_neutral_fields
class ChatRequest(TemplateFields, Decoding):
    """A request for the next message of a conversation."""

    messages: Annotated[list[Message], Field(min_length=1)] = Field(
        description="A message of the assistant at the end is continued, unless continue_final_message is false."
    )
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = Field(None, description="max_tokens.")
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    def call(self, model: ServedModel, limits: Limits) -> Call:
        """The requests to the engine."""
        model.check_chat_template()
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise Refusal("max_tokens and max_completion_tokens are the same limit: leave one out", "max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise Refusal("top_logprobs goes with logprobs: true", "top_logprobs")
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        top = (self.top_logprobs or 0) if self.logprobs else None
        plan = self.plan(model, limits, name, limits.max_tokens, top)
        messages = [message.for_template for message in self.messages]
        return Call(model, [messages], plan, limits, field="messages", rendering=self.rendering(model))

    def answer(self, call: Call) -> ChatCompletion:
        return ChatCompletion(call, self)


class ChatCompletion(Answer):
    """An answer of the assistant."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"
    fields: ChatRequest

    def choice(self, index: int, part: Part) -> dict[str, Any]:
        if self.fields.stream:
            said: dict[str, Any] = {"delta": {"content": part.text} if part.end is None else {}}
        else:
            said = {"message": {"role": "assistant", "content": part.text, "refusal": None}}
        made = {"index": index, **said, "logprobs": None, **self.ending(part)}
        if self.fields.logprobs and (part.token_ids or not self.fields.stream):
            entries = chat_log_probs(self.call.model.texts, part)
            made["logprobs"] = {"content": entries, "refusal": None}
        if self.fields.return_token_ids:
            made["token_ids"] = part.token_ids
        return made

    def beginning(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def details(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.call.requests[0].prompt_ids} if self.fields.return_token_ids else {}
