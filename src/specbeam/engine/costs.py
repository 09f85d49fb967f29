"""Costs of passes: measured where passes of about the same size have run, estimated elsewhere."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from specbeam.backends.contract import Backend

NODES_PER_NOMINAL_COST = 32
"""Assume that this many more nodes cost as much again as a pass over one node."""
NOMINAL_DRAFT_COST_SHARE = 0.2
"""Assume that a pass of a draft model costs this share of a pass of the target."""
MAX_SIZE_RATIO = 4
"""Interpolate between measured sizes only if they differ by at most this factor."""
UNMEASURED_SECONDS = 1e-3
"""Assume this for a pass over one node before the first measurement: less than most passes take."""
DRIFT_WEIGHT = 0.1
"""Each measurement moves the expectation by this power of the ratio between them."""


def nominal_cost(nodes: float) -> float:
    """The estimated cost of a pass, in passes over one node."""
    return 1 + nodes / NODES_PER_NOMINAL_COST


def nominal_draft_cost(nodes: float) -> float:
    """The estimated cost of a pass of a draft model, in passes of the target over one node."""
    return NOMINAL_DRAFT_COST_SHARE * nominal_cost(nodes)


class PassTimes:
    """Seconds that a backend's passes took lately, by their number of nodes. They include the use of the logits."""

    def __init__(self) -> None:
        self._sizes = self._seconds = np.empty(0)  # powers of two, ascending, and the seconds of passes of that size
        self._first: dict[float, float] = {}  # seconds of the first pass of each size, which may have been slow

    def add(self, nodes: int, seconds: float) -> None:
        """Take in a measured pass."""
        size = 2.0 ** round(np.log2(nodes))
        at = int(np.searchsorted(self._sizes, size))
        if size not in self._first:
            self._first[size] = seconds
        elif size not in self._sizes:
            self._sizes = np.insert(self._sizes, at, size)
            self._seconds = np.insert(self._seconds, at, min(self._first[size], seconds))
        else:
            # A busy machine slows down passes of all sizes, including sizes that were last measured a while ago.
            slowdown = np.clip(seconds / self._seconds[at], 0.5, 2.0) ** DRIFT_WEIGHT
            self._seconds *= slowdown
            self._seconds[at] *= slowdown

    def expected(self, nodes: int) -> float:
        """Expected seconds of a pass.

        Where no pass of about this size was measured, the estimate is low on purpose: only sizes that are tried come to
        be measured.
        """
        if not len(self._sizes):
            return UNMEASURED_SECONDS * nominal_cost(nodes)
        below = int(np.searchsorted(self._sizes, nodes, side="right")) - 1
        if below < 0:  # smaller than all measured sizes: a share of the smallest, and little for each further node
            one = self._seconds[0] / self._sizes[0]
            return float(min(one * nominal_cost(nodes) / nominal_cost(1), self._seconds[0]))
        sizes, seconds = self._sizes[below : below + 2], self._seconds[below : below + 2]
        if len(sizes) == 2 and sizes[1] <= MAX_SIZE_RATIO * sizes[0]:
            return float(np.interp(nodes, sizes, seconds))
        growth = nominal_cost(nodes) / nominal_cost(sizes[0])
        if below and sizes[0] <= MAX_SIZE_RATIO * self._sizes[below - 1]:  # go on with the slope between the last two
            slope = (seconds[0] - self._seconds[below - 1]) / (sizes[0] - self._sizes[below - 1])
            growth = max(growth, min(1 + slope * (nodes - sizes[0]) / seconds[0], nodes / sizes[0]))
        return float(min([seconds[0] * growth, *seconds[1:]]))


_pass_times: WeakKeyDictionary[Backend[Any], PassTimes] = WeakKeyDictionary()


def pass_times(backend: Backend[Any]) -> PassTimes:
    """The times of a backend's passes. They outlive an engine."""
    return _pass_times.setdefault(backend, PassTimes())
