"""The candidates of a step of beam search, and the finished hypotheses that are kept.

Candidates are continuations of beams. They become beams or, if they have ended, compete to be kept by transformers'
rules.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam.core.tree import Nodes, Tree

FORBIDDEN_SCORE = -1e9
"""Marks the scores of candidates that must not be chosen. Finite as in transformers: it is above -inf."""

Scores = NDArray[np.float32]
Mask = NDArray[np.bool_]
Top = Callable[[Any, int], NDArray[np.int64]]
"""Gives the indices of the highest of scores [n], in order, by how many."""


@dataclass
class Continuations:
    """Tokens after beams, best first.

    Attributes:
        beams: the numbers of the beams, int64 [k].
        tokens: int64 [k].
        scores: of the beams with their tokens, float32 [k].
        log_probs: of the tokens, by the model itself, float32 [k].
    """

    beams: NDArray[np.int64]
    tokens: Nodes
    scores: Scores
    log_probs: Scores

    def take(self, which: slice | NDArray[np.int64]) -> Continuations:
        return Continuations(self.beams[which], self.tokens[which], self.scores[which], self.log_probs[which])

    def merged_with(self, more: Continuations, count: int) -> Continuations:
        """The best of these and of continuations of other beams. Ties are resolved by the rank of the beam."""
        names = ("beams", "tokens", "scores", "log_probs")
        both = Continuations(*(np.concatenate([getattr(self, name), getattr(more, name)]) for name in names))
        best = np.lexsort((both.beams, -both.scores))[:count]
        return Continuations(*(getattr(both, name)[best] for name in names))

    def add(self, tree: Tree, beams: Nodes) -> Nodes:
        """Add the tokens to the tree below their beams, which end at these nodes. Return the new nodes, int64 [k]."""
        return tree.add(beams[self.beams], self.tokens, self.log_probs)


@dataclass
class Candidates:
    """Continuations of beams, best first.

    Attributes:
        nodes: int64 [k].
        scores: sums of processed log-probabilities, float32 [k].
        ended: bool [k].
        competing: which candidates may be kept as finished hypotheses, bool [k].
        texts: equal for candidates that may not both be kept, [k]; None if all differ.
        any_ended: whether any of them has ended.
    """

    nodes: Nodes
    scores: Scores
    ended: Mask
    competing: Mask
    texts: list[Hashable] | None
    any_ended: bool

    def followed_by(self, more: Candidates) -> Candidates:
        texts = None if self.texts is None or more.texts is None else [*self.texts, *more.texts]
        return Candidates(
            np.concatenate([self.nodes, more.nodes]),
            np.concatenate([self.scores, more.scores]),
            np.concatenate([self.ended, more.ended]),
            np.concatenate([self.competing, more.competing]),
            texts,
            self.any_ended or more.any_ended,
        )

    @cached_property
    def first(self) -> Mask:
        """Which candidates are the best of their text, bool [k]."""
        if self.texts is None or len({*self.texts}) == len(self.texts):
            return np.ones(len(self.nodes), dtype=bool)
        best: dict[Hashable, int] = {}
        for i in (-self.scores).argsort(kind="stable").tolist():  # candidates may come as they were drawn
            best.setdefault(self.texts[i], i)
        first = np.zeros(len(self.nodes), dtype=bool)
        first[[*best.values()]] = True
        return first

    @property
    def possible(self) -> Mask:
        """Which candidates are possible sequences, bool [k]; see :func:`possible`."""
        return possible(self.scores)


def highest_indices(scores: NDArray[Any], count: int) -> NDArray[np.int64]:
    """The indices of the highest scores, [n], in order, int64 [count or n]. Ties are resolved by the order given.

    Unlike ``torch.topk``, whose order among equal scores depends on ``count`` and on n.
    """
    below = -scores
    if len(below) > 4 * count:  # to sort all takes longer
        among = np.flatnonzero(below <= np.partition(below, count - 1)[count - 1])
        return among[below[among].argsort(kind="stable")[:count]]
    return below.argsort(kind="stable")[:count]


def forbid(scores: Scores, mask: Mask) -> Scores:
    """Scores [n] with FORBIDDEN_SCORE added where the mask, bool [n], is true."""
    return np.where(mask, scores + np.float32(FORBIDDEN_SCORE), scores)


def possible(scores: Any) -> Any:
    """Which scores, float32 [...], do not include FORBIDDEN_SCORE. No sum of log-probabilities is nearly as low.

    Masked tokens include it, beams that only fill up the beam width, and continuations of both.
    """
    return scores > FORBIDDEN_SCORE / 2


def normalized(scores: Any, length: int, length_penalty: float) -> Any:
    """Log-probabilities / length ** length_penalty, in float32 as in transformers."""
    with np.errstate(all="ignore"):  # scores may be as large as float32 has, and divisors 0
        return scores / np.float32(length**length_penalty)


class Finished:
    """The finished hypotheses that are kept, best first.

    Args:
        size: how many to keep.
        top: the indices of the highest scores, with ties in the search's order.

    Attributes:
        nodes: their last nodes, int64 [size]; -1 where there is none yet.
        ended: bool [size]. False where there is none yet, or where rounding let an unfinished hypothesis in.
        possible: bool [size]. False also for forbidden hypotheses that are kept because there were fewer candidates.
        scores: log-probability / length ** length_penalty, float32 [size].
        texts: as of candidates, [size].
        full: whether as many are finished.
    """

    def __init__(self, size: int, length_penalty: float, early_stopping: bool | str, top: Top) -> None:
        self.nodes: Nodes = np.full(size, -1)
        self.ended = np.zeros(size, dtype=bool)
        self.possible = np.zeros(size, dtype=bool)
        self.scores = np.full(size, FORBIDDEN_SCORE, np.float32)
        self.texts: list[Hashable] = [object() for _ in range(size)]
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self._top = top
        self.full = False

    def compete(self, candidates: Candidates, length: int) -> None:
        """Let candidates compete to be kept. Of equal texts only the best is.

        Of equal scores, a hypothesis that was kept before comes first, and then the candidates in their order. Only the
        first candidates with different texts take part, as many as are kept. The others fill up the beams.
        """
        if not candidates.any_ended or (self.early_stopping is True and self.full) or not candidates.competing.any():
            return
        size = len(self.nodes)
        competing = candidates.competing & candidates.first & (candidates.first.cumsum() <= size)
        scores = normalized(candidates.scores, length, self.length_penalty)
        texts = candidates.texts or [object() for _ in candidates.nodes]
        for i in np.flatnonzero(competing).tolist():
            if texts[i] in self.texts:
                at = self.texts.index(texts[i])
                if scores[i] > self.scores[at]:
                    self._empty(at)
                else:
                    competing[i] = False
        both = np.concatenate([self.scores, forbid(scores, ~competing)])
        best = self._top(both, size)
        self.scores = both[best]
        self.nodes = np.concatenate([self.nodes, candidates.nodes])[best]
        self.ended = np.concatenate([self.ended, competing])[best]
        self.full = bool(self.ended.all())
        self.possible = np.concatenate([self.possible, competing & candidates.possible])[best]
        texts = [*self.texts, *texts]
        self.texts = [texts[i] for i in best.tolist()]

    def _empty(self, at: int) -> None:
        self.nodes[at], self.scores[at], self.texts[at] = -1, FORBIDDEN_SCORE, object()
        self.ended[at] = self.possible[at] = False

    def settled(self, best_running: np.float32, length: int, max_new_tokens: int) -> bool:
        """Whether transformers' rules end the search, given the best beam's log-probability and its length."""
        if self.early_stopping is True and self.full:
            return True
        worst = float(self.scores[-1]) if self.full else FORBIDDEN_SCORE
        return self.hope(best_running, length, max_new_tokens) <= worst

    def hope(self, best_running: np.float32, length: int, max_new_tokens: int) -> float:
        """The score that transformers' rules compare with the worst finished hypothesis, for the best beam."""
        hopeful = max_new_tokens if self.early_stopping == "never" and self.length_penalty > 0 else length
        return float(normalized(best_running, hopeful, self.length_penalty))

    def copy(self) -> Finished:
        """A copy that can be changed independently."""
        same = copy(self)
        same.nodes, same.ended, same.possible = self.nodes.copy(), self.ended.copy(), self.possible.copy()
        same.scores, same.texts = self.scores.copy(), [*self.texts]
        return same
