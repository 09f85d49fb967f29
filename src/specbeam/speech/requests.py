"""What the engine is asked about windows, the texts that it answers with, and tasks that share its passes."""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from specbeam.core.selection import Selection, SelectionRequest
from specbeam.core.strategy import Evaluate, Hypothesis, Strategy
from specbeam.decoding.setup import MakeStrategy
from specbeam.decoding.strategies import make_strategy
from specbeam.drafting.drafter import Drafter
from specbeam.drafting.lookup import Continued
from specbeam.engine import Engine, Request, Setup
from specbeam.engine.drafts import Draft, is_lookup
from specbeam.engine.shared_source import SharedSource
from specbeam.results import Result, TopLogProbs
from specbeam.results import Sequence as Hypotheses
from specbeam.speech.transcript import Alternative, Segment
from specbeam.speech.vocabulary import Vocabulary

MAX_LOOKUP_TOKENS = 1 << 14
"""The last tokens of a file that lookups search: about an hour of speech. More would take longer than a pass."""


class ScorePromptThen:
    """A strategy that first records how likely some tokens are after one of the prompt, before any mask.

    Args:
        index: of the token in the prompt.
        tokens: ids.
        goes_on: with the method that the options name. Otherwise the request ends there.

    Attributes:
        log_probs: of the tokens, in their order. Empty until then.
    """

    def __init__(self, index: int, tokens: Sequence[int], goes_on: bool = True) -> None:
        self._index, self._tokens, self._goes_on = index, [*tokens], goes_on
        self.log_probs: list[float] = []

    def __call__(self, setup: Setup, drafter: Drafter | None) -> Strategy:
        return self._strategy(setup, drafter)

    def _strategy(self, setup: Setup, drafter: Drafter | None) -> Generator[Any, Selection, list[Hypothesis]]:
        tokens = np.array([self._tokens], np.int64)
        selection = yield Evaluate([self._index], SelectionRequest(top=0, given=tokens))
        assert selection.given is not None
        self.log_probs = selection.given[0].tolist()
        if not self._goes_on:
            return [Hypothesis(setup.tree.tip, 0.0, "stop")]
        return (yield from make_strategy(setup, drafter))


@dataclass(frozen=True)
class WindowRequest:
    """A request to the engine, about the audio of one window.

    Attributes:
        features: fallback attempts share them.
        prompt: token ids.
        options: of :class:`specbeam.Options`.
        strategy, writes: as in :meth:`specbeam.Engine.submit`.
        drafts: whether a draft may be given.
        transcribed: the tokens of the file so far, which lookups search beside the prompt.
    """

    features: SharedSource
    prompt: list[int]
    options: dict[str, Any]
    strategy: MakeStrategy | None = None
    writes: bool = True
    drafts: bool = True
    transcribed: Sequence[int] = ()


@dataclass(frozen=True)
class Text:
    """A text of a window. Its measures are as in :class:`specbeam.speech.Segment`.

    Attributes:
        tokens: without the end token.
        log_probs, top_logprobs: of these tokens. The latter are None unless they were asked for.
        alternatives: the different texts of the window, this one first.
    """

    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    log_probs: list[float]
    top_logprobs: TopLogProbs | None
    alternatives: list[Alternative]

    @classmethod
    def of(cls, result: Result, vocabulary: Vocabulary, temperature: float, no_speech_prob: float) -> Text:
        """The best of the sequences: beams are ranked, and of samples the likeliest per token is taken."""
        ranked = result.sequences
        if temperature:
            likelihood = {id(one): _log_prob(one) / max(1, len(_without_end(one, vocabulary))) for one in ranked}
            ranked = sorted(ranked, key=lambda one: likelihood[id(one)], reverse=True)
        alternatives: dict[str, Alternative] = {}
        for one in ranked:
            alternative = _alternative(one, vocabulary)
            alternatives.setdefault(alternative.text, alternative)
        best, text = ranked[0], next(iter(alternatives.values()))
        many = len(text.tokens)
        return cls(
            tokens=text.tokens,
            temperature=temperature,
            avg_logprob=text.avg_logprob,
            compression_ratio=text.compression_ratio,
            no_speech_prob=no_speech_prob,
            log_probs=best.log_probs[:many],
            top_logprobs=None if best.top_logprobs is None else best.top_logprobs[:many],
            alternatives=[*alternatives.values()],
        )


