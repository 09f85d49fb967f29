"""One call of a client: its requests to the engine, and the window in which calls are submitted together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

from specbeam.api.scoring import PromptScores, score_prompt
from specbeam.core.strategy import Hypothesis, Strategy
from specbeam.decoding.setup import MakeStrategy, Setup
from specbeam.decoding.strategies import make_strategy
from specbeam.drafting.drafter import Drafter
from specbeam.drafting.lookup import Continued
from specbeam.engine import Request
from specbeam.engine.drafts import Draft, is_lookup
from specbeam.engine.engine_thread import batching_window
from specbeam.errors import PromptTooLong, SpecbeamError
from specbeam.models.answers import thought_tokens
from specbeam.models.prompts import ALSO_NEW, DEFAULT_RENDERING, Rendering, infilling_prompt, max_prompt_length
from specbeam.options.options import Options
from specbeam.results import Piece, Result
from specbeam.server.errors import Refusal, refusal_of
from specbeam.server.fields import SEEDS, Plan
from specbeam.server.limits import Limits
from specbeam.server.models import ServedModel
from specbeam.server.tools import ToolUse
from specbeam.system import child_processes
from specbeam.text import chat_templates

T = TypeVar("T")
TOO_LONG = "context_length_exceeded"
"""OpenAI's code, by which clients know that they have to shorten the conversation."""
Pieces = list[tuple[int, Piece]]
"""Pieces with the number of their request."""
QUIET_TURNS = 3
"""Turns of the event loop: in one of them a request is read, and in the next one its task begins. They take 0.1 ms."""


