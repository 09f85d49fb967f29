"""``/v1/completions``: OpenAI's older endpoint, for texts without a chat template."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from specbeam.engine import Request
from specbeam.models.prompts import is_batch
from specbeam.server.answers import Answer
from specbeam.server.call import Call
from specbeam.server.errors import Refusal
from specbeam.server.fields import Decoding, NewTokens, TokenId, TopLogprobs
from specbeam.server.ignored_fields import with_ignored_fields
from specbeam.server.limits import Limits
from specbeam.server.models import ServedModel
from specbeam.server.tokens import CompletionLogProbs, Part

MAX_TOKENS = 16
"""Without ``max_tokens``, as OpenAI documents."""
Tokens = Annotated[list[TokenId], Field(min_length=1)]


@with_ignored_fields
class CompletionRequest(Decoding):
    """A request for texts that go on from prompts."""

    prompt: str | Tokens | Annotated[list[str], Field(min_length=1)] | Annotated[list[Tokens], Field(min_length=1)] = (
        Field(description="A text, token ids, or a list of either.")
    )
    max_tokens: NewTokens | Literal[0] | None = Field(
        None, description="16 if it is left out. -1: as many as the context has left."
    )
    logprobs: TopLogprobs | None = Field(None, description="Likeliest tokens at each position.")
    echo: bool | None = Field(None, description="Begin with the prompt, also in logprobs.")
    suffix: str | None = Field(None, description="What comes after the text, for models with fill-in-the-middle.")

    def call(self, model: ServedModel, limits: Limits) -> Call:
        plan = self.plan(model, limits, "max_tokens", MAX_TOKENS, self.logprobs)
        prompts: Any = self.prompt if is_batch(self.prompt) else [self.prompt]
        scored = self.logprobs if self.echo else None
        if self.suffix and (self.echo or not all(isinstance(prompt, str) for prompt in prompts)):
            raise Refusal("suffix goes with prompts that are texts, and without echo", "suffix")
        return Call(
            model,
            prompts,
            plan,
            limits,
            field="prompt",
            raw=True,
            suffix=self.suffix or None,
            prompt_top=scored,
            writes=self.max_tokens != 0,
        )

    def answer(self, call: Call) -> Completion:
        return Completion(call, self)


class Completion(Answer):
    """A text completion."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"
    fields: CompletionRequest

    def __init__(self, call: Call, fields: CompletionRequest) -> None:
        super().__init__(call, fields)
        self._log_probs: dict[int, CompletionLogProbs] = {}  # by choice

    def choice(self, index: int, part: Part) -> dict[str, Any]:
        token_ids = part.token_ids
        if self.fields.echo and not self.fields.stream:
            part = self._prompt(index) + part
        choice = {"index": index, "text": part.text, "logprobs": None, **self.ending(part)}
        if self.fields.logprobs is not None:
            choice["logprobs"] = self._log_probs_of(index)(part)
        if self.fields.return_token_ids:
            choice["token_ids"] = token_ids
            if not self.fields.stream:
                choice["prompt_token_ids"] = self._request(index).prompt_ids
        return choice

    def beginning(self, index: int) -> dict[str, Any] | None:
        if not self.fields.echo and not self.fields.return_token_ids:
            return None
        choice = self.choice(index, self._prompt(index) if self.fields.echo else Part())
        if self.fields.return_token_ids:
            choice |= {"token_ids": [], "prompt_token_ids": self._request(index).prompt_ids}
        return choice

    def _request(self, index: int) -> Request:
        """The first request for the prompt of a choice."""
        return self.call.once_per_prompt(self.call.requests)[index // self.call.plan.n]

    def _prompt_text(self, index: int) -> str:
        prompt = self.call.prompts[index // self.call.plan.n]
        return prompt if isinstance(prompt, str) else self.call.model.lm.decode(self._request(index).prompt_ids)

    def _log_probs_of(self, index: int) -> CompletionLogProbs:
        if index not in self._log_probs:
            model, echoed = self.call.model, self._prompt_text(index) if self.fields.echo else None
            self._log_probs[index] = CompletionLogProbs(model.lm, model.texts, self._request(index).prompt_ids, echoed)
        return self._log_probs[index]

    def _prompt(self, index: int) -> Part:
        """The prompt of a choice, as if it were a part of the text."""
        plan = self.call.plan
        request = index // plan.n * plan.draws
        if self.fields.stream and not plan.searches:
            request = index  # the prompt of each text is scored before the text begins
        ids, text = self.call.requests[request].prompt_ids, self._prompt_text(index)
        if self.fields.logprobs is None:
            return Part(text, ids)
        scores = self.call.prompt_scores[request]
        return Part(text, ids, [None, *scores.log_probs], [{}, *scores.top_logprobs])
