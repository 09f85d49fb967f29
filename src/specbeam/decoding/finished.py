"""The finished hypotheses of beam search, which compete to be kept by transformers' rules."""

from __future__ import annotations

from collections.abc import Hashable
from copy import copy
from typing import Any

import numpy as np

from specbeam.decoding.candidates import FORBIDDEN_SCORE, Candidates, Top, forbid, highest_indices
from specbeam.tree import Nodes


def normalized(scores: Any, length: int, length_penalty: float) -> Any:
    """Log-probabilities / length ** length_penalty, in float32 as in transformers."""
    with np.errstate(all="ignore"):  # scores may be as large as float32 has, and divisors 0
        return scores / np.float32(length**length_penalty)


class Finished:
    """The finished hypotheses that are kept, best first.

    Args:
        places: how many to keep.

    Attributes:
        nodes: their last nodes, int64 [places]; -1 where a place is empty.
        ended: bool [places]. False for empty places, and for unfinished hypotheses that rounding puts there.
        possible: bool [places]. False also for forbidden hypotheses that are kept because there were fewer candidates
            than places.
        scores: log-probability / length ** length_penalty, float32 [places].
        texts: as of candidates, [places].
        full: whether every place has a finished hypothesis.
    """

    def __init__(
        self, places: int, length_penalty: float, early_stopping: bool | str, top: Top = highest_indices
    ) -> None:
        self.nodes: Nodes = np.full(places, -1)
        self.ended = np.zeros(places, dtype=bool)
        self.possible = np.zeros(places, dtype=bool)
        self.scores = np.full(places, FORBIDDEN_SCORE, np.float32)
        self.texts: list[Hashable] = [object() for _ in range(places)]
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
        places = len(self.nodes)
        competing = candidates.competing & candidates.first & (candidates.first.cumsum() <= places)
        scores = normalized(candidates.scores, length, self.length_penalty)
        texts = candidates.texts or [object() for _ in candidates.nodes]
        for i in np.flatnonzero(competing).tolist():
            if texts[i] in self.texts:
                place = self.texts.index(texts[i])
                if scores[i] > self.scores[place]:
                    self._empty(place)
                else:
                    competing[i] = False
        both = np.concatenate([self.scores, forbid(scores, ~competing)])
        best = self._top(both, places)
        self.scores = both[best]
        self.nodes = np.concatenate([self.nodes, candidates.nodes])[best]
        self.ended = np.concatenate([self.ended, competing])[best]
        self.full = bool(self.ended.all())
        self.possible = np.concatenate([self.possible, competing & candidates.possible])[best]
        texts = [*self.texts, *texts]
        self.texts = [texts[i] for i in best.tolist()]

    def _empty(self, place: int) -> None:
        self.nodes[place], self.scores[place], self.texts[place] = -1, FORBIDDEN_SCORE, object()
        self.ended[place] = self.possible[place] = False

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
