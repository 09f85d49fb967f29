"""Who holds which slot of a backend's one store of keys and values. Slots are counted by reference."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import wraps
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from specbeam.backends.contract import Backend
from specbeam.engine.prefixes import Prefixes
from specbeam.engine.runs import FreeRuns

if TYPE_CHECKING:
    from specbeam.engine.slots import Slots
    from specbeam.tree import Nodes, Tree

Ints = NDArray[np.int64]
NOBODY = 0
Method = TypeVar("Method", bound=Callable[..., Any])


def locked(method: Method) -> Method:
    """A method that changes who holds what, in one thread at a time."""

    @wraps(method)
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        store = self.store
        with store.lock:
            try:
                store.free_lost()
                return method(self, *args, **kwargs)
            except BaseException:  # another engine's free slots must not depend on where it was raised
                store.find_free()
                raise

    return cast(Method, changed)


class Store:
    """The slots of one backend.

    A slot is free, or an engine owns it. Then the slot is lent to one tree, or held by trees, or it keeps a text that
    no tree holds.

    Attributes:
        owners: by slot, the number of the engine's cache that owns it, or ``NOBODY``.
        references: by slot, how many trees hold it.
        kept: by slot, whether an engine remembers the text that it belongs to.
        runs: the free slots.
        places: where the nodes of trees lie, by ``id(tree)``.
        numbers: of further caches.
        lost: numbers of caches that are gone. Their finalizers must not wait for the lock.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.owners = np.zeros(0, dtype=np.int64)
        self.references = np.zeros(0, dtype=np.int32)
        self.kept = np.zeros(0, dtype=bool)
        self.runs = FreeRuns()
        self.places: WeakValueDictionary[int, Slots] = WeakValueDictionary()
        self.numbers = count(NOBODY + 1)
        self.lost: deque[int] = deque()
        self._reserved = 0

    def reserve(self, backend: Backend) -> None:
        """Let the backend have room for all slots that are not free.

        Raises:
            MemoryError, torch.OutOfMemoryError: there is no memory for them. It may be tried again.
        """
        if (end := self.runs.end) > self._reserved:
            backend.reserve(end)
            self._reserved = end

    @property
    def in_use(self) -> int:
        """Slots that trees hold, or that keep a text."""
        with self.lock:
            self.free_lost()
            return int(np.count_nonzero((self.references > 0) | self.kept))

    def slots_of(self, tree: Tree, nodes: Nodes) -> Ints:
        """Where keys and values of nodes lie, int64 [n], while the tree's request is live; -1 for a node without."""
        return self.places[id(tree)].at(nodes)

    # The rest is called with the lock.

    def lend(self, count: int, after: int, owner: int) -> list[int]:
        """Hand out free slots. The first of them follows another slot, if that is easy."""
        lent = self.runs.take(count, after)
        if self.runs.end > (size := len(self.owners)):
            room = 2 * self.runs.end
            self.owners, self.references, self.kept = (
                np.concatenate([one, np.zeros(room - size, one.dtype)])
                for one in (self.owners, self.references, self.kept)
            )
        self.owners[lent] = owner
        return lent

    def give_back(self, slots: Ints) -> None:
        """Take slots back that no tree holds, and that keep no text."""
        if len(slots):
            self.owners[slots] = NOBODY
            self.runs.give_back(slots)

    def free(self, owner: int) -> None:
        """Take back all slots of an engine."""
        is_its = self.owners == owner
        self.references[is_its], self.kept[is_its], self.owners[is_its] = 0, False, NOBODY
        self.find_free()

    def free_lost(self) -> None:
        """Take back the slots of engines that are gone."""
        while self.lost:
            self.free(self.lost[0])
            self.lost.popleft()

    def find_free(self) -> None:
        """Find the free slots by their owners."""
        runs = FreeRuns()
        runs.end = int(np.flatnonzero(self.owners).max(initial=-1)) + 1
        if len(free := np.flatnonzero(self.owners[: runs.end] == NOBODY)):
            runs.give_back(free)
        self.runs = runs


class EngineCache:
    """The part of a store that one engine holds: the slots of its trees, and texts that it remembers.

    Attributes:
        number: the owner of its slots in the store.
        used: slots that trees hold.
        kept: slots of texts that no tree holds.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._begin()

    def _begin(self) -> None:
        self.used = self.kept = 0
        self.prefixes = Prefixes()
        self.number = next(self.store.numbers)
        weakref.finalize(self, self.store.lost.append, self.number).atexit = False

    @locked
    def clear(self) -> None:
        """Give back all slots, also slots that trees hold. These trees may only be closed."""
        self.store.free(self.number)
        self._begin()

    def hold(self, slots: Ints) -> None:
        """Count slots for one more tree, int64 [n]."""
        references = self.store.references
        unheld = int(np.count_nonzero(references[slots] == 0))
        self.used += unheld
        self.kept -= unheld
        references[slots] += 1

    def let_go(self, slots: Ints) -> Ints:
        """Count slots for one tree less, int64 [n]. Return the slots that are free now."""
        references = self.store.references
        references[slots] -= 1
        gone = slots[references[slots] == 0]
        self.used -= len(gone)
        stays = self.store.kept[gone]
        self.kept += int(np.count_nonzero(stays))
        return gone[~stays]

    def keep(self, tokens: Ints, slots: Ints) -> None:
        """Remember a text, int64 [n] each. A tree holds its slots."""
        self.store.kept[self.prefixes.add(tokens, slots)] = True

    @locked
    def shared(self, tokens: Ints) -> int:
        """How many slots of the remembered beginning of a text, int64 [n], trees hold."""
        slots = self.prefixes.find(tokens, is_used=False)
        return int(np.count_nonzero(self.store.references[slots]))

    @locked
    def drop_kept(self, least: int) -> int:
        """Forget what was not used for the longest time, until this many slots are free. Return how many there are."""
        before = self.kept
        for gone in self.prefixes.drop(min(least, before), self.store.references):
            self.store.kept[gone] = False
            free = gone[self.store.references[gone] == 0]
            self.kept -= len(free)
            self.store.give_back(free)
        return before - self.kept


_stores: WeakKeyDictionary[Backend, Store] = WeakKeyDictionary()


def store_of(backend: Backend) -> Store:
    """The store of a backend. All engines share it."""
    return _stores.setdefault(backend, Store())
