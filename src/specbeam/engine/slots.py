"""Where the nodes of one token tree lie in a backend's store."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam.backends.contract import Backend, Segment
from specbeam.engine.prefixes import common_length
from specbeam.engine.runs import BLOCK_SLOTS
from specbeam.engine.store import EngineCache, locked, store_of
from specbeam.tree import NO_NODES, Nodes, Tree

NOWHERE = -1
MIN_TOKENS_WAITED_FOR = 64
"""Wait for a tree that reads the same tokens, if they are at least this many. To wait takes a pass or more."""
MAX_LENT_SLOTS = 2 * BLOCK_SLOTS
"""A tree gives back slots of dropped nodes when it has more than this many to reuse."""


class Slots:
    """The slots of one tree's nodes. A node gets a slot when it is evaluated, and loses it when it is dropped.

    Segments hold only while this object lives. After that its slots are free.

    Args:
        cache: the part of the store that the engine holds. None for a tree without an engine.
        shares: whether the tree begins with tokens that the engine has read before, and leaves its own to others.

    Attributes:
        used: nodes that have a slot.
        peak: the most slots that were in use at once.
        reused: how many nodes had a slot from the start.
        lent: slots that only this tree may use, the next one last.
        begin: the trunk's tokens down to the first node that was asked for, int64 [n]. None before that.
        left: how many of its first tokens the tree has left to others.
        is_closed: the tree has given back its slots.
    """

    def __init__(self, tree: Tree, backend: Backend, cache: EngineCache | None = None, shares: bool = False) -> None:
        self.tree = tree
        self.backend = backend
        self.cache = cache or EngineCache(store_of(backend))
        self.store = self.cache.store
        self.shares = shares
        self.used = self.peak = self.reused = 0
        self.lent: list[int] = []
        self.begin: NDArray[np.int64] | None = None
        self.left = 0
        self.is_closed = False
        self._first = NOWHERE  # the first node that was asked for
        self._has_begun = False
        self._awaited: tuple[Slots, int] | None = None  # a tree that reads the same tokens, and how many of these
        self._slot = np.full(len(tree), NOWHERE, dtype=np.int64)  # by node
        self._trunk = np.empty(len(tree) + 64, dtype=np.int64)  # slots by position
        self._placed = 0  # nodes of the trunk that have got slots, which are in _trunk
        self._unseen = 0  # the first ones of these, which lost their slots because no later node sees them
        self._owner = self.cache.number  # of its slots, unless the engine has given up all of them
        self.store.places[id(tree)] = self

    @property
    def held(self) -> NDArray[np.int64]:
        """The slots of all nodes, int64 [n]."""
        return self._slot[self._slot != NOWHERE]

    def at(self, nodes: Nodes) -> NDArray[np.int64]:
        """The slots of nodes, int64 [n]; -1 for a node without a slot."""
        self._follow_tree()
        return self._slot[nodes]

    @property
    def is_fresh(self) -> bool:
        """Whether no node was in a pass yet, and the tree may begin with tokens that others read."""
        return self.shares and not self._has_begun and self.begin is not None

    def missing(self, nodes: Any) -> Nodes:
        """These nodes, and their ancestors that were never evaluated, ancestors first."""
        climbing = np.array(sorted({*np.asarray(nodes).tolist()}), dtype=np.int64)  # np.unique is slower for few
        self._follow_tree()
        tree = self.tree
        if self.begin is None:
            self._begin(int(climbing[0]))
        elif self._unseen and self._first_seen(int(tree.depths(climbing).min())) < self._unseen:
            self._lose_all()
        elif climbing[0] and NOWHERE not in self._slot[tree.parents(climbing)].tolist():
            return climbing  # a parent was evaluated after its ancestors
        found = [climbing]
        trunk = tree.trunk
        while True:
            climbing = np.unique(tree.parents(climbing[tree.depths(climbing) >= len(trunk)]))
            climbing = climbing[self._slot[climbing] == NOWHERE]
            if not len(climbing):
                break
            found.append(climbing)
        deepest = tree.depths(np.concatenate(found)).max()
        rest = trunk[self._placed : deepest + 1]
        found.append(rest[self._slot[rest] == NOWHERE])
        return np.unique(np.concatenate(found))

    def segment(
        self,
        nodes: Nodes,
        wanted: NDArray[np.int64],
        vocab: int | None = None,
        source: Any = None,
        ahead: int = 0,
    ) -> Segment:
        """The part of a pass that evaluates these nodes. Their ancestors have slots or are among them.

        Args:
            ahead: let the segment have slots for this many further passes, each over as many nodes.
        """
        self._follow_tree()
        tree = self.tree
        is_next, before = self.is_next(nodes), self._placed
        placed = self._place_next(nodes) if is_next else self._place(nodes)
        try:
            later = self._lend_ahead(ahead * len(nodes)) if ahead else NO_NODES
            self.store.reserve(self.backend)
        except Exception:  # at the next try, lower slots may be free
            self._placed = before
            self._release(placed)
            raise
        tokens, positions = tree.tokens(nodes), tree.depths(nodes)
        # A draft model may lack some of the target's tokens. Any other token will do, because its guesses are checked.
        if (tokens[0] if is_next else tokens.max()) >= self.backend.vocab_size:
            tokens = np.where(tokens < self.backend.vocab_size, tokens, 0)
        if is_next or positions.max() < self._placed:
            branches = np.empty((len(nodes), 0), dtype=np.int64)
        else:
            branches = self._slot[tree.paths_beyond_trunk(nodes)]
        slots = self._slot[nodes]
        return Segment(tokens, positions, slots, self._trunk[: self._placed], branches, wanted, vocab, source, later)

    def is_next(self, nodes: Nodes) -> bool | np.bool_:
        """Whether this is one node, the next one of a text without branches. Its ancestors have slots."""
        if len(nodes) != 1 or not 0 < self._placed == self.tree.trunk_length - 1:
            return False
        return nodes[0] == self.tree.tip and self._slot[nodes[0]] == NOWHERE

    def release(self, nodes: Nodes) -> None:
        """Take back the slots of nodes that the tree has dropped."""
        if len(nodes):
            self._follow_tree()
            placed = nodes[self._slot[nodes] != NOWHERE]
            if len(placed):
                self._release(placed)

    def keep(self, nodes: Nodes) -> None:
        """Take back the slots of all nodes but these, their ancestors and the trunk."""
        self._follow_tree()
        needed = np.union1d(self.tree.trunk, self.tree.paths_beyond_trunk(nodes))
        self._release(np.setdiff1d(np.flatnonzero(self._slot != NOWHERE), needed))

    def free_unseen(self, pending: Nodes) -> None:
        """Free the slots of the trunk's first nodes, if all layers have windows and no later node sees these nodes.

        Args:
            pending: nodes that may have a slot, but were not evaluated, ancestors first.
        """
        if self.backend.window is None:
            return
        tree = self.tree
        later = min(self._placed, len(tree.trunk) - 1, *tree.depths(pending[:1]).tolist())  # the tip may be repeated
        if (end := self._first_seen(later)) >= self._unseen + BLOCK_SLOTS:
            self.leave_text(tree.trunk[:later])
            self._release(tree.trunk[self._unseen : end])
            self._trunk[self._unseen : end] = NOWHERE
            self._unseen = end

    def _first_seen(self, position: int) -> int:
        """The first position that a node at this position sees in some layer."""
        return 0 if self.backend.window is None else max(0, position + 1 - self.backend.window)

    def _lose_all(self) -> None:
        """Lose the slots of all nodes, because some of their ancestors are needed again. All are to be read again."""
        self._release(np.flatnonzero(self._slot != NOWHERE))
        self._placed = self._unseen = 0

    def growth(self, nodes: Nodes) -> int:
        """How many new slots these nodes need."""
        self._follow_tree()
        return int(np.count_nonzero(self._slot[nodes] == NOWHERE))

    def leave(self, pending: Nodes) -> None:
        """Leave what was read of the first text that was asked for to other trees.

        Args:
            pending: nodes that may have a slot, but were not evaluated, ancestors first.
        """
        if self.begin is None or not self.shares or self.left >= len(self.begin):
            return
        read = min(self._placed, len(self.begin))
        if len(pending):
            read = min(read, int(self.tree.depths(pending[0])))
        if self.left < read:
            self.leave_text(self.tree.trunk[:read])

    @locked
    def leave_text(self, path: Nodes) -> None:
        """Leave the beginning of a text that has slots to other trees. ``path`` are its nodes from the root on."""
        if self.shares:
            self._follow_tree()
            tokens = self.tree.tokens(path)
            self._share(path, self.cache.prefixes.find(tokens))
            self.cache.keep(tokens, self._slot[path])
            self.left = max(self.left, len(path))

    def _share(self, path: Nodes, slots: NDArray[np.int64]) -> None:
        """Take these slots for the first nodes of a path from the root on, and give back others with the same tokens.

        So whoever holds the end of a kept text holds all of it, and what nobody holds can be dropped from its end on.
        """
        path, slots = path[self._unseen : len(slots)], slots[self._unseen :]
        own = self._slot[path]
        is_other = own != slots
        if is_other.any():
            self.cache.hold(slots[is_other])
            self._slot[path] = slots
            self._trunk = self._trunk.copy()  # a segment may be run again
            self._trunk[: self._placed] = self._slot[self.tree.trunk[: self._placed]]
            own = own[is_other & (own != NOWHERE)]
            self._count(int(np.count_nonzero(is_other)) - len(own))
            self.store.give_back(self.cache.let_go(own))

    def waits(self, others: Iterable[Slots]) -> bool:
        """Whether another tree is about to read the same tokens, so that this one should wait for them.

        Args:
            others: trees that began before this one.
        """
        while self.is_fresh:
            if (awaited := self._awaited) is None:
                awaited = self._awaited = self._farthest(others)
                if awaited is None:
                    return False
            other, common = awaited
            if not other.is_closed and other.left < common:
                return True
            self._awaited = None
            self._begin(self._first)  # find what the other one has read
        return False

    def _farthest(self, others: Iterable[Slots]) -> tuple[Slots, int] | None:
        """The tree that reads most of the tokens that this one lacks, and how many first tokens they have in common."""
        assert self.begin is not None
        farthest, most = None, self._placed + MIN_TOKENS_WAITED_FOR - 1
        if most >= len(self.begin) - 1:
            return None
        for other in others:
            begin = other.begin if other.shares and not other.is_closed else None
            if begin is not None and max(most, other.left) < len(begin) and begin[most] == self.begin[most]:
                common = common_length(begin, self.begin[:-1])
                if common > most and common > other.left:
                    farthest, most = other, common
        return None if farthest is None else (farthest, most)

    @locked
    def close(self) -> None:
        """Give back all slots."""
        if self._owner == self.cache.number:
            self.store.give_back(np.concatenate([self.cache.let_go(self.held), np.array(self.lent, dtype=np.int64)]))
        self._slot = np.full(len(self.tree), NOWHERE, dtype=np.int64)
        self.lent, self._placed, self.used, self.is_closed = [], 0, 0, True

    def _begin(self, node: int) -> None:
        """Begin with the ancestors of the first node that is asked for, up to the last one that was read before."""
        path = self.tree.path(node)
        self._first, self.begin = node, self.tree.tokens(path[: len(self.tree.trunk)])
        if self.shares:
            self._find(path[:-1])
            self.free_unseen(NO_NODES)

    @locked
    def _find(self, path: Nodes) -> None:
        """Take the slots of tokens that were read before. ``path`` are nodes from the root on."""
        slots = self.cache.prefixes.find(self.tree.tokens(path))
        self._share(path, slots)
        self._follow_trunk()
        self.reused = max(self.reused, len(slots))

    @locked
    def _lend_ahead(self, count: int) -> Nodes:
        """Have slots at hand for nodes that the tree does not have yet."""
        self._lend(count)
        return self._next_lent(count)

    @locked
    def place_ahead(self, count: int) -> None:
        """The backend has gone on by itself: the nodes that the tree gets next lie in the slots that are lent next."""
        first = len(self.tree)
        self._follow_tree(first + count)
        slots = self._next_lent(count)
        self._slot[first : first + count] = slots
        del self.lent[-count:]
        self.store.references[slots] = 1
        self.cache.used += count
        self._count(count)

    @locked
    def _place_next(self, nodes: Nodes) -> Nodes:
        """The same as :meth:`_place` for the next node of a text without branches, in a few operations."""
        self._has_begun = True
        at = self._placed
        if not self.lent:
            self.lent = self.store.lend(1, int(self._trunk[at - 1]), self._owner)[::-1]
        if at == len(self._trunk):
            self._trunk = np.resize(self._trunk, 2 * at)
        slot = self.lent.pop()
        self._slot[nodes[0]] = self._trunk[at] = slot
        self.store.references[slot] = 1
        self._placed = at + 1
        self.cache.used += 1
        self._count(1)
        return nodes

    @locked
    def _place(self, nodes: Nodes) -> Nodes:
        """Give slots to nodes without one, and return these."""
        homeless = nodes[self._slot[nodes] == NOWHERE]
        self._has_begun = True
        if count := len(homeless):
            self._lend(count)
            slots = self._next_lent(count)
            self._slot[homeless] = slots
            del self.lent[-count:]
            self.store.references[slots] = 1
            self.cache.used += count
            self._count(count)
        self._follow_trunk()
        return homeless

    def _lend(self, count: int) -> None:
        """Have at least this many slots at hand."""
        if len(self.lent) < count:
            last = self.lent[0] if self.lent else int(self._trunk[self._placed - 1]) if self._placed else NOWHERE
            self.lent = [*reversed(self.store.lend(count - len(self.lent), last, self._owner)), *self.lent]

    def _next_lent(self, count: int) -> Nodes:
        return np.array(self.lent[: -count - 1 : -1], dtype=np.int64)

    @locked
    def _release(self, nodes: Nodes) -> None:
        slots = self._slot[nodes]
        self._slot[nodes] = NOWHERE
        self.lent += self.cache.let_go(slots)[::-1].tolist()
        self._count(-len(slots))
        if len(self.lent) > MAX_LENT_SLOTS:
            spare, self.lent = self.lent[:-BLOCK_SLOTS], self.lent[-BLOCK_SLOTS:]
            self.store.give_back(np.array(spare))

    def _count(self, more: int) -> None:
        self.used += more
        self.peak = max(self.peak, self.used)

    def _follow_trunk(self) -> None:
        """Take in the slots of the nodes that the trunk has grown by."""
        rest = self.tree.trunk[self._placed :]
        if not len(rest):
            return
        slots = self._slot[rest]
        if slots.min() == NOWHERE:
            slots = slots[: int((slots == NOWHERE).argmax())]
        end = self._placed + len(slots)
        if end > len(self._trunk):
            longer = np.empty(2 * end, dtype=np.int64)
            longer[: self._placed] = self._trunk[: self._placed]
            self._trunk = longer
        self._trunk[self._placed : end] = slots
        self._placed = end

    def _follow_tree(self, size: int = 0) -> None:
        """Make room for the nodes added to the tree since the last call, and for this many nodes in all."""
        if len(self._slot) < (size := max(size, len(self.tree))):
            room = max(2 * len(self._slot), size)
            self._slot = np.concatenate([self._slot, np.full(room - len(self._slot), NOWHERE, dtype=np.int64)])
