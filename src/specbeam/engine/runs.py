"""Free slots, as runs of neighbours: the slots of one text should lie side by side in memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK_SLOTS = 64
"""Slots are handed out up to the end of such a block. Texts that grow side by side then lie in runs all the same."""
MAX_RUNS_SEEN = 16
"""Look at this many runs for one that is long enough."""
MAX_FREE_SHARE = 0.25
"""While short runs are at most this share of all slots, take new slots instead of them."""


class FreeRuns:
    """Which slots are free: some runs below ``end``, and all slots from ``end`` on.

    Runs that touch become one (boundary tags: Knuth, The Art of Computer Programming, volume 1, section 2.5).

    Attributes:
        end: all slots that are not free are below this number.
        count: free slots below ``end``.
    """

    def __init__(self) -> None:
        self.end = 0
        self.count = 0
        self._lengths: dict[int, int] = {}  # by the first slot of a run
        self._firsts: dict[int, int] = {}  # by the slot after a run

    def take(self, count: int, after: int) -> list[int]:
        """Take slots, in as few runs as is easy: at least ``count``, and the rest of the last one's block.

        Args:
            after: a slot that the first of them should follow.
        """
        taken: list[int] = []
        if after + 1 in self._lengths:
            taken += self._take_from(after + 1, count)
        elif after + 1 != self.end:
            some = zip(range(MAX_RUNS_SEEN), self._lengths.items(), strict=False)
            first = next((first for _, (first, length) in some if length >= count), None)
            if first is not None:
                taken += self._take_from(first, count)
        while len(taken) < count and self.count > max(count, MAX_FREE_SHARE * self.end):
            taken += self._take_from(next(iter(self._lengths)), count - len(taken))
        if (fresh := count - len(taken)) > 0:
            first, self.end = self.end, end_of_block(self.end + fresh)
            taken += range(first, self.end)
        return taken

    def give_back(self, slots: NDArray[np.int64]) -> None:
        """Take slots back, int64 [n], each of them once."""
        slots = np.sort(slots)
        breaks = np.flatnonzero(np.diff(slots) != 1) + 1
        firsts, afters = slots[[0, *breaks]].tolist(), (slots[[*(breaks - 1), -1]] + 1).tolist()
        for first, after in zip(firsts, afters, strict=True):
            self.count += after - first
            if (before := self._firsts.pop(first, None)) is not None:
                del self._lengths[before]
                first = before
            if (length := self._lengths.pop(after, None)) is not None:
                after += length
                del self._firsts[after]
            if after == self.end:
                self.end = first
                self.count -= after - first
            else:
                self._lengths[first] = after - first
                self._firsts[after] = first

    def _take_from(self, first: int, count: int) -> range:
        """Take the first slots of a run."""
        length = self._lengths.pop(first)
        rest = first + length
        after = min(end_of_block(first + count), rest)
        del self._firsts[rest]
        if after < rest:
            self._lengths[after] = rest - after
            self._firsts[rest] = after
        self.count -= after - first
        return range(first, after)


def end_of_block(slot: int) -> int:
    """The first slot from this one on that begins a block."""
    return -(-slot // BLOCK_SLOTS) * BLOCK_SLOTS
