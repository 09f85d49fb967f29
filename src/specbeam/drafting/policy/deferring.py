"""When lazy beam search defers beams, and which of them it evaluates, by the measured costs of forward passes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specbeam.core.tree import Nodes
from specbeam.drafting.policy import Cost
from specbeam.drafting.policy.acceptance import Rounds
from specbeam.drafting.policy.controller import Controller

MIN_DRAFTS_SAVING = 0.1
"""Draft below the best beam alone if that is expected to save this share of the seconds to come."""
LATER_PASS_COST = 1.5
"""A later pass over deferred beams costs this many passes over one node: it has more nodes, and more steps to take."""
PRIOR_LOSS, PRIOR_TOKENS = 0.6, 6
"""Assume that a hypothesis lost this much log-probability in this many tokens before its first one."""
MIN_RECENT_LOSS = 0.02
"""Add this to the log-probability lost per token lately: it can be 0."""
RECENT_TOKENS = 8
"""The last few tokens."""
OVERALL_POWER, RECENT_POWER = 0.7, 0.5
"""The expected loss of log-probability per token is (loss so far) ** OVERALL_POWER * (recent loss) ** RECENT_POWER.

Together they are above 1: a sequence that lost little so far loses less (docs/decisions/deferred-beams.md).
"""
LOSS_DEVIATION = 1.1
"""The standard deviation of the logarithm of the loss."""
MIN_LOSS = 0.05
"""Add this to a loss before its logarithm is taken: it can be 0."""
LOGISTIC = 1.7
"""A logistic function of this many standard deviations is nearly a normal distribution."""
IMPOSSIBLE_SCORE = -1e9
"""Counts as the score of hypotheses that are impossible, which score -inf."""

Scores = NDArray[np.float32]
Mask = NDArray[np.bool_]


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
        """The index of the beam that most likely decides something: the best leading one, or without these the best."""
        return int(np.where(self.leading | ~self.leading.any(), self.scores, -np.inf).argmax())


class LikelyNeeded:
    """Defers the beams that are unlikely to beat the expected final score. The outcome does not depend on it.

    A beam is needed if the last hypothesis that is returned loses more log-probability until its end than the beam is
    below it now. Texts differ in this loss by orders of magnitude, so its logarithm is assumed to be normal, around
    what the best hypothesis lost per token so far.

    Args:
        max_length: the length of the longest hypotheses, in new tokens.
        num_beams: of the search.
        cost: of a pass.
        plain_cost: of a pass over all beams, without lazy steps.
        num_returned: how many hypotheses are returned. At least this number of beams is needed.
        drafts: the controller of drafts that go below the best beam. Then each pass of a hypothesis that goes on alone
            can take several steps.
        later: the latest passes over deferred beams that were needed after all, if draft tokens save some of them.
    """

    def __init__(
        self,
        max_length: int,
        num_beams: int,
        cost: Cost,
        plain_cost: Cost,
        drafts: Controller | None = None,
        num_returned: int = 1,
        later: Rounds | None = None,
    ) -> None:
        self._max_length = max_length
        self._num_beams = num_beams
        self._num_returned = num_returned
        self._cost = cost
        self._plain_cost = plain_cost
        self._drafts = drafts
        self._later_rounds = later
        self._best = {0: 0.0}  # the score of the best hypothesis, by its length, since RECENT_TOKENS ago

    def should_defer(self, scores: Scores, length: int) -> bool:
        """Whether to defer beams from here on.

        Args:
            scores: of all beams of a step, float32 [num_beams].
            length: of the beams, in new tokens.
        """
        costs, probabilities = self._costs(), self._probabilities(scores, np.ones(len(scores), bool), 0, length)
        wanted = self._cheapest(probabilities, np.full(len(scores), length), costs)
        plain_cost = self._plain_cost(self._num_beams)
        return bool(costs[wanted.sum() - 1] < plain_cost) or self._should_draft(probabilities[1:], length, plain_cost)

    def should_draft(self, deferred: Deferred, count: int) -> bool:
        """Whether to draft below the best beam, where this many beams are evaluated."""
        best = deferred.best
        length = int(deferred.lengths[best])
        probabilities = self._probabilities(deferred.scores, deferred.leading, best, length)
        return self._should_draft(np.delete(probabilities, best), length, self._cost(count))

    def _should_draft(self, probabilities: NDArray[np.float64], length: int, cost: float) -> bool:
        """Whether drafts below the best beam alone are expected to make steps cheaper than they are without.

        The square of the highest probability fits measured costs of later passes (docs/decisions/deferred-beams.md).

        Args:
            probabilities: that each other beam is needed, float64 [n].
            length: of the best beam, in new tokens.
            cost: of a step without drafts, in seconds.
        """
        if self._drafts is None or not length:  # at first all beams are the prompt, which says nothing
            return False
        if self._drafts.reading_seconds and length < RECENT_TOKENS:  # due at once, and more will soon be known
            return False
        later = probabilities.max(initial=0.0) ** 2 * self._later(cost)
        saves = self._drafts.seconds_per_step(self._max_length - length) <= (1 - MIN_DRAFTS_SAVING) * cost - later
        if not saves:
            self._drafts.skip()
        return saves

    def choose(self, deferred: Deferred) -> Mask:
        """The beams to evaluate in the next pass, at least one of them, bool [n]."""
        best = deferred.best
        probabilities = self._probabilities(deferred.scores, deferred.leading, best, int(deferred.lengths[best]))
        return self._cheapest(probabilities, deferred.lengths, self._costs())

    def _cheapest(
        self, probabilities: NDArray[np.float64], lengths: NDArray[np.int64], costs: NDArray[np.float64]
    ) -> Mask:
        """The likeliest beams, as many as have the lowest expected costs, bool [n].

        A beam that is deferred but needed costs what it adds to a later pass. All beams of one length can share that
        pass. So the pass itself is needed with the probability of the likeliest deferred beam of this length.

        Args:
            probabilities: that each beam is needed, float64 [n].
            lengths: of the beams, in new tokens, int64 [n].
        """
        likeliest = (-probabilities).argsort(kind="stable")
        probabilities, lengths = probabilities[likeliest], lengths[likeliest]
        by_length = lengths.argsort(kind="stable")
        first, second = by_length[:-1], by_length[1:]
        of_next = np.zeros(len(probabilities))
        of_next[first] = probabilities[second] * (lengths[first] == lengths[second])
        added = (costs[-1] - costs[0]) / max(1, len(costs) - 1)
        later = probabilities * added + (probabilities - of_next) * LATER_PASS_COST * self._later(costs[0])
        maximum = min(len(probabilities), len(costs))
        count = 1 + int((costs[:maximum] - later[:maximum].cumsum()).argmin())
        cheapest = np.zeros(len(probabilities), bool)
        cheapest[likeliest[:count]] = True
        return cheapest

    def _later(self, cost: float) -> float:
        """The seconds of a later step, from the seconds of its pass without copies."""
        return cost if self._later_rounds is None else min(cost, self._later_rounds.seconds_per_step(cost))

    def _costs(self) -> NDArray[np.float64]:
        """Of passes over 1 node, 2 nodes, and so on up to all beams, float64 [num_beams]."""
        return np.maximum.accumulate([self._cost(nodes) for nodes in range(1, self._num_beams + 1)])

    def _probabilities(self, scores: Scores, leading: Mask, best: int, length: int) -> NDArray[np.float64]:
        """The probabilities that beams with these scores, float32 [n], are needed. The best one surely is.

        Args:
            leading: those from which the search can go on, bool [n].
            best: its index.
            length: of the best beam, in new tokens.
        """
        possible = np.maximum(scores.astype(np.float64), IMPOSSIBLE_SCORE)
        returned = np.sort(possible[leading])[::-1][: self._num_returned] if leading.any() else possible[[best]]
        gaps = np.maximum(returned[-1] - possible, 0.0)
        loss = self._loss_per_token(float(possible[best]), length) * max(1, self._max_length - length)
        deviations = (math.log(loss) - np.log(gaps + MIN_LOSS)) / LOSS_DEVIATION
        probabilities = np.asarray(1 / (1 + np.exp(np.clip(-LOGISTIC * deviations, -30, 30))))
        probabilities[gaps == 0] = probabilities[best] = 1.0
        return probabilities

    def _loss_per_token(self, score: float, length: int) -> float:
        """The log-probability that the best hypothesis, with this score and length, will probably lose per token."""
        self._best[length] = score
        before = max((known for known in self._best if known <= length - RECENT_TOKENS), default=min(self._best))
        self._best = {known: best for known, best in self._best.items() if known >= before}
        recent_prior = max(0, RECENT_TOKENS - length) * PRIOR_LOSS / PRIOR_TOKENS
        recent = (max(0.0, self._best[before] - score) + recent_prior) / max(RECENT_TOKENS, length - before)
        overall = (PRIOR_LOSS - score) / (PRIOR_TOKENS + length)
        return float(overall**OVERALL_POWER * (recent + MIN_RECENT_LOSS) ** RECENT_POWER)
