"""Draft tokens that will be accepted: where a constraint allows one token alone, it follows whatever the model says.

A JSON schema forces its keys and most of its punctuation. So one pass of the target goes through all of them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from specbeam.core.tree import Nodes
from specbeam.drafting.drafter import Chains, Drafter, Proposal
from specbeam.drafting.policy import SKIPPED, DraftTokens
from specbeam.drafting.policy.controller import Controller
from specbeam.structured.constraint_mask import ConstraintMask

MAX_FORCED_TOKENS = 32
"""Evaluate at most this many forced tokens in a pass."""


class ForcedTokens:
    """Proposes forced tokens below all tips, and asks another drafter where some tip has none.

    Args:
        chains: makes nodes of them, at most ``MAX_FORCED_TOKENS``.
        controller: of the other drafter, or one that learns nothing.
        other: None if nothing else drafts.
    """

    def __init__(
        self, chains: Chains, constraint: ConstraintMask, controller: Controller, other: Drafter | None
    ) -> None:
        self.tree = chains.tree if other is None else other.tree
        self.controller = controller
        self._chains = chains
        self._constraint = constraint
        self._other = other

    def below(self, tips: Nodes) -> DraftTokens:
        """Forced tokens below each of the tips, int64 [n], equally many. None if some tip has none."""
        different = np.unique(tips)
        depth, forced = self._chains.max_draft_tokens // len(different), []
        for tip in different.tolist():
            forced.append(self._constraint.forced(self._chains.tree, tip, depth))
            depth = len(forced[-1])
            if not depth:
                return DraftTokens()  # a step of beam search needs all its beams
        chains = [[tokens[:depth]] for tokens in forced]
        drafted = self._chains.draft(different, chains, 1)
        return replace(drafted, certain=len(drafted.nodes) > 0)

    def propose(self, tips: Nodes, scores: NDArray[np.float64]) -> Proposal:
        if (forced := self.below(tips)).certain:
            return forced
        return SKIPPED if self._other is None else (yield from self._other.propose(tips, scores))