@dataclass(eq=False, repr=False)
class Call:
    """The prompts of a call and how to decode them. There are ``plan.draws`` requests for each prompt.

    Attributes:
        field: the field of the client's request that has the prompts.
        raw: do not apply the chat template.
        suffix: follows the texts, which fill in the middle; None if they end freely.
        rendering: how the chat template is applied.
        prompt_top: also score the prompts, with this many likeliest tokens at each position.
        writes: whether there are new tokens.
        requests: of all prompts, in their order.
        prompt_scores: for each request, if they were asked for.

    Raises:
        Refusal: more prompts or texts than the server takes.
    """

    model: ServedModel
    prompts: Sequence[Any]
    plan: Plan
    limits: Limits
    _: KW_ONLY
    field: str
    raw: bool = False
    suffix: str | None = None
    rendering: Rendering = DEFAULT_RENDERING
    prompt_top: int | None = None
    writes: bool = True
    tools: ToolUse | None = None

    def __post_init__(self) -> None:
        count, limit = len(self.prompts), self.limits.max_prompts
        if count > limit:
            raise Refusal(f"{count} prompts are more than this server's limit of {limit}", self.field)
        texts = count * self.plan.draws
        if texts > self.limits.max_requests + self.limits.max_waiting:
            raise Refusal(f"{texts} texts are more than this server takes at once", self.field)
        self.requests: list[Request] = []
        self.prompt_scores: list[PromptScores] = []
        self._encoded: list[list[int]] = []
        self._is_cancelled = False

    def once_per_prompt(self, values: Sequence[T]) -> Sequence[T]:
        """The values for the first request of each prompt."""
        return values[:: self.plan.draws]

    def thought_tokens(self, results: Sequence[Result]) -> int:
        """How many tokens of all answers are thoughts."""
        thought_format, lm = self.model.thought_format, self.model.lm
        if thought_format is None or self.raw:
            return 0
        return sum(
            thought_tokens(lm, request.prompt_ids, thought_format, text.token_ids)
            for request, result in zip(self.requests, results, strict=True)
            for text in result.sequences
        )

    @property
    def is_quick(self) -> bool:
        """Whether a short prompt is submitted at once: one request to the engine, and nothing to wait for."""
        is_one = len(self.prompts) * self.plan.draws == 1 and self.plan.output_spec is None
        return is_one and (self.raw or chat_templates.render.is_ready)

    def encode(self) -> None:
        """Make token ids of the prompts before ``submit``, which then hands the requests to the engine at once."""
        self._encoded = [self._encode(prompt) for prompt in self.prompts]

    @property
    def num_prompt_tokens(self) -> int:
        """Known after ``encode``."""
        return sum(map(len, self._encoded))

    def submit(self) -> None:
        """Submit the requests. Tokenizers and chat templates take long for long prompts."""
        try:
            with child_processes.wanted_while(lambda: not self._is_cancelled):
                self._submit()
        except BaseException:
            self._is_cancelled = True
            raise
        finally:
            if self._is_cancelled:  # also meanwhile
                self.cancel()

    def _submit(self) -> None:
        options = None
        for ids in self._encoded or map(self._encode, self.prompts):
            options = options or self._options(ids)
            for number in range(self.plan.draws):
                if self._is_cancelled:
                    return
                self._submit_one(ids, options, number)

    def _options(self, ids: list[int]) -> Options:
        plan, lm = self.plan, self.model.lm
        if plan.output_spec is None:
            return plan.options
        try:
            return replace(plan.options, constraint=plan.output_spec(lm, ids))  # each request compiles it
        except SpecbeamError as error:
            raise refusal_of(error, plan.names, plan.names["constraint"]) from error

    def _encode(self, prompt: Any) -> list[int]:
        backend, limit = self.model.lm.backend, self.limits.max_prompt_tokens
        context = backend.context_length
        fit = max_prompt_length(self.model.lm, self.writes)
        try:
            max_tokens = fit if limit is None else min(fit, limit)
            if self.suffix is not None:
                for text in filter(None, (prompt, self.suffix)):
                    self.model.encode(text, raw=True, max_tokens=max_tokens)  # a far longer one is tokenized in part
                prompt = infilling_prompt(self.model.lm, prompt, self.suffix)
            ids = self.model.encode(prompt, raw=self.raw, max_tokens=max_tokens, rendering=self.rendering)
        except PromptTooLong as error:
            says = f"the prompt has {error.tokens} tokens"
            if limit is not None and limit < fit:
                raise Refusal(f"{says}, and this server's limit is {limit:,}", self.field, TOO_LONG) from error
            says += f", but the model's context holds {context:,}{ALSO_NEW if fit < context else ''}: shorten it"
            raise Refusal(says, self.field, TOO_LONG) from error
        except SpecbeamError as error:
            raise Refusal(str(error), "suffix" if error.option == "suffix" else self.field) from error
        return ids

    def _submit_one(self, ids: list[int], options: Options, number: int) -> None:
        plan = self.plan
        strategy: MakeStrategy | None = None
        if options.seed is not None:
            options = replace(options, seed=(options.seed + number) % SEEDS)
        if self.prompt_top is not None or not self.writes:
            scores = PromptScores()
            self.prompt_scores.append(scores)
            options = replace(options, share_prefix=self.prompt_top is None)
            strategy = partial(self._strategy, scores=scores)
        try:
            request = self.model.engine.submit(
                ids,
                options,
                draft=self._draft if self.writes else None,
                strategy=strategy,
                priority=plan.priority,
                timeout=self.limits.timeout,
                writes=self.writes,
            )
        except (SpecbeamError, RuntimeError) as error:
            raise self._refusal(error) from error
        self.requests.append(request)

    @cached_property
    def _draft(self) -> Draft | None:
        """The draft of the plan. A lookup also searches calls of the tools."""
        draft = self.plan.draft
        if self.tools is None or not is_lookup(draft):
            return draft
        return Continued(draft, self.tools.examples(self.model.lm))

    def _strategy(self, setup: Setup, drafter: Drafter | None, scores: PromptScores) -> Strategy:
        """Score the prompt, and then go on as the options say."""
        if self.prompt_top is not None:
            yield from score_prompt(setup.tree, self.prompt_top, scores)
        if not self.writes:
            return [Hypothesis(setup.tree.tip, 0.0, "length")] * setup.options.num_return_sequences
        return (yield from make_strategy(setup, drafter))

    def cancel(self) -> None:
        """End the requests before the next pass."""
        self._is_cancelled = True
        for request in self.requests:
            request.cancel()

    async def results(self) -> list[Result]:
        try:
            return [await request for request in self.requests]
        except Exception as error:
            raise self._refusal(error) from error

    async def pieces(self) -> AsyncIterator[Pieces]:
        """The pieces of all requests as they come, grouped by iteration of the engine."""
        call_soon = asyncio.get_running_loop().call_soon_threadsafe
        received: Pieces = []
        ended: list[Request] = []
        has_news = asyncio.Event()

        def take(number: int, piece: Piece) -> None:
            received.append((number, piece))
            has_news.set()

        def end(request: Request) -> None:
            ended.append(request)
            has_news.set()

        for number, request in enumerate(self.requests):
            request.add_piece_callback(partial(take, number), call_soon)
            request.add_done_callback(end, call_soon)
        num_ended = 0
        while num_ended < len(self.requests):
            await has_news.wait()
            has_news.clear()
            num_ended = len(ended)
            for request in ended:
                if isinstance(request.outcome, Exception):
                    raise self._refusal(request.outcome) from request.outcome
            taken, received[:] = [*received], []
            yield taken

    def _refusal(self, error: Exception) -> Refusal:
        return refusal_of(error, self.plan.names, self.field)


class BatchingWindow:
    """Calls that arrive together are submitted together. Only the event loop knows that more are about to come."""

    def __init__(self) -> None:
        self._count = 0
        self._closing: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait until no further call comes at once."""
        self._count += 1
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for _ in batching_window(lambda: self._count):
            for _ in range(QUIET_TURNS):
                await asyncio.sleep(0)
        self._count, self._closing = 0, None
