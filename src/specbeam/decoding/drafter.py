"""The interface between a speculative strategy and its drafter. ``specbeam.drafting`` has the drafters."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specbeam.decoding import Evaluate
from specbeam.tree import NO_NODES, Nodes, Tree


@dataclass(frozen=True)
class DraftTokens:
    """Nodes drafted below the tips of one round.

    Attributes:
        nodes: int64 [n], parents before children.
        chances: the drafter's estimate of the probability that each is accepted, float64 [n].
        width: the width that they were chosen with: draft tokens per level, or chains per beam.
        skipped: there are none, because drafting would not have paid. The backend may go ahead.
        seconds: expected for the draft model's passes.
    """

    nodes: Nodes = field(default_factory=lambda: NO_NODES)
    chances: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    width: int = 1
    skipped: bool = False
    seconds: float = 0.0


SKIPPED = DraftTokens(skipped=True)

Proposal = Generator[Evaluate, Any, DraftTokens]


class DraftController(Protocol):
    """How far one request drafts, by acceptance rates and the costs of passes.

    Attributes:
        max_draft_tokens: the most draft tokens in a pass of the target.
        max_drafted: the most nodes that the draft model evaluates in a round. Some may not become draft tokens.
        max_drafted_at_once: the most nodes at which a pass of the draft model needs logits.
    """

    max_draft_tokens: int
    max_drafted: int
    max_drafted_at_once: int

    @property
    def reading_seconds(self) -> float:
        """Expected seconds in which the draft model reads what it has not read: 0 for lookups."""

    def seconds_per_step(self, steps: int) -> float:
        """Expected seconds per step of rounds that draft below one tip, of which this many steps are to come."""

    def skip(self) -> None:
        """Take in a step without draft tokens below one tip: its statistics decay to the prior."""

    def learn(self, draft_tokens: DraftTokens, tree: Tree, steps: list[Nodes]) -> None:
        """Learn which draft tokens were accepted.

        Args:
            steps: the tips or the beams after each step of the round, int64 [b] each.
        """


class Drafter(Protocol):
    """Proposes draft tokens for one request."""

    @property
    def tree(self) -> Tree:
        """The tree whose nodes its model evaluates: the request's tree, unless it keeps another."""

    @property
    def controller(self) -> DraftController:
        """Decides how far it drafts. The strategy reports the outcome of each round here."""

    def propose(self, tips: Nodes, scores: NDArray[np.float64]) -> Proposal:
        """Draft below the tips, int64 [b], whose sequences have these scores, float64 [b] (sums of log-probabilities).

        The tips are all beams, or the best one alone while lazy beam search defers the others.

        May yield ``Evaluate(nodes, drafting=True)``. Adds draft tokens with ``tree.draft`` to the request's tree. None
        of them ends its sequence, because the target's logits there are not needed.
        """


class Copies(Protocol):
    """Proposes draft tokens below beams that come back, from the best hypothesis, which is ahead of them."""

    def seconds_per_step(self, otherwise: float) -> float:
        """Expected seconds per step of rounds in which beams come back.

        Args:
            otherwise: those without draft tokens.
        """

    def propose(self, tips: Nodes, best: int) -> DraftTokens:
        """Draft below those tips, int64 [n], that are shorter than the best hypothesis.

        Args:
            best: its end.
        """

    def learn(self, beams: Nodes, steps: int) -> None:
        """Take in the round.

        Args:
            beams: of the steps that are known now, int64 [n]: draft tokens among them are accepted.
            steps: how many steps became certain.
        """
