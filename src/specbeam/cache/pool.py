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

from specbeam.backends.contract import Backend, token_bytes
from specbeam.cache.places import NOBODY, NOWHERE, Places
from specbeam.cache.prefixes import Ints, PrefixCache
from specbeam.cache.rows import EngineRows, ResumePoints, Rows, resumable

Method = TypeVar("Method", bound=Callable[..., Any])


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


class Pool(Places):
    """The slots of one backend, and the rows of its lifetimes. All engines share it.

    A slot is free, or an engine owns it. Then it is reserved for one tree, or trees hold it, or it is cached: part of a
    prefix that no tree holds. Its methods are called with the lock.

    Attributes:
        owners: by slot, the number of the engine's cache that owns it, or ``NOBODY``.
        references: by slot, how many nodes of trees hold it.
        cached: by slot, whether it is part of a cached prefix.
        rows: for each lifetime.
        table: the row of each slot, ``NOWHERE`` for none, int32 [lifetimes, slots].
        numbers: of further caches.
        lost: numbers of caches that are gone. Their finalizers must not wait for the lock.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.lock = RLock()
        self.references = np.zeros(0, dtype=np.int32)
        self.cached = np.zeros(0, dtype=bool)
        self.rows = [Rows(lifetime) for lifetime in backend.lifetimes]
        self.table = np.empty((len(self.rows), 0), dtype=np.int32)
        self.numbers = count(NOBODY + 1)
        self.lost: deque[int] = deque()
        self._reserved = [0] * (1 + len(self.rows))

    def reserve(self, backend: Backend) -> None:
        """Let the backend have room for all slots and rows that are not free. Called without the lock.

        Raises:
            MemoryError, or PyTorch's OutOfMemoryError: there is no memory for them. It may be tried again.
        """
        ends = [self.free.end, *(rows.free.end for rows in self.rows)]
        if any(end > reserved for end, reserved in zip(ends, self._reserved, strict=True)):
            backend.reserve(ends[0], ends[1:])
            self._reserved = [*map(max, ends, self._reserved)]

    @property
    def in_use(self) -> int:
        """Slots that trees hold, or that are cached. It takes the lock itself."""
        with self.lock:
            is_used = ((self.references > 0) | self.cached) & ~np.isin(self.owners, [*self.lost])
            return int(np.count_nonzero(is_used))

    def lend(self, count: int, after: int, owner: int) -> list[int]:
        lent = super().lend(count, after, owner)
        if (size := len(self.references)) < (capacity := len(self.owners)):
            self.references = np.concatenate([self.references, np.zeros(capacity - size, np.int32)])
            self.cached = np.concatenate([self.cached, np.zeros(capacity - size, bool)])
            # A pass in another thread goes on with the old table. It has the rows of its own slots.
            more = np.full((len(self.rows), capacity - size), NOWHERE, np.int32)
            self.table = np.concatenate([self.table, more], axis=1)
            for rows, of in zip(self.rows, self.table, strict=True):
                rows.follow(of)
        return lent

    def give_back(self, places: Ints) -> None:
        """Free slots that no tree holds, and that are not cached, with their rows."""
        for rows in self.rows:
            rows.leave(places)
        super().give_back(places)

    def free_all(self, owner: int) -> None:
        is_owned = self.owners == owner
        self.references[is_owned], self.cached[is_owned] = 0, False
        for rows in self.rows:
            rows.clear(is_owned, owner)
        super().free_all(owner)


class EngineCache:
    """The part of a pool that one engine owns: the slots and rows of its trees, and its prefix cache.

    Attributes:
        number: the owner of its slots in the pool.
        used: slots that trees hold.
        kept: cached slots that no tree holds.
        rows: its rows of each lifetime.
        points: where its cached prefixes can be resumed.
        slot_bytes: bytes of a slot.
        token_bytes: bytes of a slot with a row of each lifetime.
    """

    def __init__(self, backend: Backend) -> None:
        self.pool = pool_of(backend)
        self.slot_bytes = backend.slot_bytes
        self.token_bytes = token_bytes(backend)
        self._begin()

    def _begin(self) -> None:
        self.used = self.kept = 0
        self.prefixes = PrefixCache()
        self.number = next(self.pool.numbers)
        self.rows = [EngineRows(rows, self.number) for rows in self.pool.rows]
        self.points = ResumePoints(self.rows)
        weakref.finalize(self, self.pool.lost.append, self.number).atexit = False

    @property
    def used_bytes(self) -> int:
        """Bytes that trees hold. Another thread may read it."""
        return self.used * self.slot_bytes + sum(rows.used * rows.bytes for rows in self.rows)

    @property
    def kept_bytes(self) -> int:
        """Bytes that are cached and that no tree holds: they can be evicted. Another thread may read it."""
        return self.kept * self.slot_bytes + sum(rows.kept * rows.bytes for rows in self.rows)

    @property
    def used_tokens(self) -> int:
        """The same as whole tokens."""
        return -(-self.used_bytes // self.token_bytes)

    @property
    def kept_tokens(self) -> int:
        """The same as whole tokens."""
        return -(-self.kept_bytes // self.token_bytes)

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

    def held_bytes(self, tokens: Ints) -> int:
        """Bytes of the longest cached prefix, int64 [n], that trees hold."""
        with self.pool.lock:
            slots = self.prefixes.find(tokens)
            slots = slots[: resumable(self.rows, slots)]
            held = int(np.count_nonzero(self.pool.references[slots])) * self.slot_bytes
            return held + sum(rows.held(slots) * rows.bytes for rows in self.rows)

    @locked
    def evict(self, size: int) -> int:
        """Evict what was used least recently, until this many bytes are free. Return how many there are.

        Prefixes go from their ends on, with the resume points there. If trees hold all others, their points go.
        """
        before = self.kept_bytes
        aim = max(0, before - size)
        while self.kept_bytes > aim and self.kept:
            count = -(-(self.kept_bytes - aim) // max(1, self.token_bytes))
            for evicted in self.prefixes.evict(min(count, self.kept), self.pool.references):
                self.points.drop(evicted)
                self.pool.cached[evicted] = False
                free = evicted[self.pool.references[evicted] == 0]
                self.kept -= len(free)
                self.pool.give_back(free)
        while self.kept_bytes > aim and self.points:
            self.points.drop_oldest()
        return before - self.kept_bytes


_pools: WeakKeyDictionary[Backend, Pool] = WeakKeyDictionary()


def pool_of(backend: Backend) -> Pool:
    """The pool of a backend."""
    if backend not in _pools:
        _pools[backend] = Pool(backend)
    return _pools[backend]
