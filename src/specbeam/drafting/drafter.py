"""The interface between a speculative strategy and its drafter. ``specbeam.drafting`` has the drafters."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specbeam.core.strategy import Evaluate
from specbeam.core.tree import Nodes, Tree
from specbeam.drafting.policy import DraftTokens as DraftTokens
from specbeam.drafting.policy.controller import Controller

Proposal = Generator[Evaluate, Any, DraftTokens]


class Drafter(Protocol):
    """Proposes draft tokens for one request."""

    @property
    def tree(self) -> Tree:
        """The tree whose nodes its model evaluates: the request's tree, unless it keeps another."""

    @property
    def controller(self) -> Controller:
        """Decides how far it drafts. The strategy reports the outcome of each round here."""

    def propose(self, tips: Nodes, scores: NDArray[np.float64]) -> Proposal:
        """Draft below the tips, int64 [b], whose sequences have these scores, float64 [b] (sums of log-probabilities).

        The tips are all beams, or the best one alone while lazy beam search defers the others.

        May yield ``Evaluate(nodes, drafting=True)``. Adds draft tokens with ``tree.draft`` to the request's tree. None
        of them ends its sequence, because the target's logits there are not needed.
        """
