"""Processors that only a checkpoint's generation settings ask for: a request has no option for them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specbeam.errors import SpecbeamError
from specbeam.logits.bans import BadWords, BannedTokens, Bans, SequenceBias, SourceNgrams
from specbeam.options.declared import MAX_LOGIT_BIAS
from specbeam.options.generation_defaults import GenerationDefaults, is_number
from specbeam.options.options import Options

LARGEST_RAISE = 1e30
"""The most that a score is multiplied by. float32 has no numbers over 3e38."""


@dataclass(frozen=True, eq=False)
class Change:
    """An edit of the scores of some tokens, in the sequences that have certain numbers of new tokens.

    Attributes:
        kind: of the edit.
        tokens: which tokens, int64 [n].
        first, last: these numbers.
        only: no other token has a chance.
        values: of the edit, float32 [m], for sequences with numbers of new tokens, int64 [m].
    """

    kind: Literal["set", "raise"]
    tokens: NDArray[np.int64]
    first: int
    last: int
    only: bool
    values: Callable[[NDArray[np.int64]], NDArray[np.float32]]


def forced(tokens: Sequence[int], at: int) -> Change:
    """One of some tokens must follow: each has the score 0, and no other token has a chance."""
    return Change("set", np.array(tokens, dtype=np.int64), at, at, True, lambda new: np.zeros(len(new), np.float32))


def rising_end(start: int, factor: float, eos_token_ids: frozenset[int]) -> Change:
    """``exponential_decay_length_penalty``: beyond some new tokens, the scores of end tokens rise exponentially."""

    def power(exponent: int) -> float:
        try:
            return min(factor**exponent, LARGEST_RAISE)
        except OverflowError:
            return LARGEST_RAISE

    def values(new_tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        return (np.array([power(n) for n in (new_tokens - start).tolist()]) - 1).astype(np.float32)

    return Change("raise", np.array(sorted(eos_token_ids), dtype=np.int64), start + 1, sys.maxsize, False, values)


@dataclass(frozen=True)
class CheckpointProcessors:
    """What a checkpoint's generation settings change in the scores of one request, as transformers does.

    Attributes:
        biases: ``sequence_bias``.
        prompt_penalty: ``encoder_repetition_penalty``: the distinct tokens of the prompt, int32 [n], and the value of
            the edit "repeat" for them.
        bans: tokens that may not follow.
        changes: edits by the number of new tokens, in this order.
        raises: a log-probability may be raised above 0.
        renormalizes: ``renormalize_logits``.
    """

    biases: SequenceBias | None = None
    prompt_penalty: tuple[NDArray[np.int32], float] | None = None
    bans: tuple[Bans, ...] = ()
    changes: tuple[Change, ...] = ()
    raises: bool = False
    renormalizes: bool = False

    @property
    def may_forbid(self) -> bool:
        """Whether they may leave no token."""
        return bool(self.biases or self.bans or self.changes)


def processors_of_checkpoint(
    defaults: GenerationDefaults,
    options: Options,
    eos_token_ids: frozenset[int],
    prompt_ids: Sequence[int],
    begin: int,
    max_length: int,
    vocab_size: int,
) -> CheckpointProcessors:
    """The processors of one request. Token ids that no sequence can contain are left out, unless they are forced.

    Args:
        begin: the number of tokens that the sequence begins with. With an encoder these are its start tokens.

    Raises:
        SpecbeamError: a value that is not allowed, or a forced token that the model lacks. Names the file and the key.
    """
    read = _Reader(defaults, vocab_size)
    biases = read.sequence_bias()
    if options.constraint is not None:  # as GenerationDefaults.under_constraint: a constraint loses no token
        biases = {word: bias for word, bias in biases.items() if bias > -np.inf}
    bans: list[Bans] = []
    if ngrams := read.number("encoder_no_repeat_ngram_size", 0, "a whole number", integer=True):
        bans += [SourceNgrams(prompt_ids, int(ngrams))] if ngrams > 0 else []
    if options.bad_words_ids is None and (words := read.words("bad_words_ids")):
        bans.append(BadWords(words, eos_token_ids))
    suppressed, suppressed_first = read.tokens("suppress_tokens"), read.tokens("begin_suppress_tokens")
    forced_bos, forced_eos = (read.tokens(name, forced=True) for name in ("forced_bos_token_id", "forced_eos_token_id"))
    first = int(begin == 1 and bool(forced_bos))  # after the token that is forced there
    if suppressed:
        bans.append(BannedTokens(suppressed))
    if suppressed_first:
        bans.append(BannedTokens(suppressed_first, first, first))
    changes: list[Change] = []
    for tokens, at in (forced_bos, 1 - begin), (forced_eos, max_length - 1 - begin):
        banned = {*suppressed, *(suppressed_first if at == first else ())}
        if tokens and at >= 0:
            changes.append(forced([token for token in tokens if token not in banned], at))
    decay = read.decay()
    if decay is not None and eos_token_ids:
        changes.append(rising_end(*decay, eos_token_ids))
    penalty = read.number("encoder_repetition_penalty", 1.0, "0.00001 to 100000", lambda x: 1e-5 <= x <= 1e5)
    return CheckpointProcessors(
        biases=SequenceBias(biases) if biases else None,
        prompt_penalty=None if penalty == 1.0 else (np.unique(prompt_ids).astype(np.int32), 1 / penalty),
        bans=tuple(bans),
        changes=tuple(changes),
        raises=max(biases.values(), default=0.0) > 0 or (decay is not None and decay[1] > 1),
        renormalizes=read.flag("renormalize_logits"),
    )


class _Reader:
    """Reads checked values from generation settings."""

    def __init__(self, defaults: GenerationDefaults, vocab_size: int) -> None:
        self.defaults, self.vocab_size = defaults, vocab_size

    def number(self, name: str, otherwise: float, allowed: str, holds: Any = isfinite, integer: bool = False) -> float:
        value = self.defaults.get(name, otherwise)
        if not is_number(value, integer) or not holds(value):
            raise self.defaults.refused(name, allowed)
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.defaults.get(name, False)
        if not isinstance(value, bool):
            raise self.defaults.refused(name, "true or false")
        return value

    def tokens(self, name: str, forced: bool = False) -> list[int]:
        """The token ids of a field, without negative ones, which stand for no token."""
        value = self.defaults.get(name, [])
        tokens = value if isinstance(value, list | tuple) else [value]
        if not all(is_number(token, integer=True) for token in tokens):
            raise self.defaults.refused(name, "token ids")
        if forced and max(tokens, default=0) >= self.vocab_size:
            file = self.defaults.file
            raise SpecbeamError(
                f"the model's {file}: {name} {max(tokens)} is not in the vocabulary of {self.vocab_size}", option=name
            )
        return [int(token) for token in tokens if 0 <= token < self.vocab_size]

    def words(self, name: str) -> list[list[int]]:
        """Lists of token ids, without lists that no sequence can contain."""
        words = self.defaults.get(name, [])
        if not isinstance(words, list | tuple) or not all(map(_is_word, words)):
            raise self.defaults.refused(name, "lists of token ids")
        return [[*word] for word in words if all(0 <= token < self.vocab_size for token in word)]

    def sequence_bias(self) -> dict[tuple[int, ...], float]:
        """What is added, by words. In files these are pairs of a word and a number."""
        name = "sequence_bias"
        given = self.defaults.get(name, [])
        pairs = [*given.items()] if isinstance(given, Mapping) else given
        if not isinstance(pairs, list | tuple) or not all(map(_is_biased_word, pairs)):
            limits = f"numbers from -{MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}"
            raise self.defaults.refused(name, f"pairs of token ids and {limits}, such as [[[64, 45], -7.5]]")
        return {tuple(word): float(bias) for word, bias in pairs if all(0 <= token < self.vocab_size for token in word)}

    def decay(self) -> tuple[int, float] | None:
        name = "exponential_decay_length_penalty"
        value = self.defaults.get(name)
        if value is None:
            return None
        pair = [*value] if isinstance(value, list | tuple) else []
        if len(pair) != 2 or not is_number(pair[0], integer=True) or not is_number(pair[1]) or not 0 < pair[1] <= 1e5:
            raise self.defaults.refused(name, "a pair of a whole number and a factor over 0, such as [40, 1.05]")
        return int(pair[0]), float(pair[1])


def _is_word(word: Any) -> bool:
    return isinstance(word, list | tuple) and len(word) > 0 and all(is_number(token, integer=True) for token in word)


def _is_biased_word(pair: Any) -> bool:
    if not isinstance(pair, list | tuple) or len(pair) != 2 or not _is_word(pair[0]):
        return False
    bias = pair[1]
    return bias == -np.inf or (is_number(bias) and bool(abs(bias) <= MAX_LOGIT_BIAS))
