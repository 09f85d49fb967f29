"""Slots of a fake backend, against brute force: the slots that a node sees, who holds them, and which are free."""

import gc
from collections import Counter
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbeam.backends.contract import Lifetime
from specbeam.cache.places import NOBODY, NOWHERE, FreeList
from specbeam.cache.pool import EngineCache, pool_of
from specbeam.cache.rows import UNMADE
from specbeam.cache.slots import Slots
from specbeam.core.tree import NO_NODES, Tree
from tests.calls import calls_made
from tests.conftest import examples


class FakeBackend:
    """Stores a name of the sequence down to a node in its slot and rows, as a real one stores keys and values there."""

    vocab_size = 200
    slot_bytes = 1

    def __init__(self, lifetimes=()):
        self.lifetimes = lifetimes
        self.capacity = 0
        self.rows = [0] * len(lifetimes)
        self.stored = {}
        self.in_rows = [{} for _ in lifetimes]
        self.names = {}

    def reserve(self, slots, rows=()):
        self.capacity = max(self.capacity, slots)
        self.rows = [*map(max, self.rows, rows)]

    def named(self, tokens):
        """A number for each beginning of a sequence."""
        name, found = -1, []
        for token in tokens:
            name = self.names.setdefault((name, token), len(self.names))
            found.append(name)
        return found

    def forward(self, slots, nodes, parents, rest=None):
        """Evaluate nodes as a backend does, and check all that a segment promises."""
        segment = slots.tree_batch(nodes, np.arange(len(nodes)), rest=rest)
        assert max(segment.slots) < self.capacity
        assert segment.tokens.tolist() == [token if token < 200 else 0 for token in slots.tree.tokens(nodes)]
        assert len(set(segment.slots.tolist())) == len(nodes)
        sequences = [self.named(slots.tree.tokens(parents.path(node)[::-1]).tolist()) for node in nodes.tolist()]
        for sequence, slot in zip(sequences, segment.slots.tolist(), strict=True):
            self.stored[slot] = sequence[-1]
        for row, sequence in enumerate(sequences):
            position = int(segment.positions[row])
            seen = [*segment.prefix.tolist(), *segment.suffixes[row].tolist()][: position + 1]
            assert seen[position] == segment.slots[row]
            # A slot that holds nothing, or another node than the ancestor of its position, would show here.
            assert [self.stored.get(slot) for slot in seen] == sequence
        for number, lifetime in enumerate(self.lifetimes):
            self.read_rows(number, lifetime, segment, sequences)

    def read_rows(self, number, lifetime, segment, sequences):
        """Write the rows of a pass, and check the rows that its nodes read."""
        stored, of, here = self.in_rows[number], segment.rows[number], {*segment.slots.tolist()}
        paths = []
        for row, sequence in enumerate(sequences):
            position = len(sequence) - 1
            seen = [*segment.prefix.tolist(), *segment.suffixes[row].tolist()][: position + 1]
            assert all(UNMADE - self.rows[number] < of[slot] < self.rows[number] for slot in seen)
            if lifetime.every == 1 and of[seen[-1]] >= 0:
                stored[of[seen[-1]]] = sequence[-1]
            paths.append(seen)
        made = set()  # in this pass
        for seen, sequence in zip(paths, sequences, strict=True):
            position = len(sequence) - 1
            for at in range(max(0, position + 1 - lifetime.reach), position + 1 - lifetime.lag):
                if (at + 1) % lifetime.every:
                    continue
                place, name = of[seen[at]], sequence[at]
                if lifetime.every > 1 and place < 0 and at > position - lifetime.lag - lifetime.every:
                    # It is made of the one before, in its row or beside the cache.
                    before = at - lifetime.every
                    if name not in made and before >= 0:
                        assert sequence[before] in made or stored[of[seen[before]]] == sequence[before]
                    made.add(name)
                    if place <= UNMADE:
                        stored[UNMADE - place] = name
                elif lifetime.every == 1 and (lifetime.in_pass or seen[at] not in here):
                    assert stored.get(place) == name
                elif place >= 0:
                    assert stored[place] == name


class Parents(dict):
    """The parent of each node: a tree without anything to make it fast."""

    def path(self, node):
        """The node and its ancestors."""
        found = []
        while node in self:
            found.append(node)
            node = self[node]
        return found


