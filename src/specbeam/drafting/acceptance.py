"""The chance that a draft token is accepted, by bucket, as seen lately."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

DECAY = 0.9
"""The share of their weight that a bucket's observations keep when later ones come."""
SKIP_DECAY = 0.98
"""The share of the distance to the prior that is left after a decode step without draft tokens."""
PRIOR_WEIGHT = 4.0
"""The weight of the prior, in observed tokens."""
PRIOR_PACE = 0.2
"""The prior follows rates below it, and goes back to where it began, at this share of their pace.

So a draft that fails each time it is tried again is tried ever more rarely.
"""


class Acceptance:
    """Acceptance rates. They begin at a prior, follow what is observed, and decay to the prior where nothing is.

    Args:
        prior: the rate to assume in each bucket, [buckets].
    """

    def __init__(self, prior: ArrayLike) -> None:
        self._first = np.asarray(prior, dtype=np.float64)
        self._prior, self._rates = self._first.copy(), self._first.copy()
        self._weights = np.full_like(self._first, PRIOR_WEIGHT)

    @property
    def chances(self) -> NDArray[np.float64]:
        """The chance that a draft token of each bucket is accepted, float64 [buckets]."""
        return np.minimum(self._rates, 1.0)

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
