"""Draft tokens of a head that reads hidden states of the target: multi-token prediction, EAGLE-3."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam.backends.contract import Backend
from specbeam.cache.slots import have_slots
from specbeam.core.tree import Nodes
from specbeam.drafting.drafter import Proposal
from specbeam.drafting.model import ModelDrafter
from specbeam.drafting.policy import SKIPPED


class HeadDrafter(ModelDrafter):
    """Proposes as a draft model does, once the target has evaluated the parents of the tips.

    Args:
        target: whose features the head reads.
        others: as for :class:`ModelDrafter`.
    """

    def __init__(self, target: Backend, *others: Any) -> None:
        super().__init__(*others)
        self.target = target

    def propose(self, tips: Nodes, scores: NDArray[np.float64]) -> Proposal:
        parents = self.tree.parents(tips)
        if not (parents >= 0).all() or not have_slots(self.tree, self.target, parents):
            return SKIPPED
        return (yield from super().propose(tips, scores))
