"""Slots on a fake cache, against brute force: the slots that a node sees, and the slots that are free."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specbeam.engine.slots import Slots
from specbeam.tree import Tree
from tests.conftest import examples, lines_run

MOST_SLOTS = 200


@dataclass
class FakeCache:
    """Holds a node's number in each slot. A real cache holds the node's keys and values there."""

    most: int
    capacity: int = 0
    nodes: dict = field(default_factory=dict)

    def reserve(self, slots):
        assert slots <= self.most
        self.capacity = max(self.capacity, slots)


class FakeBackend:
    vocab_size = 200

    def new_cache(self, most):
        return FakeCache(most)


class Parents(dict):
    """The parent of each node: a tree without anything to make it fast."""

    def path(self, node):
        """The node and its ancestors."""
        return [node, *self.path(self[node])] if node in self else []


def forward(slots, nodes, parents):
    """Evaluate nodes as a backend does, and check all that a segment promises."""
    cache = slots.cache
    before = dict(cache.nodes)
    segment = slots.segment(nodes, np.arange(len(nodes)))
    assert segment.length <= cache.capacity
    assert segment.tokens.tolist() == [token if token < 200 else 0 for token in slots.tree.tokens(nodes)]
    assert segment.positions.tolist() == [len(parents.path(node)) - 1 for node in nodes.tolist()]

    evaluated = {node: slot for slot, node in before.items()}
    placed = dict(zip(nodes.tolist(), segment.slots.tolist(), strict=True))
    assert len(placed) == len(set(placed.values()))  # no two nodes share a slot
    assert placed == placed | {n: slot for n, slot in evaluated.items() if n in placed}  # again in the same slot
    fresh = {slot for node, slot in placed.items() if node not in evaluated}
    unused = [slot for slot in range(len(before) + len(nodes)) if slot not in before]
    assert fresh == set(unused[: len(fresh)])  # the lowest empty slots

    cache.nodes.update({slot: node for node, slot in placed.items()})
    assert max(cache.nodes) < segment.length
    for row, node in enumerate(nodes.tolist()):
        seen = range(segment.length) if segment.visible is None else np.flatnonzero(segment.visible[row]).tolist()
        # A slot that holds nothing, or a node that is no ancestor, would show here.
        assert sorted(cache.nodes.get(slot, -1) for slot in seen) == sorted(parents.path(node))


@settings(max_examples=examples(10))
@given(st.data())
def test_a_node_sees_its_ancestors_whatever_was_dropped_before(data):
    prompt = data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=6))
    tree, parents = Tree(prompt), Parents({n: n - 1 for n in range(len(prompt))})
    slots = Slots(tree, FakeBackend(), MOST_SLOTS)
    cache, growing, peak = slots.cache, [tree.tip], 0
    for _ in range(data.draw(st.integers(1, 5))):
        below = growing
        for _ in range(data.draw(st.integers(0, 3))):  # generations added before the next pass
            above = data.draw(st.lists(st.sampled_from(below), min_size=1, max_size=5))
            tokens = data.draw(st.lists(st.integers(0, 255), min_size=len(above), max_size=len(above)))
            add = data.draw(st.sampled_from([tree.add, tree.guess]))
            added = add(above, tokens).tolist()
            parents.update(zip(added, above, strict=True))
            below = [*below, *added]
        wanted = data.draw(st.sets(st.sampled_from(below), min_size=1))
        needed = {ancestor for node in wanted for ancestor in parents.path(node)}
        pending = slots.missing(sorted(wanted))
        assert pending.tolist() == sorted(wanted | (needed - set(cache.nodes.values())))
        for part in np.array_split(pending, data.draw(st.integers(1, 3))):  # a long prompt is read in chunks
            if len(part):
                forward(slots, part, parents)
        peak = max(peak, len(cache.nodes))
        assert (slots.used, slots.peak) == (len(cache.nodes), peak)

        growing = sorted(data.draw(st.sets(st.sampled_from(below), min_size=1)))
        tree.keep(growing, sorted(data.draw(st.sets(st.sampled_from(below)))))
        slots.release(tree.take_dropped())
        needed = {ancestor for node in growing for ancestor in parents.path(node)}
        cache.nodes = {slot: node for slot, node in cache.nodes.items() if node in needed}
        assert slots.used == len(cache.nodes)


def test_to_see_a_long_branch_costs_no_more_than_to_see_a_short_one():
    tree, parents = Tree([1]), Parents({0: -1})
    slots = Slots(tree, FakeBackend(), 1000)
    tips, work = tree.tip, []
    forward(slots, np.array([0]), parents)
    for _ in range(200):
        above = np.atleast_1d(tips) if len(work) else np.array([0, 0])
        tips = tree.add(above, [3, 4])
        parents.update(zip(tips.tolist(), above.tolist(), strict=True))
        tree.keep(tips)
        pending = slots.missing(tips)
        work.append(lines_run(lambda pending=pending: slots.segment(pending, np.arange(2))))
        slots.cache.nodes.update(
            zip(slots.segment(pending, np.arange(2)).slots.tolist(), pending.tolist(), strict=True)
        )
    assert slots.used == 401
    assert work[-1] <= work[10]
