"""Who holds which slot of a backend's one store of keys and values. Slots are counted by reference."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
from numpy.typing import NDArray

from specbeam.backends.contract import Backend
from specbeam.engine.prefixes import Prefixes
from specbeam.engine.runs import FreeRuns
from specbeam.whole_steps import whole_step

if TYPE_CHECKING:
    from specbeam.engine.slots import Slots
    from specbeam.tree import Nodes, Tree

Ints = NDArray[np.int64]


class _OfStore(Protocol):
    store: Store


Owner = TypeVar("Owner", bound=_OfStore)
P = ParamSpec("P")
R = TypeVar("R")


def whole_change(method: Callable[Concatenate[Owner, P], R]) -> Callable[Concatenate[Owner, P], R]:
    """A method that changes who holds what, in one thread at a time.

    An interrupt such as Ctrl-C may come between any two statements. Then the next change counts everything anew.
    """

    @wraps(method)
    def changed(self: Owner, *args: P.args, **kwargs: P.kwargs) -> R:
        store = self.store
        with store.lock:
            if store.is_torn or store.has_lost:
                store.count_anew()
            store.is_torn = True
            result = method(self, *args, **kwargs)
            store.is_torn = False
            return result

    return changed  # type: ignore[return-value]  # functools.wraps keeps the name of the first argument


class Store:
    """The slots of one backend.

    A slot is free, or lent to one tree, or held by trees, or it keeps a text that no tree holds. All trees that hold
    a slot, and the text that it keeps, are of one engine.

    Attributes:
        references: by slot, how many trees hold it.
        kept: by slot, whether an engine remembers the text that it belongs to.
        runs: the free slots.
        is_torn: a change has begun and has not ended. After an interrupt nobody ends it.
        has_lost: a tree or an engine is gone, and has not given its slots back.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.is_torn = self.has_lost = False
        self.references = np.zeros(0, dtype=np.int32)
        self.kept = np.zeros(0, dtype=bool)
        self.runs = FreeRuns()
        self._caches: WeakSet[EngineCache] = WeakSet()
        self._trees: WeakSet[Slots] = WeakSet()
        self._reserved = 0

    @whole_step
    def join(self, who: Slots | EngineCache) -> weakref.finalize[[], Any]:
        """Know of a tree or an engine. If it is forgotten elsewhere, its slots become free.

        Returns: the call that makes them free. Whoever gives its slots back itself detaches it.
        """
        with self.lock:  # another thread may be counting
            (self._caches if isinstance(who, EngineCache) else self._trees).add(who)  # type: ignore[arg-type]
        finalizer = weakref.finalize(who, self._lose)
        finalizer.atexit = False
        return finalizer

    def _lose(self) -> None:
        self.has_lost = True

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
            if self.is_torn or self.has_lost:
                self.count_anew()
                self.is_torn = False
            return int(np.count_nonzero((self.references > 0) | self.kept))

    def slots_of(self, tree: Tree, nodes: Nodes) -> Ints:
        """Where keys and values of nodes lie, int64 [n], while the tree's request is live; -1 for a node without."""
        with self.lock:
            (found,) = [one for one in self._trees if one.tree is tree and not one.is_closed]
        return found.at(nodes)

    # The rest is called by whole changes.

    def lend(self, count: int, after: int) -> list[int]:
        """Hand out free slots. The first of them follows another slot, if that is easy."""
        lent = self.runs.take(count, after)
        if self.runs.end > len(self.references):
            room = 2 * self.runs.end
            self.references = np.concatenate([self.references, np.zeros(room - len(self.references), dtype=np.int32)])
            self.kept = np.concatenate([self.kept, np.zeros(room - len(self.kept), dtype=bool)])
        return lent

    def count_anew(self) -> None:
        """Find out again who holds what. After an interrupt, the engines' texts are forgotten."""
        was_torn, self.has_lost = self.is_torn, False
        self.is_torn = True
        size = max(len(self.references), len(self.kept))  # an interrupt may come before the second of them grows
        self.references, self.kept = np.zeros(size, dtype=np.int32), np.zeros(size, dtype=bool)
        is_lent = np.zeros(len(self.references), dtype=bool)
        trees = list(self._trees)
        for cache in list(self._caches):
            if was_torn:
                cache.prefixes = Prefixes()
            self.kept[cache.prefixes.slots()] = True
            held = [tree.held for tree in trees if tree.cache is cache]
            for slots in held:
                self.references[slots] += 1
            cache.used = len(np.unique(np.concatenate(held))) if held else 0
            cache.kept = int(np.count_nonzero(self.references[cache.prefixes.slots()] == 0))
        for tree in trees:
            tree.lent = [slot for slot in tree.lent if not self.references[slot]]  # it may have got a node just now
            is_lent[tree.lent] = True
        taken = np.flatnonzero(is_lent | self.kept | (self.references > 0))
        self.runs = FreeRuns()
        self.runs.end = int(taken.max(initial=-1)) + 1
        is_free = np.ones(self.runs.end, dtype=bool)
        is_free[taken] = False
        if is_free.any():
            self.runs.give_back(np.flatnonzero(is_free))


class EngineCache:
    """The part of a store that one engine holds: the slots of its trees, and texts that it remembers.

    Attributes:
        used: slots that trees hold.
        kept: slots of texts that no tree holds.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.used = self.kept = 0
        self.prefixes = Prefixes()
        store.join(self)

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

    @whole_change
    def shared(self, tokens: Ints) -> int:
        """How many slots of the remembered beginning of a text, int64 [n], trees hold."""
        slots = self.prefixes.find(tokens, is_used=False)
        return int(np.count_nonzero(self.store.references[slots]))

    @whole_change
    def drop_kept(self, least: int) -> int:
        """Forget what was not used for the longest time, until this many slots are free. Return how many there are."""
        before = self.kept
        for gone in self.prefixes.drop(min(least, before), self.store.references):
            self.store.kept[gone] = False
            free = gone[self.store.references[gone] == 0]
            if len(free):
                self.kept -= len(free)
                self.store.runs.give_back(free)
        return before - self.kept


_stores: WeakKeyDictionary[Backend, Store] = WeakKeyDictionary()


def store_of(backend: Backend) -> Store:
    """The store of a backend. All engines share it."""
    return _stores.setdefault(backend, Store())
