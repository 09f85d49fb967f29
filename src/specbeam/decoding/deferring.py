"""When lazy beam search defers beams, and which of them it evaluates, by the measured costs of passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specbeam.decoding.candidates import Mask, Scores
from specbeam.tree import Nodes

Cost = Callable[[int], float]
"""The cost of a pass over a number of nodes, in seconds."""

MIN_SAVING = 0.2
"""Defer beams if that is expected to save this share of the seconds to come."""
PRIOR_LOSS, PRIOR_TOKENS = 2.0, 16
"""Assume that a text lost this much log-probability in this many tokens before its first one."""
MAX_LOST_STEPS = 1.0
"""Stop deferring once its passes, and those still to come for its steps, cost this many plain steps too much."""
MAX_LOSS_SHARE = 0.01
"""Deferring rests until lost seconds are this share of the plain steps since."""
LOGISTIC = 1.7
"""A logistic function of this many standard deviations is nearly a normal distribution."""


@dataclass(frozen=True)
class Deferred:
    """Beams that may have to be evaluated: the shortest first, beams of one length in their order.

    Attributes:
        nodes: their ends, int64 [n].
        scores: float32 [n].
        lengths: in new tokens, int64 [n].
        leading: those from which the search can go on, bool [n]. Without any, one of the others decides whether it can.
    """

    nodes: Nodes
    scores: Scores
    lengths: NDArray[np.int64]
    leading: Mask

    @property
    def best(self) -> int:
        """The place of the beam that most likely decides something: the best leading one, or without these the best."""
        return int(np.where(self.leading | ~self.leading.any(), self.scores, -np.inf).argmax())


class Policy(Protocol):
    """Decides when beams are deferred, and which of them are evaluated. The outcome does not depend on it."""

    def pays(self, scores: Scores, length: int) -> bool:
        """Whether to defer beams from here on.

        Args:
            scores: of all beams of a step, float32 [num_beams].
            length: of the beams, in new tokens.
        """

    def choose(self, deferred: Deferred) -> Mask:
        """The beams to evaluate in the next pass, at least one of them, bool [n]."""

    def add_drafted(self, steps: int) -> None:
        """Count steps that were taken thanks to drafts, beside the one step of the pass."""


class LikelyNeeded:
    """Defers the beams that the best text will probably not fall below.

    A beam is needed if the best text loses more log-probability until its end than the beam is below it now. The text
    is expected to go on losing what it has lost per token so far. The variance of the loss is assumed to be its mean.

    Args:
        longest: the length of the longest texts, in new tokens.
        num_beams: of the search.
        cost: of a pass.
    """

    def __init__(self, longest: int, num_beams: int, cost: Cost) -> None:
        self._longest = longest
        self._num_beams = num_beams
        self._cost = cost
        self._begin: int | None = None  # the length at which it began to defer
        self._spent = 0.0  # seconds of passes since
        self._gave_up = False
        self._rests_until = 0.0  # this length

    def pays(self, scores: Scores, length: int) -> bool:
        costs = self._costs()
        if self._begin is not None:
            lost_steps = self._spent / costs[-1] - (length - self._begin)
            self._rests_until = length + max(0.0, lost_steps) / MAX_LOSS_SHARE
            self._begin = None
        needed = self._chances(scores, float(scores[0]), length)
        needed[0] = 1.0
        expected = (needed * np.diff(costs, prepend=0.0)).sum()
        if length < self._rests_until or expected > (1 - MIN_SAVING) * costs[-1]:
            return False
        self._begin, self._spent, self._gave_up = length, 0.0, False
        return True

    def choose(self, deferred: Deferred) -> Mask:
        costs, best = self._costs(), deferred.best
        chances = self._chances(deferred.scores, float(deferred.scores[best]), int(deferred.lengths[best]))
        self._gave_up |= self._loses(deferred, chances, costs)
        if self._gave_up:  # all beams of one length after the other, as plain search
            chosen = deferred.lengths == deferred.lengths.min()
        else:
            chances[best] = np.inf
            likeliest = (-chances).argsort(kind="stable")[: self._num_beams]
            others = chances[likeliest[1:]]
            # A needed beam costs a further pass over one node if it is evaluated later.
            gains = others * costs[0] - (1 - others) * np.diff(costs)[: len(others)]
            count = 1 + int(np.cumsum([0.0, *gains]).argmax())
            chosen = np.isin(np.arange(len(chances)), likeliest[:count])
        self._spent += costs[min(int(chosen.sum()), self._num_beams) - 1]
        return chosen

    def add_drafted(self, steps: int) -> None:
        self._spent += steps * self._cost(1)  # drafts are made only where they cost less

    def _loses(self, deferred: Deferred, chances: NDArray[np.float64], costs: NDArray[np.float64]) -> bool:
        """Whether plain steps would have been cheaper, by more than may be lost."""
        assert self._begin is not None
        needed = np.bincount(deferred.lengths[(chances > 0.5) & ~deferred.leading], minlength=1)
        to_come = np.append(0.0, costs)[np.minimum(needed, self._num_beams)].sum()
        steps = int(deferred.lengths.max()) - self._begin
        return bool(self._spent + to_come > (steps + MAX_LOST_STEPS) * costs[-1])

    def _costs(self) -> NDArray[np.float64]:
        """Of passes over 1 node, 2 nodes, and so on up to all beams, float64 [num_beams]."""
        return np.maximum.accumulate([self._cost(nodes) for nodes in range(1, self._num_beams + 1)])

    def _chances(self, scores: Any, best: float, length: int) -> NDArray[np.float64]:
        """The chances that beams with these scores, float [n], are needed, given the best one's score and length."""
        loss = (PRIOR_LOSS - best) / (PRIOR_TOKENS + length) * max(1, self._longest - length)
        deviations = (scores.astype(np.float64) - best + loss) / np.sqrt(loss)
        return np.asarray(1 / (1 + np.exp(np.clip(-LOGISTIC * deviations, -50, 50))))
