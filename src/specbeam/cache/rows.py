"""Rows: what parts of a model keep of a slot for near nodes alone (:class:`specbeam.backends.contract.Lifetime`).

A tree needs the rows of the nodes that later nodes may read. A *resume point* keeps those at the end of a cached
prefix, so that another tree can go on there. A row that nobody needs is free, though its slot is not. Whoever misses
it recomputes it, to the same bits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specbeam.backends.contract import POINT_TOKENS, Lifetime
from specbeam.cache.places import NOWHERE, Places
from specbeam.cache.prefixes import NO_SLOTS, Ints
from specbeam.core.tree import Nodes

UNMADE = NOWHERE - 1
MAX_POINT_SHARE = 1 / 8
"""A resume point at every multiple of ``POINT_TOKENS`` takes at most this share of the bytes of the slots between."""


class Rows(Places):
    """The rows of one lifetime in a pool. Its methods are called with the pool's lock.

    Attributes:
        of: the row of each slot, or ``NOWHERE``, int32 [slots]. ``UNMADE - row`` if the pass that makes it is to come.
        needed: by slot, how many nodes of trees need its row.
        kept: by slot, how many resume points keep its row.
    """

    def __init__(self, lifetime: Lifetime) -> None:
        super().__init__(lifetime.at_once)
        self.lifetime = lifetime
        self.of = np.empty(0, np.int32)
        self.needed, self.kept = np.zeros(0, np.int32), np.zeros(0, np.int32)

    def follow(self, of: NDArray[np.int32]) -> None:
        """There are more slots. ``of`` has their rows, int32 [slots]."""
        more = np.zeros(len(of) - len(self.of), np.int32)
        self.of = of
        self.needed, self.kept = np.concatenate([self.needed, more]), np.concatenate([self.kept, more])

    def leave(self, slots: Ints) -> None:
        """Free the rows of slots that nobody needs, int64 [n]."""
        rows = self.of[slots].astype(np.int64)
        self.of[slots] = NOWHERE
        self.give_back(np.where(rows <= UNMADE, UNMADE - rows, rows)[rows != NOWHERE])

    def clear(self, slots: NDArray[np.bool_], owner: int) -> None:
        """Free all rows of an owner, who has these slots, bool [slots]."""
        self.of[slots], self.needed[slots], self.kept[slots] = NOWHERE, 0, 0
        self.free_all(owner)

    def at(self, lowest: int, highest: int) -> range:
        """The positions with rows among these, both included."""
        every = self.lifetime.every
        return range(-(-(max(0, lowest) + 1) // every) * every - 1, highest + 1, every)


class EngineRows:
    """The rows of one lifetime that one engine owns. Its methods are called with the pool's lock.

    Attributes:
        bytes: of a row.
        used: rows that trees need.
        kept: rows that only resume points keep.
    """

    def __init__(self, rows: Rows, owner: int) -> None:
        self.rows = rows
        self.lifetime = rows.lifetime
        self.bytes = rows.lifetime.row_bytes
        self.used = self.kept = 0
        self._owner = owner

    def lend(self, count: int, after: int) -> list[int]:
        """Take free rows. The first of them follows another row, if that is easy."""
        return self.rows.lend(count, after, self._owner)

    def hold(self, slots: Ints) -> None:
        """One more node needs the row of each slot, int64 [n]. A slot may be here twice."""
        rows = self.rows
        unheld = np.unique(slots[rows.needed[slots] == 0])
        np.add.at(rows.needed, slots, 1)
        self.used += len(unheld)
        self.kept -= int(np.count_nonzero(rows.kept[unheld]))

    def let_go(self, slots: Ints) -> None:
        """One node less needs the row of each slot, int64 [n]. A slot may be here twice. Frees what nobody needs."""
        rows = self.rows
        np.subtract.at(rows.needed, slots, 1)
        gone = np.unique(slots[rows.needed[slots] == 0])
        stays = rows.kept[gone] > 0
        self.used -= len(gone)
        self.kept += int(np.count_nonzero(stays))
        rows.leave(gone[~stays])

    def keep(self, slots: Ints) -> None:
        """One more resume point keeps the rows of slots, int64 [n], which trees or other points have."""
        self.rows.kept[slots] += 1

    def forget(self, slots: Ints) -> None:
        """One resume point less keeps the rows of slots, int64 [n]."""
        rows = self.rows
        rows.kept[slots] -= 1
        gone = slots[(rows.kept[slots] == 0) & (rows.needed[slots] == 0)]
        self.kept -= len(gone)
        rows.leave(gone)

    def move(self, slot: int, to: int) -> None:
        """Let another slot of the same tokens, which has no row, have the row of a slot, which one node needs."""
        rows = self.rows
        rows.of[to], rows.of[slot] = rows.of[slot], NOWHERE
        rows.needed[to], rows.needed[slot] = 1, 0

    def held(self, slots: Ints) -> int:
        """How many rows of slots, int64 [n], trees need."""
        return int(np.count_nonzero(self.rows.needed[slots]))


class TreeRows:
    """The rows of one lifetime that a tree needs.

    Attributes:
        used: nodes that need a row.
        lost: a node at a position below this may lack the row that it had.
    """

    def __init__(self, own: EngineRows) -> None:
        self.own = own
        self.rows = own.rows
        self.lifetime = own.lifetime
        self.used = self.lost = 0
        self._needs = np.zeros(0, bool)  # by node
        self._spare: list[int] = []  # rows reserved for the tree, the next one last
        self._last = NOWHERE  # the row that was given last
        self._swept = 0  # nodes at positions below this need no row
        self._making = NO_SLOTS  # the slots whose rows the pass makes

    def grow(self, capacity: int) -> None:
        """Make room for this many nodes."""
        self._needs = np.concatenate([self._needs, np.zeros(capacity - len(self._needs), bool)])

    @property
    def needed(self) -> Nodes:
        """The nodes that need a row, int64 [n]."""
        return np.flatnonzero(self._needs)

    def needs(self, nodes: Nodes) -> NDArray[np.bool_]:
        """Which of some nodes, int64 [n], need a row."""
        return self._needs[nodes]

    def lacking(self, nodes: Nodes) -> Nodes:
        """The nodes among some, int64 [n], that need no row yet."""
        return nodes[~self._needs[nodes]]

    def reserve(self, slots: Ints) -> None:
        """Give rows to slots without one, int64 [n]."""
        bare = np.unique(slots[self.rows.of[slots] == NOWHERE])
        if len(bare):
            if (more := len(bare) - len(self._spare)) > 0:
                self._spare = [*reversed(self.own.lend(more, (self._spare[:1] or [self._last])[0])), *self._spare]
            given = self._spare[: -len(bare) - 1 : -1]
            del self._spare[-len(bare) :]
            self.rows.of[bare] = given if self.lifetime.every == 1 else UNMADE - np.array(given)
            self._last = given[-1]

    def give(self, nodes: Nodes, slots: Ints) -> None:
        """Let nodes in these slots, int64 [n] each, need their rows. Slots without a row get one."""
        if len(nodes):
            self.reserve(slots)
            self.own.hold(slots)
            self._needs[nodes] = True
            self.used += len(nodes)

    def begin(self, slots: Ints) -> None:
        """A pass begins that reads the rows of slots, int64 [n], and makes the rows that are not there."""
        self._making = slots[self.rows.of[slots] <= UNMADE]

    def end(self) -> None:
        """The pass went well."""
        made = np.unique(self._making[self.rows.of[self._making] <= UNMADE])
        self.rows.of[made] = UNMADE - self.rows.of[made]
        self._making = NO_SLOTS

    def give_next(self, node: int, slot: int) -> None:
        """The same for one node in a slot that nobody else has, in a few operations."""
        rows = self.rows
        if rows.of[slot] == NOWHERE:
            if not self._spare:
                self._spare = self.own.lend(1, self._last)[::-1]
            self._last = rows.of[slot] = self._spare.pop()
        rows.needed[slot] = 1
        self._needs[node] = True
        self.used += 1
        self.own.used += 1

    def let_go(self, nodes: Nodes, slot: Ints) -> None:
        """Let nodes do without a row, if they need one. ``slot`` has the slot of each node, by node."""
        nodes = nodes[self._needs[nodes]]
        if len(nodes):
            self._needs[nodes] = False
            self.own.let_go(slot[nodes])
            self.used -= len(nodes)

    def change(self, node: int, slot: int, to: int) -> bool:
        """Let a node that needs its row have it in another slot of the same tokens. Returns whether it could be had."""
        rows = self.rows
        if rows.of[to] >= 0:
            self.own.hold(np.array([to]))
            self.own.let_go(np.array([slot]))
        elif rows.of[to] == NOWHERE and rows.needed[slot] == 1 and not rows.kept[slot]:
            self.own.move(slot, to)
        else:
            self._needs[node] = False
            self.own.let_go(np.array([slot]))
            self.used -= 1
            return False
        return True

    def sweep(self, lowest: int, depths: Ints, slot: Ints) -> None:
        """Let rows go once no later node is above a position.

        Args:
            lowest: the least position of a later node.
            depths, slot: the position and the slot of each node, by node, int64 [n] each.
        """
        end = lowest + 1 - self.lifetime.reach
        if not self.lifetime.in_pass:
            self.lost = max(self.lost, end)
        if end >= self._swept + self.lifetime.at_once:
            self._swept, self.lost = end, max(self.lost, end)
            nodes = np.flatnonzero(self._needs[: len(depths)])
            self.let_go(nodes[depths[nodes] < end], slot)

    def start_over(self) -> None:
        """The tree has freed all rows, and evaluates nodes from the root on: their rows are swept again."""
        self.lost = self._swept = 0

    def take(self, length: int) -> None:
        """The tree goes on after a cached prefix of this length, of which it has the last rows."""
        self.lost = max(self.lost, length + 1 - self.lifetime.reach)

    def close(self) -> Ints:
        """Return the reserved rows, int64 [n]. No node needs a row any more."""
        return np.array(self._spare, dtype=np.int64)


def resumable(rows: Sequence[EngineRows], slots: Ints) -> int:
    """After how many of these slots of a cached prefix, int64 [n], a tree can go on: of all lifetimes it finds rows."""
    if not rows:
        return len(slots)
    after = np.arange(len(slots) + 1)
    can_go_on = np.ones(len(after), bool)
    for one in rows:
        life = one.lifetime
        lacks = (one.rows.of[slots] < 0) & (after[1:] % life.every == 0)
        lacking = np.concatenate([[0], np.cumsum(lacks)])
        end = np.maximum(0, after - life.lag)
        can_go_on &= lacking[end] == lacking[np.clip(after + 1 - life.reach, 0, end)]
    return int(np.flatnonzero(can_go_on)[-1])


def points_are_cheap(rows: Sequence[EngineRows], slot_bytes: int) -> bool:
    """Whether there are resume points at all multiples of ``POINT_TOKENS``."""
    point = sum(one.bytes * -(-one.lifetime.reach // one.lifetime.every) for one in rows)
    return 0 < point <= MAX_POINT_SHARE * POINT_TOKENS * slot_bytes


class ResumePoints:
    """The ends of cached prefixes where trees can go on, least recently used first. Called with the pool's lock.

    A point keeps the rows that a node after the prefix reads, and the rows that its last node reads: a prompt that is
    given again is read from its last token on.
    """

    def __init__(self, rows: Sequence[EngineRows]) -> None:
        self._rows = rows
        self._by_use: OrderedDict[int, list[Ints]] = OrderedDict()  # by the last slot: the slots whose rows are kept

    def __len__(self) -> int:
        return len(self._by_use)

    def add(self, slots: Ints) -> None:
        """Make a point at the end of a cached prefix, int64 [n], if the rows are there. One that exists is used now."""
        if not len(slots) or (last := int(slots[-1])) in self._by_use:
            return self.use(slots)
        kept = []
        for one in self._rows:
            read = slots[[*one.rows.at(len(slots) - one.lifetime.reach, len(slots) - 1 - one.lifetime.lag)]]
            has_row = one.rows.of[read] >= 0
            if not has_row[1:].all():  # the first is read by the last node alone
                return None
            kept.append(read[has_row])
        for one, read in zip(self._rows, kept, strict=True):
            one.keep(read)
        self._by_use[last] = kept
        return None

    def use(self, slots: Ints) -> None:
        """A tree goes on after this prefix, int64 [n]."""
        for slot in slots[-1:].tolist():
            if slot in self._by_use:
                self._by_use.move_to_end(slot)

    def drop(self, slots: Ints) -> None:
        """Drop the points that end in these slots, int64 [n]."""
        for slot in slots.tolist() if self._by_use else ():
            for one, kept in zip(self._rows, self._by_use.pop(slot, ()), strict=False):
                one.forget(kept)

    def drop_oldest(self) -> None:
        """Drop the point that was used least recently."""
        self.drop(np.array([next(iter(self._by_use))]))
