"""Costs of forward passes: measured where passes of about the same size have run and estimated elsewhere, or given."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from numbers import Real
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from specbeam.backends.contract import Backend
from specbeam.checkpoints.parts.experts import ExpertUse
from specbeam.errors import SpecbeamError, shown

NODES_PER_NOMINAL_COST = 32
"""Assume that this many more nodes cost as much again as a pass over one node."""
MIN_PASS_SECONDS, MAX_PASS_SECONDS = 1e-9, 1e9
"""No pass takes less or more. A clock that ticks slowly may measure 0, by which costs are divided."""
MAX_SIZE_RATIO = 4
"""Interpolate between measured sizes only if they differ by at most this factor."""
UNMEASURED_SECONDS = 1e-3
"""Assume this for a pass over one node before the first measurement: less than most passes take."""
DRIFT_WEIGHT = 0.1
"""Each measurement moves the expectation by this power of the ratio between them."""
TILE_NODES = 8
"""Native kernels multiply this many nodes with a weight while it is in a register. Fewer cost little less."""
MAX_TILES = 2**16
"""Far more than fit into a pass."""
MAX_NODE_COST_RATIO = 2
"""One pass changes the seconds per node by at most this factor: another program may have slowed it down."""


def nominal_cost(nodes: float, experts: ExpertUse | None = None) -> float:
    """The estimated cost of a pass, in passes over one node. More nodes read more of the experts, if there are any."""
    cost = 1 + nodes / NODES_PER_NOMINAL_COST
    return cost if experts is None else cost + experts.share * (experts.growth(nodes) - 1)


class Costs(Protocol):
    """What passes cost, for all decisions of an engine."""

    def __call__(self, backend: Backend, ahead: bool = False) -> PassCosts:
        """The costs of a backend's passes.

        Args:
            ahead: of passes that the backend runs by itself, several at a time, without Python between them.
        """


class CostTable:
    """Given costs: every decision that depends on them is the same in every run.

    Args:
        seconds: of a pass over a number of nodes.

    Raises:
        SpecbeamError: the function gives what no pass takes, such as 0 or NaN. Here it is asked about one node.
    """

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self._seconds = seconds
        self.expected(1)

    def expected(self, nodes: int) -> float:
        """The seconds of a pass.

        Raises:
            SpecbeamError: the function gives what no pass takes.
        """
        seconds = self._seconds(nodes)
        if not isinstance(seconds, Real) or not MIN_PASS_SECONDS <= float(seconds) <= MAX_PASS_SECONDS:
            raise SpecbeamError(
                f"the function of a CostTable gives {shown(seconds)} seconds for nodes={nodes}: give a "
                f"number from {MIN_PASS_SECONDS:g} to {MAX_PASS_SECONDS:g}"
            )
        return float(seconds)

    def knows(self, nodes: int) -> bool:
        """All passes are known."""
        return True

    def nodes_within(self, seconds: float) -> int:
        """The nodes of a pass that takes at most this long, but at least a tile of them."""
        tiles = bisect_right(range(1, MAX_TILES + 1), seconds, key=lambda tiles: self.expected(tiles * TILE_NODES))
        return max(1, tiles) * TILE_NODES

    def add(self, nodes: int, seconds: float) -> None:
        """Nothing changes."""


class Measured(NamedTuple):
    """Passes of about one size: the power of two that is nearest, their typical number of nodes, and of seconds."""

    size: float
    nodes: float
    seconds: float


class PassTimes:
    """Measured costs: seconds that a backend's passes took lately. They include the use of the logits.

    Args:
        fallback: the times to expect for sizes that were not measured.
        experts: what the backend's passes read of experts.
    """

    def __init__(self, fallback: PassTimes | None = None, experts: ExpertUse | None = None) -> None:
        self._fallback, self._experts = fallback, experts
        self._measured: list[Measured] = []  # by size, ascending. Replaced as a whole, because other threads read it
        self._first: dict[float, tuple[float, int]] = {}  # by size, the first pass, which may have been slow
        self._expected: dict[int, float] = {}  # since the last measurement
        self._node_seconds: float | None = None  # of the latest passes over a tile or more

    def add(self, nodes: int, seconds: float) -> None:
        """Record a measured pass."""
        seconds = max(seconds, MIN_PASS_SECONDS)
        if nodes >= TILE_NODES:
            latest, before = seconds / nodes, self._node_seconds or seconds / nodes
            self._node_seconds = min(max(latest, before / MAX_NODE_COST_RATIO), before * MAX_NODE_COST_RATIO)
        size = _size(nodes)
        known = next((entry for entry in self._measured if entry.size == size), None)
        if size not in self._first:
            self._first[size] = seconds, nodes
        elif known is None:
            seconds, nodes = min(self._first[size], (seconds, nodes))
            self._measured = sorted([*self._measured, Measured(size, nodes, seconds)])
        else:
            # A busy machine slows down passes of all sizes, including sizes that were last measured a while ago.
            slowdown = min(max(seconds / known.seconds, 0.5), 2.0) ** DRIFT_WEIGHT
            updated = Measured(size, known.nodes + DRIFT_WEIGHT * (nodes - known.nodes), known.seconds * slowdown**2)
            self._measured = [
                updated if entry is known else Measured(entry.size, entry.nodes, entry.seconds * slowdown)
                for entry in self._measured
            ]
        self._expected = {}

    def nodes_within(self, seconds: float) -> int:
        """The nodes of a pass that takes about this long: whole tiles, at least one.

        A node costs more the longer the sequences are, so only the latest passes count. Their whole time is attributed
        to their nodes, which is conservative: a part of it does not grow with the nodes.
        """
        tiles = round(seconds / self._node_seconds / TILE_NODES) if self._node_seconds else 0
        return max(1, tiles) * TILE_NODES

    def knows(self, nodes: int) -> bool:
        """Whether passes of about this size were measured, here or by the times to expect otherwise."""
        size = _size(max(1, nodes))
        return any(entry.size == size for entry in self._measured) or (
            self._fallback is not None and self._fallback.knows(nodes)
        )

    def expected(self, nodes: int) -> float:
        """Expected seconds of a pass.

        Where no pass of about this size was measured, the estimate is low on purpose: only sizes that are tried come to
        be measured.
        """
        if self._fallback is not None and all(entry.size != _size(max(1, nodes)) for entry in self._measured):
            return self._fallback.expected(nodes)
        expected = self._expected  # in an iteration, all requests ask about the same few sizes
        if nodes not in expected:
            expected[nodes] = self._estimate(nodes)
        return expected[nodes]

    def _estimate(self, nodes: int) -> float:
        measured = self._measured
        if not measured:
            return UNMEASURED_SECONDS * self._nominal(nodes)
        smallest = measured[0]
        smaller = [entry for entry in measured if entry.nodes <= nodes]
        if not smaller and _size(max(1, nodes)) >= smallest.size:  # in the first bin
            return smallest.seconds * self._nominal(nodes) / self._nominal(smallest.nodes)
        if not smaller:  # below all measured sizes: a share of the smallest, and little for each further node
            one_node = smallest.seconds / smallest.nodes
            return min(one_node * self._nominal(nodes) / self._nominal(1), smallest.seconds)
        below = smaller[-1]
        above = measured[len(smaller)] if len(smaller) < len(measured) else None
        if above is not None and above.size <= MAX_SIZE_RATIO * below.size:
            return below.seconds + _slope(below, above) * (nodes - below.nodes)
        growth = self._nominal(nodes) / self._nominal(below.nodes)
        if len(smaller) > 1 and below.size <= MAX_SIZE_RATIO * smaller[-2].size:
            further = _slope(smaller[-2], below) * (nodes - below.nodes)  # on with the slope between the last two
            growth = max(growth, min(1 + further / below.seconds, nodes / below.nodes))
        expected = below.seconds * growth
        return expected if above is None else min(expected, above.seconds)

    def _nominal(self, nodes: float) -> float:
        return nominal_cost(nodes, self._experts)


def _size(nodes: int) -> float:
    """The power of two that is nearest to a number of nodes."""
    return 2.0 ** round(math.log2(nodes))


def _slope(below: Measured, above: Measured) -> float:
    """Seconds per further node."""
    return (above.seconds - below.seconds) / (above.nodes - below.nodes)


PassCosts = CostTable | PassTimes
"""What passes of one backend cost."""
_pass_times: WeakKeyDictionary[Backend, tuple[PassTimes, PassTimes]] = WeakKeyDictionary()


def pass_times(backend: Backend, ahead: bool = False) -> PassTimes:
    """Measured costs, as :class:`Costs` says. They outlive an engine, and all engines share them."""
    single = PassTimes(experts=backend.expert_use)
    single, several = _pass_times.setdefault(backend, (single, PassTimes(single, backend.expert_use)))
    return several if ahead else single
