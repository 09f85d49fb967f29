"""What a strategy works with: the objects of one request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specbeam.core.strategy import Strategy
from specbeam.core.tree import Tree
from specbeam.drafting.drafter import Drafter
from specbeam.drafting.policy import SharedCost
from specbeam.logits.selector import Selector
from specbeam.logits.stopping import Stopping
from specbeam.options.options import Options
from specbeam.recording.record import Record


@dataclass(frozen=True)
class Setup:
    """The objects that the strategy and the drafter of one request share.

    Attributes:
        options: with the checkpoint's defaults filled in.
        tree: the prompt, or the start tokens of an encoder-decoder model.
        selector: makes the selection requests at nodes, with the request's processors, warpers and noise.
        stop: decides where sequences end.
        record: counts draft tokens, and remembers rounds for the trace.
        cost: of the target's passes for this request, in which it may evaluate any number of nodes.
        plain_cost: of passes without draft tokens, in which the backend goes ahead if it can.
    """

    options: Options
    tree: Tree
    selector: Selector
    stop: Stopping
    record: Record
    cost: SharedCost
    plain_cost: SharedCost


MakeStrategy = Callable[[Setup, Drafter | None], Strategy]
"""Makes the strategy of a request. The drafter is None without one."""
