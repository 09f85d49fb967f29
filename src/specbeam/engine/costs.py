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
        # By bin: its size, a power of two, ascending; the typical number of nodes and of seconds of its passes. It is
        # replaced as a whole, because an interrupt may come between any two statements, and other threads read it.
        self._measured = np.empty((3, 0))
        self._first: dict[float, tuple[float, int]] = {}  # by bin, the first pass, which may have been slow
        self._expected: dict[int, float] = {}  # since the last measurement

    def add(self, nodes: int, seconds: float) -> None:
        """Take in a measured pass."""
        size = 2.0 ** round(np.log2(nodes))
        bins, sizes, all_seconds = self._measured
        at = int(np.searchsorted(bins, size))
        if size not in self._first:
            self._first[size] = seconds, nodes
        elif size not in bins:
            seconds, nodes = min(self._first[size], (seconds, nodes))
            self._measured = np.insert(self._measured, at, [size, nodes, seconds], axis=1)
        else:
            # A busy machine slows down passes of all sizes, including sizes that were last measured a while ago.
            slowdown = np.clip(seconds / all_seconds[at], 0.5, 2.0) ** DRIFT_WEIGHT
            measured = self._measured * [[1], [1], [slowdown]]
            measured[2, at] *= slowdown
            measured[1, at] += DRIFT_WEIGHT * (nodes - sizes[at])
            self._measured = measured
        self._expected = {}

    def expected(self, nodes: int) -> float:
        """Expected seconds of a pass.

        Where no pass of about this size was measured, the estimate is low on purpose: only sizes that are tried come to
        be measured.
        """
        expected = self._expected  # in a round, all requests ask about the same few sizes
        if nodes not in expected:
            expected[nodes] = self._estimate(nodes)
        return expected[nodes]

    def _estimate(self, nodes: int) -> float:
        all_bins, all_sizes, all_seconds = self._measured
        if not len(all_bins):
            return UNMEASURED_SECONDS * nominal_cost(nodes)
        below = int(np.searchsorted(all_sizes, nodes, side="right")) - 1
        if below < 0 and 2.0 ** round(np.log2(max(1, nodes))) >= all_bins[0]:  # in the first bin
            return float(all_seconds[0] * nominal_cost(nodes) / nominal_cost(all_sizes[0]))
        if below < 0:  # smaller than all measured sizes: a share of the smallest, and little for each further node
            one = all_seconds[0] / all_sizes[0]
            return float(min(one * nominal_cost(nodes) / nominal_cost(1), all_seconds[0]))
        sizes, seconds, bins = (array[below : below + 2] for array in (all_sizes, all_seconds, all_bins))
        if len(sizes) == 2 and bins[1] <= MAX_SIZE_RATIO * bins[0]:
            return float(np.interp(nodes, sizes, seconds))
        growth = nominal_cost(nodes) / nominal_cost(sizes[0])
        if below and bins[0] <= MAX_SIZE_RATIO * all_bins[below - 1]:  # go on with the slope between the last two
            slope = (seconds[0] - all_seconds[below - 1]) / (sizes[0] - all_sizes[below - 1])
            growth = max(growth, min(1 + slope * (nodes - sizes[0]) / seconds[0], nodes / sizes[0]))
        return float(min([seconds[0] * growth, *seconds[1:]]))


class SharedCost:
    """One request's cost of a pass that other requests share, in seconds.

    Its nodes cost what they add to the pass. The pass itself has to be run for all: each request bears an equal part.
    So a guess pays if it brings the request more than its time would bring all requests.

    Args:
        own_nodes: the request's nodes in a pass without guesses.
    """

    def __init__(self, times: PassTimes, own_nodes: int) -> None:
        self._times = times
        self._own_nodes = own_nodes
        self._other_nodes, self._requests = 0, 1

    def join(self, other_nodes: int, requests: int) -> None:
        """Take in the number of requests in the latest pass, and the nodes that the others bring to the next one."""
        self._other_nodes, self._requests = other_nodes, requests

    def __call__(self, nodes: int) -> float:
        """The cost of a number of its nodes. It is at least a part of the cost of the pass without guesses."""
        others, expected = self._other_nodes, self._times.expected
        together = expected(others + self._own_nodes)
        return together / self._requests + max(0.0, expected(others + nodes) - together)


_pass_times: WeakKeyDictionary[Backend[Any], PassTimes] = WeakKeyDictionary()


def pass_times(backend: Backend[Any]) -> PassTimes:
    """The times of a backend's passes. They outlive an engine."""
    return _pass_times.setdefault(backend, PassTimes())
