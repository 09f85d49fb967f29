"""One text of one window: what is asked of the engine, and what its answer says."""

from __future__ import annotations

import math
import zlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbeam.core.selection import Selection, SelectionRequest
from specbeam.core.strategy import Evaluate, Hypothesis, Strategy
from specbeam.decoding.setup import MakeStrategy
from specbeam.decoding.strategies import make_strategy
from specbeam.drafting.drafter import Drafter
from specbeam.engine import Setup
from specbeam.engine.features import Sound
from specbeam.results import Result, TopLogProbs
from specbeam.results import Sequence as Hypotheses
from specbeam.speech.results import Alternative
from specbeam.speech.vocabulary import Vocabulary


class ScorePromptThen:
    """A strategy that first notes how likely some tokens are after one of the prompt, before any mask.

    Args:
        place: of the token in the prompt.
        tokens: ids.
        goes_on: with the method that the options name. Otherwise the request ends there.

    Attributes:
        log_probs: of the tokens, in their order. Empty until then.
    """

    def __init__(self, place: int, tokens: Sequence[int], goes_on: bool = True) -> None:
        self._place, self._tokens, self._goes_on = place, [*tokens], goes_on
        self.log_probs: list[float] = []

    def __call__(self, setup: Setup, drafter: Drafter | None) -> Strategy:
        return self._strategy(setup, drafter)

    def _strategy(self, setup: Setup, drafter: Drafter | None) -> Generator[Any, Selection, list[Hypothesis]]:
        given = np.array([self._tokens], np.int64)
        selection = yield Evaluate([self._place], SelectionRequest(top=0, given=given))
        assert selection.given is not None
        self.log_probs = selection.given[0].tolist()
        if not self._goes_on:
            return [Hypothesis(setup.tree.tip, 0.0, "stop")]
        return (yield from make_strategy(setup, drafter))


@dataclass(frozen=True)
class Attempt:
    """A request to the engine, about the sound of one window.

    Attributes:
        sound: the features, which several attempts share.
        prompt: token ids.
        options: of :class:`specbeam.Options`.
        strategy: as in :meth:`specbeam.Engine.submit`.
        writes: as there.
        drafts: whether a draft may be given.
        said: the tokens of the file so far, in which lookups look beside the prompt.
    """

    sound: Sound
    prompt: list[int]
    options: dict[str, Any]
    strategy: MakeStrategy | None = None
    writes: bool = True
    drafts: bool = True
    said: Sequence[int] = ()


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
            made = _alternative(one, vocabulary)
            alternatives.setdefault(made.text, made)
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
