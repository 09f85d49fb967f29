"""What the latest rounds have shown: which draft tokens are accepted, and how long a step takes with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

MATCH_LENGTHS = (1, 2, 3, 4, 8)
"""The buckets of draft tokens from lookups, by the length of the match in tokens: from each of these to the next."""
DECAY = 0.9
"""The share of their weight that observations keep when later ones come."""
SKIP_DECAY = 0.98
"""The share of the distance to the prior that is left after a decode step without draft tokens."""
PRIOR_WEIGHT = 4.0
"""The weight of the prior, in observed tokens."""
PRIOR_PACE = 0.2
"""The prior follows rates below it, and goes back to where it began, at this share of their pace.

So a draft that fails each time it is tried again is tried ever more rarely.
"""


def match_bucket(length: ArrayLike) -> Any:
    """The bucket of a draft token after a match of this length, from 1 on. Of an array of lengths, an array."""
    return np.searchsorted(MATCH_LENGTHS, length, side="right") - 1


class Acceptance:
    """Acceptance rates by bucket. They begin at a prior, follow what is observed, and decay to it where nothing is.

    Args:
        prior: the rate to assume in each bucket, [buckets].
    """

    def __init__(self, prior: ArrayLike) -> None:
        self._first = np.asarray(prior, dtype=np.float64)
        self._prior, self._rates = self._first.copy(), self._first.copy()
        self._weights = np.full_like(self._first, PRIOR_WEIGHT)

    @property
    def rates(self) -> NDArray[np.float64]:
        """The probability that a draft token of each bucket is accepted, float64 [buckets]."""
        return np.minimum(self._rates, 1.0)

    def surviving(self, matched: ArrayLike, depth: int) -> NDArray[np.float64]:
        """The probabilities that draft tokens after matches of these lengths are accepted down to each level.

        Args:
            matched: in tokens, one or [n]. An accepted token makes the match longer. 0 counts as 1.

        Returns:
            float64 [depth] or [n, depth].
        """
        return np.cumprod(self.rates[match_bucket(np.add.outer(np.maximum(matched, 1), np.arange(depth)))], axis=-1)

    def learn(self, bucket: int, accepted: float, proposed: float) -> None:
        """Take in how many of a bucket's draft tokens were accepted in a round."""
        before = DECAY * self._weights[bucket]
        weight = before + proposed
        self._rates[bucket] = (before * self._rates[bucket] + accepted) / weight
        self._weights[bucket] = weight
        if proposed:
            follows = self._prior[bucket] + PRIOR_PACE * (self._rates[bucket] - self._prior[bucket])
            self._prior[bucket] = min(self._first[bucket], follows)

    def skip(self) -> None:
        """Take in a decode step without draft tokens: decay towards the prior."""
        share = 1 - SKIP_DECAY
        self._prior += share * PRIOR_PACE * (self._first - self._prior)
        self._rates += share * (self._prior - self._rates)
        self._weights += share * (PRIOR_WEIGHT - self._weights)


@dataclass
class Rounds:
    """Seconds and steps of the rounds so far. The latest weigh most."""

    seconds: float = 0.0
    steps: float = 0.0

    def add(self, seconds: float, steps: float) -> None:
        self.seconds = DECAY * self.seconds + seconds
        self.steps = DECAY * self.steps + steps

    def skip(self) -> None:
        self.seconds *= SKIP_DECAY
        self.steps *= SKIP_DECAY

    def seconds_per_step(self, expected: float) -> float:
        """The seconds per step of the latest rounds, which begin at the expected ones."""
        return (self.seconds + PRIOR_WEIGHT * expected) / (self.steps + PRIOR_WEIGHT)