class Grower:
    """One tree that grows, is pruned and is closed as hypothesis says, with a set of the nodes that have slots."""

    def __init__(self, data, backend, cache, shares):
        longest = 200 if backend.lifetimes else 9
        prompt = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=9))
        prompt = [0] * data.draw(st.sampled_from([0, longest - 9])) + prompt
        self.data, self.backend = data, backend
        self.tree, self.parents = Tree(prompt), Parents({n: n - 1 for n in range(len(prompt))})
        self.slots = Slots(self.tree, backend, cache, shares)
        self.growing, self.placed = [self.tree.tip], set()

    def grow(self):
        draw, below = self.data.draw, self.growing
        for _ in range(draw(st.integers(0, 3))):  # generations added before the next pass
            above = draw(st.lists(st.sampled_from(below), min_size=1, max_size=5))
            token = st.sampled_from([0, 1, 2, 255])  # few, so that nodes of one tree have the same tokens down to them
            tokens = draw(st.lists(token, min_size=len(above), max_size=len(above)))
            added = draw(st.sampled_from([self.tree.add, self.tree.draft]))(above, tokens).tolist()
            self.parents.update(zip(added, above, strict=True))
            below = [*below, *added]
        wanted = draw(st.sets(st.sampled_from(below), min_size=1))
        needed = {ancestor for node in wanted for ancestor in self.parents.path(node)}
        fresh = not self.placed
        pending = self.slots.prepare(np.array(sorted(wanted)))
        if fresh:  # it begins with tokens that were cached
            self.placed = needed - set(pending.tolist())
            assert len(self.placed) == self.slots.reused == self.slots.used
            assert self.placed <= set(self.parents.path(min(wanted))[1:])
        if self.backend.lifetimes:  # it may go back, where rows are lost
            self.placed &= {node for node in self.placed if self.slots.at(np.array([node]))[0] != NOWHERE}
        assert pending.tolist() == sorted(wanted | (needed - self.placed))
        for part in np.array_split(pending, draw(st.integers(1, 3))):  # a long prompt is prefilled in chunks
            if len(part):
                rest = pending[pending > part[-1]]
                self.backend.forward(self.slots, part, self.parents, draw(st.sampled_from([rest, None])))
                self.placed |= set(part.tolist())
                self.slots.evaluated(rest)
        self.below = below

    def prune(self):
        draw = self.data.draw
        self.growing = sorted(draw(st.sets(st.sampled_from(self.below), min_size=1)))
        self.tree.keep(self.growing, sorted(draw(st.sets(st.sampled_from(self.below)))))
        self.slots.free(self.tree.take_dropped())
        self.placed &= {ancestor for node in self.growing for ancestor in self.parents.path(node)}
        assert self.slots.used == len(self.slots.held) == len(self.placed)
        assert self.backend.lifetimes or self.slots.used <= self.slots.peak
        for rows in self.slots.rows:
            assert rows.used == len(rows.needed)
            assert set(rows.needed.tolist()) <= self.placed

    def end(self):
        for node in self.data.draw(st.lists(st.sampled_from(self.growing), min_size=1, max_size=3)):
            self.slots.add_prefix(self.tree.path(node))
        if self.data.draw(st.booleans()):
            self.slots.keep(np.array(self.growing[:1]))
        self.slots.close()


def check(pool, cache, trees):
    """Who holds which slots, counted anew."""
    holders = Counter(slot for tree in trees for slot in tree.slots.held.tolist())
    assert {slot: int(number) for slot, number in enumerate(pool.references) if number} == holders
    assert cache.used == len(holders)
    kept = set(np.flatnonzero(pool.cached).tolist())
    assert kept == set(cache.prefixes.slots().tolist())
    assert cache.kept == len(kept - set(holders))
    for number, (rows, own) in enumerate(zip(pool.rows, cache.rows, strict=True)):
        needed = Counter(slot for tree in trees for slot in tree.slots.at(tree.slots.rows[number].needed).tolist())
        at_points = Counter(slot for point in cache.points._by_use.values() for slot in point[number].tolist())
        assert {slot: int(count) for slot, count in enumerate(rows.needed) if count} == needed
        assert {slot: int(count) for slot, count in enumerate(rows.kept) if count} == at_points
        assert own.used == len(needed)
        assert own.kept == len(at_points.keys() - needed.keys())
        having = np.flatnonzero(rows.of != NOWHERE)
        places = np.where(rows.of <= UNMADE, UNMADE - rows.of, rows.of)[having]
        assert len(np.unique(places)) == len(having)
        assert needed.keys() | at_points.keys() <= {*having.tolist()}
        assert (rows.owners[places] == cache.number).all()
        assert not (needed.keys() | at_points.keys()) - {*np.flatnonzero((pool.references > 0) | pool.cached).tolist()}


