"""The candidates of a step of beam search: continuations of beams, which may become beams or finish."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam.tree import Nodes, Tree

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

    def take(self, which: slice) -> Continuations:
        """Some of the continuations."""
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
        """These candidates, and then more."""
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

    Forbidden are tokens that a processor masks, beams that only fill up the beam width, and continuations of both.
    """
    return scores > FORBIDDEN_SCORE / 2
