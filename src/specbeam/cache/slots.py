"""The slot of the KV cache in which each node of a token tree lies."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from specbeam.backends.contract import EMPTY_SLOT_BYTES, POINT_TOKENS, Backend, TreeBatch
from specbeam.cache.places import BLOCK_SLOTS, NOWHERE
from specbeam.cache.pool import EngineCache, locked
from specbeam.cache.prefixes import NO_SLOTS, Ints, common_length
from specbeam.cache.rows import TreeRows, points_are_cheap, resumable
from specbeam.core.tree import NO_NODES, Nodes, Tree

MIN_TOKENS_AWAITED = 64
"""Wait for a tree that prefills the same tokens if they are at least this many: waiting takes a pass or more."""
MAX_RESERVED_SLOTS = 2 * BLOCK_SLOTS
"""A tree gives back slots of dropped nodes when it has more than this many to use again."""


class Slots:
    """The slots of one tree's nodes. A node gets a slot when it is evaluated, and loses it when it is dropped.

    For each lifetime of the backend a slot has a row, too, while later nodes may read it. Where nodes see ancestors
    that have lost their rows, the tree goes back to a position at which all rows are there, and recomputes the rest.

    Segments are valid until :meth:`close`, and while this object lives. After that its slots are free.

    Args:
        cache: the part of the pool that the engine owns. None for a tree without an engine.
        shares: whether the tree begins with a cached prefix of the engine, and its own tokens are cached for others.

    Attributes:
        used: nodes that have a slot.
        peak: the maximum number of slots that were in use at once. Rows count as their share of a whole token.
        reused: how many nodes had a slot from the start. Its own nodes, found again after it was closed, do not count.
        reserved: slots reserved for this tree, the next one last.
        begin: the tokens of the shared prefix, at most down to the first node prepared, int64 [n]. None before that.
        cached: how many of its first tokens the tree has added to the prefix cache.
        is_fresh: no node was in a pass yet, and the tree may begin with tokens that others prefill.
        rows: what it needs of each lifetime.
    """

    def __init__(self, tree: Tree, backend: Backend, cache: EngineCache | None = None, shares: bool = False) -> None:
        self.tree = tree
        self.backend = backend
        self.cache = cache or EngineCache(backend)
        self.pool = self.cache.pool
        self.shares = shares
        self.peak = self.reused = 0
        self._was_closed = False
        self._reset()

    def _reset(self) -> None:
        self.used = self.cached = 0
        self.reserved: list[int] = []
        self.begin: Ints | None = None
        self.is_fresh = False
        self._first = NOWHERE  # the first node that was prepared
        self._awaited: tuple[Slots, Ints, int] | None = None  # a tree, its begin, and the tokens in common
        self._slot = NO_SLOTS  # by node
        self._prefix = NO_SLOTS  # slots by position
        self._placed = 0  # nodes of the shared prefix that have got slots, which are in _prefix
        self.rows = [TreeRows(own) for own in self.cache.rows]
        self._has_cheap_points = points_are_cheap(self.cache.rows, self.cache.slot_bytes)
        self._kept_depth: int | None = None  # the least position of the nodes of the last keep, until their pass
        self._points: set[int] = set()  # lengths of the prompt's beginnings from which other trees may go on
        self._owner = self.cache.number  # of its slots, unless the engine has freed all of them

    @property
    def held(self) -> Ints:
        """The slots of all nodes, int64 [n]."""
        return self._slot[self._slot != NOWHERE]

    def at(self, nodes: Nodes) -> Ints:
        """The slots of nodes, int64 [n]; -1 for a node without a slot."""
        self._follow_tree(nodes)
        return self._slot[nodes]

    def places(self, nodes: Nodes) -> Ints:
        """Where the backend keeps nodes, int64 [n]: slots, or rows if it keeps everything in those. -1 for nowhere."""
        slots = self.at(nodes)
        if not self.rows or self.cache.slot_bytes > EMPTY_SLOT_BYTES:
            return slots
        return np.where(slots == NOWHERE, NOWHERE, self.pool.table[0][slots])

    def missing(self, nodes: Any) -> Nodes:
        """These nodes, and their ancestors that were never evaluated, ancestors first."""
        climbing = np.array(sorted({*np.asarray(nodes).tolist()}), dtype=np.int64)  # np.unique is slower for few
        self._follow_tree()
        tree = self.tree
        if climbing[0] and NOWHERE not in self._slot[tree.parents(climbing)].tolist():
            return climbing  # a parent was evaluated after its ancestors
        missing = [climbing]
        prefix = tree.prefix
        while True:
            climbing = np.unique(tree.parents(climbing[tree.depths(climbing) >= len(prefix)]))
            climbing = climbing[self._slot[climbing] == NOWHERE]
            if not len(climbing):
                break
            missing.append(climbing)
        deepest = tree.depths(np.concatenate(missing)).max()
        on_prefix = prefix[self._placed : deepest + 1]
        missing.append(on_prefix[self._slot[on_prefix] == NOWHERE])
        return np.unique(np.concatenate(missing))

    def growth(self, nodes: Nodes) -> int:
        """How many new slots these nodes need."""
        return int(np.count_nonzero(self.at(nodes) == NOWHERE))

    def growth_bytes(self, nodes: Nodes, rest: Nodes | None = None, ahead: int = 0) -> int:
        """Bytes of the new slots and rows that passes need. Arguments as for :meth:`tree_batch`."""
        later = ahead * len(nodes)
        size = (self.growth(nodes) + later) * self.cache.slot_bytes
        lowest = self._lowest_later(nodes if rest is None else rest) if self.rows else 0
        for one in self.rows:
            given = len(one.lacking(self._reading(one, nodes, lowest)))
            size += (given + (later if one.lifetime.every == 1 else 0)) * one.own.bytes
        return size

    def max_ahead(self, nodes: Nodes) -> int:
        """How many passes may follow one over these nodes, each over their children, without a row of an ancestor."""
        tree, ahead = self.tree, sys.maxsize
        for one in self.rows:
            if (life := one.lifetime).every > 1:
                node = int(nodes[-1])
                position = node - len(tree) + tree.prefix_length if node >= len(tree) else int(tree.depths(nodes).max())
                ahead = min(ahead, -(position + 1 - life.lag + 1) % life.every)
        return ahead

    def shareable_bytes(self) -> int:
        """Bytes of other trees that it would share if it began now."""
        return self.cache.held_bytes(self.tree.tokens(self.tree.prefix[:-1])) if self.shares else 0

    @property
    def held_bytes(self) -> int:
        """Bytes of the slots and rows that it holds. What two nodes share counts once."""
        rows = (len(np.unique(self._slot[one.needed])) * one.own.bytes for one in self.rows)
        return len(np.unique(self.held)) * self.cache.slot_bytes + sum(rows)

    def _is_next(self, nodes: Nodes) -> bool | np.bool_:
        """Whether this is one node, the next one of a tree that is a single sequence. Its ancestors have slots."""
        if len(nodes) != 1 or not self._placed or self._slot[nodes[0]] != NOWHERE:
            return False
        new = max(0, nodes[0] + 1 - len(self.tree))  # nodes that the tree gets next, down to this one
        return self._placed == self.tree.prefix_length - 1 + new and (new > 0 or nodes[0] == self.tree.tip)

    def _see_lost_rows(self, nodes: Nodes) -> bool:
        """Whether some of these nodes may see ancestors that have lost their rows."""
        if not any(one.lost > 0 for one in self.rows) or not len(nodes):
            return False
        lowest = int(self.tree.depths(nodes).min())
        return any(max(0, lowest + 1 - one.lifetime.reach) < one.lost for one in self.rows)

    def prepare(self, nodes: Nodes) -> Nodes:
        """Get ready to evaluate nodes, and return what is :meth:`missing`.

        At first, the tree takes the slots of its longest cached prefix. It frees all slots, and begins again so, if
        nodes see ancestors that have lost their rows.
        """
        if self.begin is None:
            self._first, self._owner = int(nodes.min()), self.cache.number
            self.begin = self.tree.tokens(self.tree.path(self._first)[: self.tree.prefix_length])
            self.is_fresh = self.shares
            _by_tree[id(self.tree), id(self.backend)] = self
            self._take_prefix()
        missing = self.missing(nodes)
        if self._see_lost_rows(missing):
            self.free(np.flatnonzero(self._slot != NOWHERE))
            self._placed = 0
            if self.is_fresh:
                self.reused = 0
            for one in self.rows:
                one.start_over()
            self._take_prefix(int(self.tree.depths(missing).min()) if len(missing) else None)
            missing = self.missing(nodes)
        return missing

    def await_prefix(self, others: Iterable[Slots]) -> bool:
        """Wait for another tree that is about to prefill the same tokens, then take the slots of these tokens.

        Args:
            others: trees that began before this one.

        Returns:
            Whether to wait. If not, nodes are to be prepared anew.
        """
        while self.is_fresh:
            awaited = self._awaited = self._awaited or self._farthest(others)
            if awaited is None:
                return False
            other, begin, common = awaited
            if other.begin is begin and other.cached < common:
                other._points.add(common)
                return True
            self._awaited = None
            self._take_prefix()
        return False

    def _farthest(self, others: Iterable[Slots]) -> tuple[Slots, Ints, int] | None:
        """The tree that will prefill the longest common prefix, its begin, and the length of that prefix."""
        assert self.begin is not None
        tokens, farthest, longest = self.begin[:-1], None, self._placed + MIN_TOKENS_AWAITED - 1
        for other in others:
            begin = other.begin if other.shares else None
            if begin is not None and longest < min(len(begin), len(tokens)) and begin[longest] == tokens[longest]:
                common = common_length(begin, tokens)
                if common > max(longest, other.cached):
                    farthest, longest = (other, begin, common), common
        return farthest

    def tree_batch(
        self,
        nodes: Nodes,
        wanted: Ints,
        vocab: int | None = None,
        source: Any = None,
        ahead: int = 0,
        token: Ints | None = None,
        rest: Nodes | None = None,
    ) -> TreeBatch:
        """Give nodes slots, and return the part of a pass that evaluates them. Their ancestors have slots or are here.

        Args:
            ahead: let the segment have slots for this many further passes, each over as many nodes.
            token: of a single node that the tree gets after this pass, below its tip, int64 [1].
            rest: the nodes that are evaluated after these, but for nodes that grow and nodes below them. None where
                that is not known.
        """
        self._follow_tree(nodes)
        self.is_fresh = False
        tree = self.tree
        is_next, before = self._is_next(nodes), self._placed
        placed = self._place_next(nodes) if is_next else self._place(nodes)
        try:
            later = self._reserve(ahead * len(nodes)) if ahead else NO_SLOTS
            if self.rows:
                self._give_rows(nodes, later, nodes if rest is None else rest, is_next)
            self.pool.reserve(self.backend)
        except Exception:  # at the next try, lower slots may be free
            self._placed = before
            self.free(placed)
            raise
        if token is None:
            tokens, positions = tree.tokens(nodes), tree.depths(nodes)
        else:
            tokens, positions = token, nodes - len(tree) + tree.prefix_length
        # A draft model may lack some of the target's tokens. Any other token will do: draft tokens are verified.
        if (tokens[0] if is_next else tokens.max()) >= self.backend.vocab_size:
            tokens = np.where(tokens < self.backend.vocab_size, tokens, 0)
        if is_next or positions.max() < self._placed:
            suffixes = np.empty((len(nodes), 0), dtype=np.int64)
        else:
            suffixes = self._slot[tree.paths_beyond_prefix(nodes)]
        slots = self._slot[nodes]
        if self.rows:
            held = self.used * self.cache.slot_bytes + sum(one.used * one.own.bytes for one in self.rows)
            self.peak = max(self.peak, -(-held // self.cache.token_bytes))
        prefix, table = self._prefix[: self._placed], self.pool.table
        return TreeBatch(tokens, positions, slots, prefix, suffixes, wanted, vocab, source, later, rows=table)

    def evaluated(self, pending: Nodes, ahead: int = 0) -> None:
        """A pass went well. Cache what it has prefilled of the prompt, and let rows go that no later node reads.

        Args:
            pending: nodes that may have a slot, but were not evaluated, ancestors first.
            ahead: how many nodes the backend went on by itself. They are next in the tree, and in the reserved slots.
        """
        if self.rows:
            self._end_pass()
        if ahead:
            first = len(self.tree) + max(0, self._placed - self.tree.prefix_length)
            later = np.arange(first, first + ahead)
            self._follow_tree(later)
            self._assign(later)
            for one in self.rows:
                if one.lifetime.every == 1:
                    self._give(one, later)
        if self.shares and self.begin is not None and self.cached < len(self.begin):
            read = min(self._placed, len(self.begin), *self.tree.depths(pending[:1]).tolist())
            if self.cached < read:
                self.add_prefix(self.tree.prefix[:read], self._points_among(self.cached, read))
        if self.rows:
            self._let_rows_go(self._lowest_later(pending))
            if not len(pending):
                self._kept_depth = None

    @locked
    def add_prefix(self, path: Nodes, points: Iterable[int] | None = None) -> None:
        """Cache the beginning of a sequence that has slots. ``path`` are its nodes from the root on.

        Args:
            points: the lengths of its beginnings that get a resume point. None for a point at its end.
        """
        if self.shares and self.used:
            self._follow_tree()
            tokens = self.tree.tokens(path)
            self._share(path, self.cache.prefixes.use(tokens))
            slots = self._slot[path]
            self.cache.keep(tokens, slots)
            self.cached = max(self.cached, len(path))
            if self.rows:
                slots = slots[: [*(slots == NOWHERE).nonzero()[0].tolist(), len(slots)][0]]
                for point in [len(slots)] if points is None else points:
                    self.cache.points.add(slots[:point])

    def _points_among(self, begin: int, end: int) -> list[int]:
        """The lengths of the prompt's beginnings, above one length and up to another, that get resume points."""
        if not self.shares or self.begin is None:
            return []
        end = min(end, len(self.begin))
        points = {point for point in (*self._points, len(self.begin)) if begin < point <= end}
        if self._has_cheap_points:
            points.update(range((begin // POINT_TOKENS + 1) * POINT_TOKENS, end + 1, POINT_TOKENS))
        return sorted(points)

    @locked
    def free(self, nodes: Nodes) -> None:
        """Free the slots of nodes that the tree has dropped. Nodes without a slot are left out."""
        self._follow_tree()
        for one in self.rows:
            one.let_go(nodes, self._slot)
        slots = self._slot[nodes]
        slots = slots[slots != NOWHERE]
        self._slot[nodes] = NOWHERE
        self.reserved += self.cache.let_go(slots)[::-1].tolist()
        self._count(-len(slots))
        if len(self.reserved) > MAX_RESERVED_SLOTS:
            spare, self.reserved = self.reserved[:-BLOCK_SLOTS], self.reserved[-BLOCK_SLOTS:]
            self.pool.give_back(np.array(spare))

    def keep(self, nodes: Nodes) -> None:
        """Free the slots of all nodes but these, their ancestors and the shared prefix."""
        needed = np.union1d(self.tree.prefix, self.tree.paths_beyond_prefix(nodes))
        self.free(np.setdiff1d(np.flatnonzero(self._slot != NOWHERE), needed))
        if self.rows:
            self._kept_depth = int(self.tree.depths(nodes).min())
            self._let_rows_go(self._kept_depth)

    @locked
    def close(self) -> None:
        """Free all slots. The tree may begin again."""
        if self._owner == self.cache.number:
            for one in self.rows:
                one.let_go(one.needed, self._slot)
                one.rows.give_back(one.close())
            unused = self.cache.let_go(self.held)
            self.pool.give_back(np.concatenate([unused, np.array(self.reserved, dtype=np.int64)]))
        self._was_closed = True
        self._reset()

    @locked
    def _lowest_later(self, rest: Nodes) -> int:
        """The least position of a node that is evaluated later: one of the rest, or where nodes grow, or below that."""
        lowest = self.tree.growing_depth if self._kept_depth is None else self._kept_depth
        return int(self.tree.depths(rest[rest < len(self.tree)]).min(initial=lowest))

    def _let_rows_go(self, lowest: int) -> None:
        """Let rows go that no node from a position on reads."""
        depths = self.tree.depths(slice(0, len(self.tree)))
        for one in self.rows:
            one.sweep(lowest, depths, self._slot)

    @locked
    def _take_prefix(self, longest: int | None = None) -> None:
        """Take the longest cached prefix of the first node that was prepared, if the tree shares any.

        Args:
            longest: the maximum number of tokens to take.
        """
        if self.shares:
            self._follow_tree()
            path = self.tree.path(self._first)[:-1][:longest]
            found = self.cache.prefixes.use(self.tree.tokens(path))
            slots = found[: resumable(self.cache.rows, found)]
            if len(slots) < len(found):  # the third tree that begins so may go on where they part
                self._points.add(len(found))
            self._share(path, slots)
            for one in self.rows:
                first = max(0, len(slots) - one.lifetime.reach)
                last = path[[*one.rows.at(first, len(slots) - 1)]]
                self._give(one, last[one.rows.of[self._slot[last]] >= 0])
                one.take(len(slots))
            if self.rows and len(slots) == len(found):
                self.cache.points.add(slots)
            self._follow_prefix()
            if not self._was_closed:
                self.reused = max(self.reused, len(slots))

    def _give(self, one: TreeRows, nodes: Nodes) -> None:
        """Let some nodes need their rows, and give them one if they have none."""
        nodes = one.lacking(nodes)
        one.give(nodes, self._slot[nodes])

    @locked
    def _give_rows(self, nodes: Nodes, later: Ints, rest: Nodes, is_next: bool | np.bool_) -> None:
        """Give the rows that a pass over nodes needs, and passes ahead over nodes in reserved slots, int64 [n]."""
        lowest = self._lowest_later(rest)
        for one in self.rows:
            if is_next and one.lifetime.every == 1:  # the last node of its sequence is read again
                one.give_next(nodes.item(), self._slot.item(nodes.item()))
            else:
                read = self._reading(one, nodes, lowest)
                self._give(one, read)
                if one.lifetime.every > 1:
                    one.begin(self._slot[read])
            if len(later) and one.lifetime.every == 1:
                one.reserve(later)

    @locked
    def _end_pass(self) -> None:
        for one in self.rows:
            one.end()

    def _reading(self, one: TreeRows, nodes: Nodes, lowest: int) -> Nodes:
        """The nodes that need rows of a lifetime for a pass over some nodes, and after it.

        Args:
            lowest: the least position of a node that is evaluated after the pass.
        """
        tree, life, at = self.tree, one.lifetime, one.rows.at
        if nodes[-1] >= len(tree):  # the next node of a single sequence
            depths, on_prefix = nodes - len(tree) + tree.prefix_length, np.ones(len(nodes), bool)
        else:
            depths = tree.depths(nodes)
            on_prefix = tree.prefix[np.minimum(depths, tree.prefix_length - 1)] == nodes
        there = depths[on_prefix]
        points = self._points_among(int(there.min()), int(there.max()) + 1) if len(there) else []
        if life.every == 1:
            is_read = depths >= (0 if life.in_pass else lowest + 1 - life.reach)
            for point in points:
                is_read |= on_prefix & (depths >= point - life.reach) & (depths < point)
            return nodes[is_read]
        nearest, farthest = lowest + 1 - life.reach, int(depths.max()) - life.lag
        positions = {*at(nearest, min(farthest, tree.prefix_length - 1))}
        for point in points:
            positions.update(at(point - life.reach, point - 1 - life.lag))
        found = [tree.prefix[sorted(positions)]]
        if not on_prefix.all():
            paths, ends = tree.paths_beyond_prefix(nodes[~on_prefix]), depths[~on_prefix]
            for position in at(max(tree.prefix_length, nearest), farthest):
                found.append(paths[ends - life.lag >= position, position - tree.prefix_length])
        return np.unique(np.concatenate(found))

    def _share(self, path: Nodes, slots: Ints) -> None:
        """Take these slots for the first nodes of a path from the root on, and free others with the same tokens.

        So whoever holds the end of a cached prefix holds all of it, and what nobody holds can be evicted from its end.
        """
        path = path[: len(slots)]
        slots_before = self._slot[path]
        is_other = slots_before != slots
        if is_other.any():
            self.cache.hold(slots[is_other])
            for one in self.rows:
                for position in np.flatnonzero(is_other & one.needs(path)).tolist():
                    if not one.change(path[position], slots_before[position], slots[position]):
                        one.lost = max(one.lost, position + 1)
            self._slot[path] = slots
            self._prefix = self._prefix.copy()  # a segment may be run again
            placed = self.tree.prefix[: self._placed]
            self._prefix[: len(placed)] = self._slot[placed]
            slots_before = slots_before[is_other & (slots_before != NOWHERE)]
            self._count(int(np.count_nonzero(is_other)) - len(slots_before))
            self.pool.give_back(self.cache.let_go(slots_before))

    @locked
    def _place_next(self, nodes: Nodes) -> Nodes:
        """The same as :meth:`_place` for the next node of a tree that is a single sequence, in a few operations."""
        at = self._placed
        if not self.reserved:
            self.reserved = self.pool.lend(1, int(self._prefix[at - 1]), self._owner)[::-1]
        if at == len(self._prefix):
            self._prefix = np.resize(self._prefix, 2 * at)
        slot = self.reserved.pop()
        self._slot[nodes[0]] = self._prefix[at] = slot
        self.pool.references[slot] = 1
        self._placed = at + 1
        self.cache.used += 1
        self._count(1)
        return nodes

    def _place(self, nodes: Nodes) -> Nodes:
        """Give slots to nodes without one, and return these."""
        unplaced = nodes[self._slot[nodes] == NOWHERE]
        if len(unplaced):
            self._assign(unplaced)
        self._follow_prefix()
        return unplaced

    @locked
    def _assign(self, nodes: Nodes) -> None:
        """Give the slots that are reserved next to nodes."""
        slots = self._reserve(len(nodes))
        self._slot[nodes] = slots
        del self.reserved[-len(nodes) :]
        self.pool.references[slots] = 1
        self.cache.used += len(nodes)
        self._count(len(nodes))

    @locked
    def _reserve(self, count: int) -> Ints:
        """Have at least this many slots reserved, and return the next ones."""
        if (more := count - len(self.reserved)) > 0:
            last = self.reserved[:1] or self._prefix[max(0, self._placed - 1) : self._placed].tolist() or [NOWHERE]
            self.reserved = [*reversed(self.pool.lend(more, last[0], self._owner)), *self.reserved]
        return np.array(self.reserved[: -count - 1 : -1], dtype=np.int64)

    def _count(self, more: int) -> None:
        self.used += more
        if not self.rows:
            self.peak = max(self.peak, self.used)

    def _follow_prefix(self) -> None:
        """Append the slots of the nodes that the shared prefix has grown by."""
        rest = self.tree.prefix[self._placed :]
        if not len(rest):
            return
        slots = self._slot[rest]
        if slots.min() == NOWHERE:
            slots = slots[: int((slots == NOWHERE).argmax())]
        end = self._placed + len(slots)
        if end > len(self._prefix):
            self._prefix = np.resize(self._prefix, 2 * end)
        self._prefix[self._placed : end] = slots
        self._placed = end

    def _follow_tree(self, nodes: Nodes = NO_NODES) -> None:
        """Make room for the nodes added to the tree since the last call, and for nodes that it gets next."""
        if len(self._slot) < (size := max(len(self.tree), int(nodes[-1]) + 1 if len(nodes) else 0)):
            capacity = max(2 * len(self._slot), size)
            self._slot = np.concatenate([self._slot, np.full(capacity - len(self._slot), NOWHERE, dtype=np.int64)])
            for one in self.rows:
                one.grow(capacity)


_by_tree: WeakValueDictionary[tuple[int, int], Slots] = WeakValueDictionary()


def have_slots(tree: Tree, backend: Backend, nodes: Nodes) -> bool:
    """Whether nodes of a live request were evaluated, and have not lost their slots since."""
    slots = _by_tree.get((id(tree), id(backend)))
    return slots is not None and bool((slots.at(nodes) != NOWHERE).all())


def slots_of(tree: Tree, backend: Backend) -> Slots:
    """Where the keys and values of a tree lie, while its request is live."""
    return _by_tree[id(tree), id(backend)]