LIFETIMES = [
    (),
    (),
    (Lifetime(1, 1),),
    (Lifetime(5, 1), Lifetime(50, 2)),
    (Lifetime(3, 2, in_pass=False),),
    (Lifetime(9, 1), Lifetime(3, 1, in_pass=False)),
    (Lifetime(14, 1, in_pass=False), Lifetime(15, 3, every=4, lag=9, in_pass=False)),
]


@settings(max_examples=examples(6))
@given(st.data(), st.sampled_from(LIFETIMES))
def test_a_node_sees_its_ancestors_whatever_was_dropped_before(data, lifetimes):
    """Some trees of one pool. Two of three share their prefixes."""
    backend = FakeBackend(lifetimes)
    pool, cache = pool_of(backend), EngineCache(backend)
    trees = []
    for _ in range(data.draw(st.integers(1, 6))):
        if len(trees) < 3 and data.draw(st.booleans()):
            trees.append(Grower(data, backend, cache, shares=len(trees) < 2))
        for tree in trees:
            tree.grow()
            tree.prune()
        check(pool, cache, trees)
        if trees and data.draw(st.booleans()):
            trees.pop(data.draw(st.integers(0, len(trees) - 1))).end()
        if data.draw(st.integers(0, 3)) == 0:
            least = data.draw(st.integers(0, 20))
            before = cache.kept_bytes
            assert cache.evict(least) >= min(least, before)
            assert cache.kept_bytes <= max(0, before - least)
        if data.draw(st.integers(0, 5)) == 0:
            pool.free_all(NOBODY)
    for tree in trees:
        tree.slots.close()
    assert cache.used == cache.used_bytes == 0
    assert cache.evict(cache.kept_bytes) >= 0
    assert (pool.in_use, pool.free.end, pool.free.count) == (0, 0, 0)
    assert all((rows.free.end, rows.free.count) == (0, 0) for rows in pool.rows)


@pytest.mark.parametrize("method", ["take", "give_back"])
def test_an_error_in_the_middle_of_a_change_harms_no_other_engine(method):
    """Such as a KeyboardInterrupt that was raised into the thread. The engine gives up all its slots."""
    backend = FakeBackend()
    pool = pool_of(backend)
    broken, other = EngineCache(backend), EngineCache(backend)
    prefill([1] * 100, other, backend)
    prefill([2] * 100, broken, backend)
    slots = prefilled(Tree([3] * 100), backend, broken, shares=True)
    free = pool.free

    def interrupted(*_):
        free._lengths.clear()
        free.count += 1000
        raise KeyboardInterrupt

    change = {"take": lambda: prefill([4] * 200, broken, backend), "give_back": lambda: broken.evict(100)}[method]
    with mock.patch.object(free, method, interrupted), pytest.raises(KeyboardInterrupt):
        change()
    prefill([5] * 300, other, backend)  # at once, and not only after the engine has given up its slots
    broken.clear()
    slots.close()
    check(pool, other, [])
    assert pool.in_use == other.kept == 400
    assert prefill([1] * 150, other, backend) == 100
    other.evict(other.kept)
    assert (pool.in_use, pool.free.end, pool.free.count) == (0, 0, 0)


def prefilled(tree, backend, *how, **shares):
    """The slots of a tree whose prompt is prefilled."""
    slots = Slots(tree, backend, *how, **shares)
    slots.tree_batch(slots.prepare(np.array([tree.tip])), np.array([0]))
    slots.evaluated(NO_NODES)
    return slots


def prefill(prompt, cache, backend):
    """Prefill a prompt, leave it to others, and return how many of its tokens were cached."""
    slots = prefilled(Tree(prompt), backend, cache, shares=True)
    slots.close()
    return slots.reused


def test_a_tree_that_is_closed_is_not_looked_for():
    """To count anew would take time for all cached prefixes."""
    cache = EngineCache(backend := FakeBackend())
    first, *_, last = [calls_made(lambda n=n: prefill([n] * 9, cache, backend)) for n in range(40)]
    assert last <= first


