"""Which slots of a backend are free, and who holds the others."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import wraps
from itertools import count
from threading import RLock
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np

from specbeam.backends.contract import Backend
from specbeam.cache.prefixes import Ints, PrefixCache

NOBODY = 0
BLOCK_SLOTS = 64
"""Slots are taken up to the end of such a block. So sequences that grow side by side lie in runs all the same."""
MAX_RUNS_SEEN = 16
"""Look at this many runs for one that is long enough."""
MAX_FREE_SHARE = 0.25
"""While short runs are at most this share of all slots, take new slots instead of them."""
Method = TypeVar("Method", bound=Callable[..., Any])


class FreeList:
    """The free slots: some runs below ``end``, and all slots from ``end`` on.

    The slots of a sequence should lie side by side in memory. Runs that touch become one (boundary tags: Knuth, The Art
    of Computer Programming, volume 1, section 2.5).

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
        """Take at least ``count`` slots, in few runs, and the rest of the last one's block.

        Args:
            after: the first of them should follow this slot.
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

    def give_back(self, slots: Ints) -> None:
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
    """The first slot of a block, from this slot on."""
    return -(-slot // BLOCK_SLOTS) * BLOCK_SLOTS


def locked(method: Method) -> Method:
    """A method that changes owners or references, in one thread at a time. Its object has a ``pool``."""

    @wraps(method)
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        pool = self.pool
        with pool.lock:
            try:
                while pool.lost:
                    pool.free_all(pool.lost[0])
                    pool.lost.popleft()
                return method(self, *args, **kwargs)
            except BaseException:  # another engine's free slots must not depend on where it was raised
                pool.free_all(NOBODY)
                raise

    return cast(Method, changed)


class Pool:
    """The slots of one backend. All engines share it.

    A slot is free, or an engine owns it. Then it is reserved for one tree, or trees hold it, or it is cached: part of a
    prefix that no tree holds. Its methods are called with the lock.

    Attributes:
        owners: by slot, the number of the engine's cache that owns it, or ``NOBODY``.
        references: by slot, how many nodes of trees hold it.
        cached: by slot, whether it is part of a cached prefix.
        free: the free slots.
        numbers: of further caches.
        lost: numbers of caches that are gone. Their finalizers must not wait for the lock.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self.owners = np.zeros(0, dtype=np.int64)
        self.references = np.zeros(0, dtype=np.int32)
        self.cached = np.zeros(0, dtype=bool)
        self.free = FreeList()
        self.numbers = count(NOBODY + 1)
        self.lost: deque[int] = deque()
        self._reserved = 0

    def reserve(self, backend: Backend) -> None:
        """Let the backend have room for all slots that are not free. Called without the lock.

        Raises:
            MemoryError, or PyTorch's OutOfMemoryError: there is no memory for them. It may be tried again.
        """
        if (end := self.free.end) > self._reserved:
            backend.reserve(end)
            self._reserved = end

    @property
    def in_use(self) -> int:
        """Slots that trees hold, or that are cached. It takes the lock itself."""
        with self.lock:
            is_used = ((self.references > 0) | self.cached) & ~np.isin(self.owners, [*self.lost])
            return int(np.count_nonzero(is_used))

    def lend(self, count: int, after: int, owner: int) -> list[int]:
        """Take free slots. The first of them follows another slot, if that is easy."""
        lent = self.free.take(count, after)
        if self.free.end > (size := len(self.owners)):
            capacity = 2 * self.free.end
            self.owners, self.references, self.cached = (
                np.concatenate([array, np.zeros(capacity - size, array.dtype)])
                for array in (self.owners, self.references, self.cached)
            )
        self.owners[lent] = owner
        return lent

    def give_back(self, slots: Ints) -> None:
        """Free slots that no tree holds, and that are not cached."""
        if len(slots):
            self.owners[slots] = NOBODY
            self.free.give_back(slots)

    def free_all(self, owner: int) -> None:
        """Free all slots of an engine, and make the free list anew."""
        is_owned = self.owners == owner
        self.references[is_owned], self.cached[is_owned], self.owners[is_owned] = 0, False, NOBODY
        free = FreeList()
        free.end = int(np.flatnonzero(self.owners).max(initial=-1)) + 1
        if len(slots := np.flatnonzero(self.owners[: free.end] == NOBODY)):
            free.give_back(slots)
        self.free = free


class EngineCache:
    """The part of a pool that one engine owns: the slots of its trees, and its prefix cache.

    Attributes:
        number: the owner of its slots in the pool.
        used: slots that trees hold.
        kept: cached slots that no tree holds.
        slot_bytes: bytes of a slot.
    """

    def __init__(self, backend: Backend) -> None:
        self.pool = pool_of(backend)
        self.slot_bytes = backend.slot_bytes
        self._begin()

    def _begin(self) -> None:
        self.used = self.kept = 0
        self.prefixes = PrefixCache()
        self.number = next(self.pool.numbers)
        weakref.finalize(self, self.pool.lost.append, self.number).atexit = False

    @locked
    def clear(self) -> None:
        """Free all slots, also slots that trees hold. These trees may only be closed."""
        self.pool.free_all(self.number)
        self._begin()

    def hold(self, slots: Ints) -> None:
        """Count one more reference to each of some different slots, int64 [n]. Called with the lock."""
        references = self.pool.references
        unheld = int(np.count_nonzero(references[slots] == 0))
        self.used += unheld
        self.kept -= unheld
        references[slots] += 1

    def let_go(self, slots: Ints) -> Ints:
        """Count one reference less. Return the slots that nobody needs any more, int64 [n]. Called with the lock.

        Args:
            slots: int64 [n]. A slot is here twice if two nodes of a tree have the same tokens, and so one cached slot.
        """
        references = self.pool.references
        np.subtract.at(references, slots, 1)  # -= counts a slot once
        gone = np.unique(slots[references[slots] == 0])
        self.used -= len(gone)
        stays = self.pool.cached[gone]
        self.kept += int(np.count_nonzero(stays))
        return gone[~stays]

    def keep(self, tokens: Ints, slots: Ints) -> None:
        """Cache a sequence in slots that trees hold, int64 [n] each. Called with the lock."""
        self.pool.cached[self.prefixes.add(tokens, slots)] = True

    def held(self, tokens: Ints) -> int:
        """How many slots of the longest cached prefix, int64 [n], trees hold."""
        with self.pool.lock:
            return int(np.count_nonzero(self.pool.references[self.prefixes.find(tokens)]))

    @locked
    def evict(self, count: int) -> int:
        """Evict the least recently used prefixes, until this many slots are free. Return how many there are."""
        before = self.kept
        for evicted in self.prefixes.evict(min(count, before), self.pool.references):
            self.pool.cached[evicted] = False
            free = evicted[self.pool.references[evicted] == 0]
            self.kept -= len(free)
            self.pool.give_back(free)
        return before - self.kept


_pools: WeakKeyDictionary[Backend, Pool] = WeakKeyDictionary()


def pool_of(backend: Backend) -> Pool:
    """The pool of a backend."""
    return _pools.setdefault(backend, Pool())
