"""What a request evaluates in its next pass: how many draft tokens, and which beams.

All of it follows from acceptance rates and from the costs of passes. It changes how fast a result comes, and no result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specbeam.core.tree import NO_NODES, Nodes

Cost = Callable[[int], float]
"""The cost of a pass over a number of nodes, in seconds."""


class SharedCost:
    """One request's cost of a pass that other requests share, in seconds.

    Its nodes cost what they add to the pass. The pass itself has to be run for all, so each request bears an equal
    part. A draft token thus saves time if its expected gain exceeds the delay to all requests.

    Args:
        expected: the cost of a pass.
    """

    def __init__(self, expected: Cost) -> None:
        self._expected = expected
        self._other_nodes, self._requests = 0, 1

    def join(self, other_nodes: int, requests: int) -> None:
        """Record the number of requests in the latest pass, and the nodes that the others bring to the next one."""
        self._other_nodes, self._requests = other_nodes, requests

    def __call__(self, nodes: int) -> float:
        """The cost of a number of its nodes. It is at least a part of the cost of the pass with one of them."""
        others, expected = self._other_nodes, self._expected
        together = expected(others + 1)
        return together / self._requests + max(0.0, expected(others + nodes) - together)


@dataclass(frozen=True)
class DraftTokens:
    """Nodes drafted below the tips of one round.

    Attributes:
        nodes: int64 [n], parents before children.
        probabilities: of a tree, the draft model's estimates that each is accepted, float64 [n].
        width: the width that they were chosen with: draft tokens per level, or chains per beam.
        skipped: there are none, because drafting would have saved no time. The backend may go ahead.
        seconds: expected for the draft model's passes.
        certain: each will be accepted, whatever the model says, so nothing is learned from them.
    """

    nodes: Nodes = field(default_factory=lambda: NO_NODES)
    probabilities: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    width: int = 1
    skipped: bool = False
    seconds: float = 0.0
    certain: bool = False


SKIPPED = DraftTokens(skipped=True)