def test_what_nobody_holds_any_more_is_free():
    backend = FakeBackend()
    pool, cache = pool_of(backend), EngineCache(backend)
    for closes in (True, False):
        slots = prefilled(Tree([1] * 100), backend, cache, shares=True)
        assert pool.in_use == 100
        if closes:
            slots.close()
    del slots
    gc.collect()
    assert pool.in_use == 100
    del cache
    gc.collect()
    assert pool.in_use == 0


def test_the_least_recently_used_prefixes_are_evicted_first_from_their_ends():
    cache = EngineCache(backend := FakeBackend())
    first, second, third = ([0] * 100 + [n] * 200 for n in (1, 2, 3))
    assert [prefill(prompt, cache, backend) for prompt in (first, second, third, first)] == [0, 100, 100, 299]
    assert cache.kept == 100 + 3 * 200
    cache.evict(150)
    assert cache.kept == 550
    assert [prefill(prompt[:250], cache, backend) for prompt in (first, third)] == [249, 249]
    cache.evict(cache.kept - 350)
    assert [len(cache.prefixes.find(np.array(prompt))) for prompt in (second, first, third)] == [100, 100 + 50, 300]
    assert cache.evict(10**6) == 350


@given(st.data())
def test_the_free_list(data):
    """Against a set of numbers."""
    free, taken = FreeList(), []
    for _ in range(data.draw(st.integers(1, 30))):
        if taken and data.draw(st.booleans()):
            back = data.draw(st.lists(st.sampled_from(taken), min_size=1, unique=True))
            free.give_back(np.array(back))
            taken = [slot for slot in taken if slot not in back]
        else:
            count = data.draw(st.integers(1, 200))
            got = free.take(count, data.draw(st.sampled_from([-1, *taken])))
            assert len(got) >= count
            taken += got
        assert len(set(taken)) == len(taken)
        assert free.end == max(taken, default=-1) + 1
        assert free.count == free.end - len(taken)


def test_sequences_that_grow_side_by_side_lie_in_runs():
    backend = FakeBackend()
    several = [prefilled(Tree([n] * 40), backend) for n in range(8)]
    for _ in range(200):
        for slots in several:
            tip = slots.tree.add(slots.tree.tip, 5)
            slots.tree.keep(tip)
            slots.tree_batch(slots.prepare(tip), np.array([0]))
    for slots in several:
        assert np.count_nonzero(np.diff(slots.held) != 1) <= 240 // 64


def test_to_see_a_long_suffix_costs_no_more_than_to_see_a_short_one():
    backend, parents = FakeBackend(), Parents({0: -1})
    tree = Tree([1])
    slots = Slots(tree, backend)
    tips, work = tree.tip, []
    backend.forward(slots, np.array([0]), parents)
    for _ in range(200):
        above = np.atleast_1d(tips) if len(work) else np.array([0, 0])
        tips = tree.add(above, [3, 4])
        parents.update(zip(tips.tolist(), above.tolist(), strict=True))
        tree.keep(tips)
        pending = slots.prepare(tips)
        work.append(calls_made(lambda pending=pending: slots.tree_batch(pending, np.arange(2))))
    assert slots.used == 401
    assert np.median(work[-20:]) <= np.median(work[10:30])


@pytest.mark.parametrize("failures", [1, 3])
def test_a_kv_cache_that_cannot_grow_leaves_the_tree_as_it_was(failures):
    backend = FakeBackend()
    reserve, left = backend.reserve, failures

    def scarce(slots, rows=()):
        nonlocal left
        if slots > 64 and left:
            left -= 1
            raise MemoryError("full")
        reserve(slots)

    backend.reserve = scarce
    tree, parents = Tree([7] * 100), Parents({n: n - 1 for n in range(100)})
    slots = Slots(tree, backend)
    pending = slots.prepare(np.array([99]))
    backend.forward(slots, pending[:50], parents)
    for _ in range(failures):
        with pytest.raises(MemoryError):
            slots.tree_batch(pending[50:], np.array([0]))
        assert slots.used == 50
    backend.forward(slots, pending[50:], parents)
    assert slots.used == 100


def test_a_sequence_at_the_end_goes_on_there_although_slots_before_it_are_free():
    free = FreeList()
    before, own = free.take(64, NOWHERE), free.take(640, NOWHERE)
    free.give_back(np.array(before))
    assert free.take(1, after=own[-1])[0] == own[-1] + 1
