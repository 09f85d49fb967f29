"""The tree against a brute-force one that remembers every path whole."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbeam.tree import Tree


class Paths:
    """Every node's path from the root, and which nodes are live, by definition."""

    def __init__(self, prompt):
        self.paths = {n: tuple(range(n + 1)) for n in range(len(prompt))}
        self.live = set(self.paths)

    def add(self, node, parent):
        self.paths[node] = (*self.paths[parent], node)
        self.live.add(node)

    def keep(self, nodes):
        self.live = {n for kept in nodes for n in self.paths[kept]}

    def trunk(self, ends):
        """The longest path all of the ends' paths begin with."""
        trunk = []
        for level in zip(*(self.paths[e] for e in ends), strict=False):
            if len(set(level)) > 1:
                break
            trunk.append(level[0])
        return trunk


@given(st.data())
def test_tree_agrees_with_paths_written_out(data):
    prompt = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    tree, paths = Tree(prompt), Paths(prompt)
    for _ in range(data.draw(st.integers(1, 12))):
        trunk_tip = tree.tip
        growable = [n for n in paths.live if trunk_tip in paths.paths[n]]
        parents = data.draw(st.lists(st.sampled_from(growable), min_size=1, max_size=6))
        nodes = tree.add(parents, np.arange(len(parents)), log_probs=-1.0)
        for node, parent in zip(nodes.tolist(), parents, strict=True):
            paths.add(node, parent)
            assert tree.path(node).tolist() == list(paths.paths[node])
            assert tree.depths(node) == len(paths.paths[node]) - 1
            assert tree.scores(node) == pytest.approx(-(len(paths.paths[node]) - len(prompt)))
        before = set(paths.live)
        kept = data.draw(
            st.lists(st.sampled_from(sorted(n for n in paths.live if trunk_tip in paths.paths[n])), min_size=1)
        )
        tree.keep(kept)
        paths.keep(kept)
        assert tree.live == len(paths.live)
        assert tree.trunk.tolist() == paths.trunk(kept)
        dropped = [n for part in tree.dropped for n in part.tolist()]
        tree.dropped.clear()
        assert sorted(dropped) == sorted(before - paths.live)


def test_a_dropped_node_cannot_be_kept():
    tree = Tree([1, 2])
    left, right = tree.add([1, 1], [3, 4]).tolist()
    tree.keep(left)
    with pytest.raises(ValueError, match="not all live"):
        tree.keep(right)
