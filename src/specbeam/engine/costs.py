"""What passes cost: measured where passes of about that size ran, estimated elsewhere."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from specbeam.backends.contract import Backend


def nominal_cost(nodes: float) -> float:
    """What a pass over so many nodes costs where nothing was measured, in passes over one."""
    return 1 + nodes / 32


class PassTimes:
    """What passes of a backend, and the use of their logits, took lately, by how many nodes they had."""

    def __init__(self) -> None:
        self._sizes = self._seconds = np.empty(0)  # powers of two, ascending, and what passes of about that size took
        self._first: dict[float, float] = {}  # the same of sizes of which there was one pass: it may have been slow

    def add(self, nodes: int, seconds: float) -> None:
        size = 2.0 ** round(np.log2(nodes))
        at = int(np.searchsorted(self._sizes, size))
        if size not in self._first:
            self._first[size] = seconds
        elif size not in self._sizes:
            self._sizes = np.insert(self._sizes, at, size)
            self._seconds = np.insert(self._seconds, at, min(self._first[size], seconds))
        else:
            # What slows a machine down slows passes of all sizes, those too that were measured a while ago.
            slower = np.clip(seconds / self._seconds[at], 0.5, 2.0)
            self._seconds *= slower**0.1
            self._seconds[at] *= slower**0.1

    def expected(self, nodes: int) -> float:
        """Seconds a pass over so many nodes will take.

        A guess where none like it was measured, and a hopeful one: only what is tried comes to be measured.
        """
        if not len(self._sizes):
            return 1e-3 * nominal_cost(nodes)
        below = int(np.searchsorted(self._sizes, nodes, side="right")) - 1
        if below < 0:  # one node takes its share of a pass over more, and others little beside it
            one = self._seconds[0] / self._sizes[0]
            return float(min(one * nominal_cost(nodes) / nominal_cost(1), self._seconds[0]))
        sizes, seconds = self._sizes[below : below + 2], self._seconds[below : below + 2]
        if len(sizes) == 2 and sizes[1] <= 4 * sizes[0]:
            return float(np.interp(nodes, sizes, seconds))
        more = nominal_cost(nodes) / nominal_cost(sizes[0])
        if below and sizes[0] <= 4 * self._sizes[below - 1]:  # where a node more has begun to cost, it goes on to
            step = (seconds[0] - self._seconds[below - 1]) / (sizes[0] - self._sizes[below - 1])
            more = max(more, min(1 + step * (nodes - sizes[0]) / seconds[0], nodes / sizes[0]))
        return float(min([seconds[0] * more, *seconds[1:]]))


_pass_times: WeakKeyDictionary[Backend, PassTimes] = WeakKeyDictionary()


def pass_times(backend: Backend) -> PassTimes:
    """The times of a backend's passes, which outlive an engine."""
    return _pass_times.setdefault(backend, PassTimes())
