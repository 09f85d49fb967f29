"""Drafters: what guesses how a text goes on, for a strategy to have many guesses checked in one pass of the target."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specbeam.decoding import Evaluate
from specbeam.tree import NO_NODES, Nodes, Tree

if TYPE_CHECKING:
    from specbeam.drafting.pace import Pace


@dataclass(frozen=True)
class Guesses:
    """Nodes guessed below some tips.

    Attributes:
        nodes: int64 [n], parents before children, and the children of a node in the order they are to be tried in.
        chances: the drafter's estimate of the probability that each becomes part of the text, float64 [n].
        drawn_from: by parent, the distribution its children were drawn from, float64 [vocab]; the children of
            parents that are not there were not drawn.
    """

    nodes: Nodes = field(default_factory=lambda: NO_NODES)
    chances: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    drawn_from: Mapping[int, Tensor] = field(default_factory=dict)


Proposal = Generator[Evaluate, Tensor, Guesses]


class Drafter(Protocol):
    """Proposes guesses for one request.

    Attributes:
        tree: whose nodes it asks its model about; the request's own, unless it keeps another.
        pace: the sizes of its drafts; strategies tell it what came of them.
    """

    tree: Tree
    pace: Pace

    def propose(self, tips: Nodes, scores: NDArray[np.float64]) -> Proposal:
        """Guess below some tips, int64 [b], whose texts have these scores, float64 [b] (sums of log-probabilities).

        May yield ``Evaluate(nodes, drafting=True)``. Guesses are made with ``tree.guess`` on the request's tree. None
        of them ends its text: nothing would be evaluated there.
        """
