"""Numbered places in memory: which of them are free, and who owns the others."""

from __future__ import annotations

import numpy as np

from specbeam.cache.prefixes import Ints

NOWHERE = -1
NOBODY = 0
BLOCK_SLOTS = 64
"""Slots are taken up to the end of such a block. So sequences that grow side by side lie in runs all the same."""
MAX_RUNS_SEEN = 16
"""Look at this many runs for one that is long enough."""
MAX_FREE_SHARE = 0.25
"""While short runs are at most this share of all places, take new places instead of them."""


class FreeList:
    """The free places: some runs below ``end``, and all places from ``end`` on.

    The places of a sequence should lie side by side in memory. Runs that touch become one (boundary tags: Knuth, The
    Art of Computer Programming, volume 1, section 2.5).

    Args:
        block: places are taken up to the end of a block of this many.

    Attributes:
        end: all places that are not free are below this number.
        count: free places below ``end``.
    """

    def __init__(self, block: int = BLOCK_SLOTS) -> None:
        self.block = block
        self.end = 0
        self.count = 0
        self._lengths: dict[int, int] = {}  # by the first place of a run
        self._firsts: dict[int, int] = {}  # by the place after a run

    def take(self, count: int, after: int) -> list[int]:
        """Take at least ``count`` places, in few runs, and the rest of the last one's block.

        Args:
            after: the first of them should follow this place.
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
            first, self.end = self.end, self._end_of_block(self.end + fresh)
            taken += range(first, self.end)
        return taken

    def give_back(self, places: Ints) -> None:
        """Take places back, int64 [n], each of them once."""
        places = np.sort(places)
        breaks = np.flatnonzero(np.diff(places) != 1) + 1
        firsts, afters = places[[0, *breaks]].tolist(), (places[[*(breaks - 1), -1]] + 1).tolist()
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
        """Take the first places of a run."""
        length = self._lengths.pop(first)
        rest = first + length
        after = min(self._end_of_block(first + count), rest)
        del self._firsts[rest]
        if after < rest:
            self._lengths[after] = rest - after
            self._firsts[rest] = after
        self.count -= after - first
        return range(first, after)

    def _end_of_block(self, place: int) -> int:
        """The first place of a block, from this place on."""
        return -(-place // self.block) * self.block


class Places:
    """Places of one kind. Each is free, or somebody owns it.

    Attributes:
        owners: by place, the number of its owner, or ``NOBODY``.
        free: the free places.
    """

    def __init__(self, block: int = BLOCK_SLOTS) -> None:
        self.owners = np.zeros(0, dtype=np.int64)
        self.free = FreeList(block)

    def lend(self, count: int, after: int, owner: int) -> list[int]:
        """Take free places. The first of them follows another place, if that is easy."""
        lent = self.free.take(count, after)
        if self.free.end > (size := len(self.owners)):
            self.owners = np.concatenate([self.owners, np.zeros(2 * self.free.end - size, np.int64)])
        self.owners[lent] = owner
        return lent

    def give_back(self, places: Ints) -> None:
        """Free places, int64 [n], each of them once."""
        if len(places):
            self.owners[places] = NOBODY
            self.free.give_back(places)

    def free_all(self, owner: int) -> None:
        """Free all places of an owner, and make the free list anew."""
        self.owners[self.owners == owner] = NOBODY
        free = FreeList(self.free.block)
        free.end = int(np.flatnonzero(self.owners).max(initial=-1)) + 1
        if len(places := np.flatnonzero(self.owners[: free.end] == NOBODY)):
            free.give_back(places)
        self.free = free
