"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, in vLLM's shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from specbeam.errors import SpecbeamError
from specbeam.models.prompts import token_ids
from specbeam.server.chat import Message, TemplateFields
from specbeam.server.errors import Refusal, refusal_of
from specbeam.server.fields import TokenId
from specbeam.server.ignored_fields import Fields
from specbeam.server.models import ServedModel
from specbeam.server.tools import MAX_TOOLS, FunctionTool, conversation, repeats_calls


class TokenizeRequest(TemplateFields):
    """A request for the tokens of a text, or of messages in the model's chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = Field(None, description="For a prompt, and true if it is left out.")
    return_token_strs: bool | None = Field(None, description="Add the tokens as the vocabulary writes them.")

    def answer(self, model: ServedModel) -> dict[str, Any]:
        """The tokens. Called in a thread."""
        if (self.prompt is None) == (self.messages is None):
            raise Refusal("give either prompt or messages", "prompt")
        if self.messages is not None and self.add_special_tokens:
            raise Refusal("add_special_tokens goes with prompt: a chat template has its own", "add_special_tokens")
        for name in ("tools", *TemplateFields.model_fields):
            if self.messages is None and getattr(self, name):
                raise Refusal(f"{name} goes with messages: a prompt has no chat template", name)
        tokenizer = model.lm.tokenizer
        field = "prompt" if self.messages is None else "messages"
        try:
            if self.messages is not None:
                model.check_chat_template()
                messages = [message.for_template for message in self.messages]
                visible = () if repeats_calls(messages) else self.tools or ()
                messages, variables = conversation(model, messages, visible, field)
                ids = model.encode(messages, rendering=replace(self.rendering(model), tools=variables))
            else:
                special = self.add_special_tokens is not False
                ids = token_ids(tokenizer, self.prompt or "", add_special_tokens=special)
        except SpecbeamError as error:
            raise refusal_of(error, {}, field) from error
        answer = {"count": len(ids), "max_model_len": model.lm.backend.context_length, "tokens": ids}
        return answer | ({"token_strs": tokenizer.convert_ids_to_tokens(ids)} if self.return_token_strs else {})


class DetokenizeRequest(Fields):
    """A request for the text of tokens. Special tokens are written out."""

    model: str | None = None
    tokens: list[TokenId]

    def answer(self, model: ServedModel) -> dict[str, Any]:
        """The text. Called in a thread."""
        size = model.lm.backend.vocab_size
        for token in self.tokens:
            if token >= size:
                raise Refusal(f"token id {token} is not in the model's vocabulary of {size}", "tokens")
        return {"prompt": model.lm.decode_token(self.tokens)}


def tokenizer_info(model: ServedModel) -> dict[str, Any]:
    """The special tokens and the chat template, with which the evaluation harness needs no other tokenizer."""
    tokenizer = model.lm.tokenizer
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return {
        "tokenizer_class": getattr(tokenizer, "kind", type(tokenizer).__name__),
        **{name: None if token is None else str(token) for name, token in tokens.items()},
        "chat_template": tokenizer.chat_template,
        "model_max_length": model.lm.backend.context_length,
    }