def _alternative(sequence: Hypotheses, vocabulary: Vocabulary) -> Alternative:
    tokens = _without_end(sequence, vocabulary)
    text = vocabulary.decode(tokens)
    average, compression = _log_prob(sequence) / (len(tokens) + 1), compression_ratio(text.strip())
    return Alternative(text, tokens, sequence.score, average, compression)


def compression_ratio(text: str) -> float:
    """The bytes of a text by the bytes that zlib makes of them."""
    written = text.encode()
    return len(written) / len(zlib.compress(written))


def _log_prob(sequence: Hypotheses) -> float:
    """The log-probability of a sequence, of each token among the allowed ones."""
    assert sequence.allowed_log_probs is not None
    return math.fsum(sequence.log_probs) - math.fsum(sequence.allowed_log_probs)


def _without_end(sequence: Hypotheses, vocabulary: Vocabulary) -> list[int]:
    return sequence.token_ids[:-1] if sequence.token_ids[-1:] == [vocabulary.end] else sequence.token_ids


@dataclass(eq=False)
class Task:
    """Work whose steps wait for the engine.

    Attributes:
        steps: requests, whose results it is sent; final segments; and tasks to begin, before others.
        file: the number of the file that it is about.
        part: its number among the tasks of the file; None for the one that begins them.
    """

    steps: Steps
    file: int
    part: int | None = None


Steps = Generator[WindowRequest | Segment | list[Task], Any, None]


def run_together(
    engine: Engine, tasks: Iterable[Task], max_requests: int, draft: Draft | None = None
) -> Iterator[tuple[Task, Segment | None]]:
    """Let tasks share an engine's passes.

    A task is begun when fewer than ``max_requests`` others are. If the caller leaves, or an error comes up, all
    requests are cancelled.

    Yields:
        Each final segment with its task. At the end of a task, the task and None.
    """
    later, next_tasks = iter(tasks), deque[Task]()
    waiting: dict[Request, Task] = {}
    answered: SimpleQueue[Request] = SimpleQueue()

    def go_on(task: Task, result: Result | None) -> Iterator[tuple[Task, Segment | None]]:
        """Let a task take steps until it waits for the engine, or ends."""
        while True:
            try:
                step = task.steps.send(result)
            except StopIteration:
                yield task, None
                return
            result = None
            if isinstance(step, WindowRequest):
                request = _submit(engine, step, draft)
                waiting[request] = task
                request.add_done_callback(answered.put)
                return
            if isinstance(step, Segment):
                yield task, step
            else:
                next_tasks.extend(step)

    try:
        while True:
            while len(waiting) < max_requests and (task := next_tasks.popleft() if next_tasks else next(later, None)):
                yield from go_on(task, None)
            if not waiting:
                return
            while answered.empty() and not engine.is_running:
                engine.step()
            request = answered.get()
            yield from go_on(waiting.pop(request), request.result())
    finally:
        for request in waiting:
            request.cancel()
        with suppress(Exception):
            while not (engine.is_running or all(request.done for request in waiting)):
                engine.step()


def _submit(engine: Engine, request: WindowRequest, draft: Draft | None) -> Request:
    if is_lookup(draft):
        draft = Continued(draft, request.transcribed[-MAX_LOOKUP_TOKENS:])
    return engine.submit(
        request.prompt,
        request.options,
        draft=draft if request.drafts else None,
        strategy=request.strategy,
        features=request.features,
        writes=request.writes,
    )
