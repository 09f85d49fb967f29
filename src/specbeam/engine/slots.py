"""Where the nodes of one token tree lie in one backend's cache."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam.backends.contract import Backend, Segment
from specbeam.engine.prefixes import Prefix
from specbeam.tree import Nodes, Tree

NOWHERE = -1


class Slots:
    """The slots of one tree's nodes. A node gets the lowest free slot when it is evaluated, and loses it when dropped.

    Args:
        most: the most slots that will ever be needed.
        kept: a text in a cache to go on with. Nodes whose text it begins with lie in their slots from the start.

    Attributes:
        length: all slots in use are below this number.
        peak: the most slots that were in use at once.
        reused: how many nodes were in the cache from the start.
    """

    def __init__(self, tree: Tree, backend: Backend[Any], most: int, kept: Prefix | None = None) -> None:
        self.tree = tree
        self.backend = backend
        self.cache = backend.new_cache(most) if kept is None else kept.cache
        self.cache.most = most
        self.length = 0
        self.peak = 0
        self.reused = 0
        self._kept = kept  # until the first nodes are asked for
        self._held_before = 0 if kept is None else kept.held
        self._slot = np.full(len(tree), NOWHERE, dtype=np.int64)  # by node
        self._free: list[int] = []  # a heap of slots below length

    def missing(self, nodes: Any) -> Nodes:
        """These nodes, and their ancestors that were never evaluated, ancestors first."""
        self._follow_tree()
        found = [climbing := np.unique(np.asarray(nodes, dtype=np.int64))]
        if self._kept is not None:
            self._take_over(self._kept, int(climbing[0]))
        trunk = self.tree.trunk
        while True:
            climbing = np.unique(self.tree.parents(climbing[self.tree.depths(climbing) >= len(trunk)]))
            climbing = climbing[self._slot[climbing] == NOWHERE]
            if not len(climbing):
                break
            found.append(climbing)
        deepest = self.tree.depths(np.concatenate(found)).max()
        found.append(trunk[: deepest + 1][self._slot[trunk[: deepest + 1]] == NOWHERE])
        return np.unique(np.concatenate(found))

    def segment(self, nodes: Nodes, wanted: NDArray[np.int64], vocab: int | None = None) -> Segment[Any]:
        """The part of a pass that evaluates these nodes. Their ancestors lie in the cache or are among them."""
        self._place(nodes)
        depths = self.tree.depths(nodes)
        tokens = self.tree.tokens(nodes)
        # A draft model may lack some of the target's tokens. Any other token will do, because its guesses are checked.
        tokens = np.where(tokens < self.backend.vocab_size, tokens, 0)
        # With itself, a node has depth + 1 ancestors. If no other slot is in use, all slots are visible to it.
        alone = len(nodes) == 1 and depths[0] + 1 == self.length
        return Segment(
            cache=self.cache,
            tokens=tokens,
            positions=depths,
            slots=self._slot[nodes],
            length=self.length,
            visible=None if alone else self._visible(nodes),
            wanted=wanted,
            vocab=vocab,
        )

    def release(self, nodes: Nodes) -> None:
        """Take back the slots of nodes that the tree has dropped."""
        self._follow_tree()
        for slot in self._slot[nodes].tolist():
            if slot != NOWHERE:
                heapq.heappush(self._free, slot)
        self._slot[nodes] = NOWHERE

    def growth(self, nodes: Nodes) -> int:
        """How many new slots these nodes need, beside slots that are free."""
        self._follow_tree()
        free = len(self._free) + self.held - self.length
        return max(0, int(np.count_nonzero(self._slot[nodes] == NOWHERE)) - free)

    def prefix(self, path: Nodes, pending: Nodes) -> Prefix:
        """The beginning of a path's text whose keys and values lie in the cache.

        Args:
            pending: nodes that may have a slot, but were not evaluated.
        """
        if self._kept is not None:  # nothing was asked for: the kept text is still there
            return self._kept
        self._follow_tree()
        slots = self._slot[path]
        missing = np.flatnonzero((slots == NOWHERE) | np.isin(path, pending))
        there = path[: missing[0]] if len(missing) else path
        return Prefix(self.backend, self.cache, self.tree.tokens(there), slots[: len(there)], self.held)

    @property
    def held(self) -> int:
        """Slots that the cache holds, free slots included."""
        return max(self.length, self._held_before)

    @property
    def surplus(self) -> int:
        """Slots that a cache of its own would not hold: the rest of a cache that was taken over."""
        return self.held - self.peak

    @property
    def used(self) -> int:
        """Slots in use."""
        return self.length - len(self._free)

    def _take_over(self, kept: Prefix, node: int) -> None:
        """Find the ancestors of the first node that is asked for in the kept text. All other slots are free."""
        self._kept = None
        above = self.tree.path(node)[:-1]
        self.reused = kept.common(self.tree.tokens(above))
        slots = self._slot[above[: self.reused]] = kept.slots[: self.reused]
        self.length = int(slots.max(initial=-1)) + 1
        self._free = np.setdiff1d(np.arange(self.length), slots).tolist()  # ascending numbers are a heap
        self.peak = self.used

    def _place(self, nodes: Nodes) -> None:
        homeless = nodes[self._slot[nodes] == NOWHERE]
        reused = [heapq.heappop(self._free) for _ in range(min(len(self._free), len(homeless)))]
        fresh = len(homeless) - len(reused)
        self._slot[homeless] = [*reused, *range(self.length, self.length + fresh)]
        self.length += fresh
        self.peak = max(self.peak, self.used)
        self.cache.reserve(self.length)

    def _visible(self, nodes: Nodes) -> NDArray[np.bool_]:
        visible = np.zeros((len(nodes), self.length), dtype=bool)
        trunk = self.tree.trunk
        on_trunk = self._slot[trunk]
        placed = on_trunk != NOWHERE
        visible[:, on_trunk[placed]] = self.tree.depths(trunk[placed]) <= self.tree.depths(nodes)[:, None]
        visible[np.arange(len(nodes))[:, None], self._slot[self.tree.paths_beyond_trunk(nodes)]] = True
        return visible

    def _follow_tree(self) -> None:
        """Make room for the nodes added to the tree since the last call."""
        if len(self._slot) < len(self.tree):
            room = max(2 * len(self._slot), len(self.tree))
            self._slot = np.concatenate([self._slot, np.full(room - len(self._slot), NOWHERE, dtype=np.int64)])
