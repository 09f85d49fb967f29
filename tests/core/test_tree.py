"""The tree against a brute-force one that remembers every path whole."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbeam.core.tree import Tree
from tests.calls import calls_made


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

    def below(self, node):
        """The live nodes that a node is an ancestor of, and itself."""
        return sorted(n for n in self.live if node in self.paths[n])

    def prefix(self, ends):
        """The longest path all of the ends' paths begin with."""
        prefix = []
        for level in zip(*(self.paths[e] for e in ends), strict=False):
            if len(set(level)) > 1:
                break
            prefix.append(level[0])
        return prefix


@given(st.data())
def test_tree_agrees_with_paths_written_out(data):
    prompt = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    tree, paths = Tree(prompt), Paths(prompt)
    for _ in range(data.draw(st.integers(1, 12))):
        parents = data.draw(st.lists(st.sampled_from(paths.below(tree.tip)), min_size=1, max_size=6))
        nodes = tree.add(parents, np.arange(len(parents)), log_probs=-1.0)
        for node, parent in zip(nodes.tolist(), parents, strict=True):
            paths.add(node, parent)
            assert tree.path(node).tolist() == list(paths.paths[node])
            assert tree.depths(node) == len(paths.paths[node]) - 1
            assert tree.scores(node) == pytest.approx(-(len(paths.paths[node]) - len(prompt)))
        some = st.lists(st.sampled_from(paths.below(tree.tip)), min_size=1, max_size=8)
        nodes, ancestors, kept = data.draw(some), data.draw(some), data.draw(some)
        for node, path in zip(nodes, tree.paths(nodes).tolist(), strict=True):
            own = list(paths.paths[node])
            assert path == own + own[-1:] * (len(path) - len(own))
        assert tree.below(nodes, ancestors).tolist() == [bool(set(paths.paths[n]) & set(ancestors)) for n in nodes]
        before = set(paths.live)
        tree.keep(kept)
        paths.keep(kept)
        assert tree.live == len(paths.live)
        assert tree.prefix.tolist() == paths.prefix(kept)
        assert sorted(tree.take_dropped().tolist()) == sorted(before - paths.live)
        assert not len(tree.take_dropped())


def test_a_dropped_node_cannot_be_kept():
    tree = Tree([1, 2])
    left, right = tree.add([1, 1], [3, 4]).tolist()
    tree.keep(left)
    with pytest.raises(ValueError, match="not all live"):
        tree.keep(right)


@given(st.data())
def test_finished_nodes_stay_but_their_memory_goes(data):
    """Growing and finished nodes live with all their ancestors. Nodes not needed to grow are dropped once."""
    prompt = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    tree, paths = Tree(prompt), Paths(prompt)
    finished, dropped = [], []
    for _ in range(data.draw(st.integers(1, 12))):
        growing = data.draw(st.lists(st.sampled_from(sorted(paths.live - set(finished))), min_size=1, max_size=5))
        growing = [n for n in growing if tree.tip in paths.paths[n]] or [tree.tip]
        growing = [n for n in growing if not set(paths.paths[n]) & set(dropped)] or [tree.tip]
        if tree.tip in dropped:
            break
        nodes = tree.add(growing, np.arange(len(growing))).tolist()
        for node, parent in zip(nodes, growing, strict=True):
            paths.add(node, parent)
        before = set(paths.live)
        growing = data.draw(st.lists(st.sampled_from(nodes), min_size=1))
        ending = sorted((set(nodes) - set(growing)) | set(finished))
        finished = data.draw(st.lists(st.sampled_from(ending), unique=True)) if ending else []
        tree.keep(growing, finished)
        paths.keep([*growing, *finished])
        assert tree.live == len(paths.live)
        assert tree.prefix.tolist() == paths.prefix([*growing, *finished])
        gone = tree.take_dropped().tolist()
        needed = {n for g in growing for n in paths.paths[g]}
        assert sorted(gone) == sorted(before - needed - set(dropped))
        dropped += gone
        for node in [*growing, *finished]:
            assert tree.path(node).tolist() == list(paths.paths[node])


def test_a_draft_token_is_found_again():
    tree = Tree([1, 2])
    first, second = tree.draft([1, 1], [5, 6]).tolist()
    assert tree.draft([1, 1, first], [6, 5, 7]).tolist() == [second, first, 4]
    assert tree.add([1, 1, 1], [6, 9, 5], [-1.0, -2.0, -3.0]).tolist() == [second, 5, first]
    assert tree.scores([second, 5, first]).tolist() == [-1.0, -2.0, -3.0]
    tree.keep([first, 4])
    assert tree.tip == first
    assert tree.drafted(np.array([1, first]), np.array([6, 7])).tolist() == [-1, 4]


def test_a_finished_draft_token_is_not_found_again():
    """Its slot was taken back. A node that is added at the same index needs a new one, and gives it back again."""
    tree = Tree([7])
    draft_token = tree.draft([0], [3])
    assert tree.add([0], [3]).tolist() == draft_token.tolist()
    tree.keep([0], draft_token)
    assert tree.take_dropped().tolist() == draft_token.tolist()
    again = tree.add([0], [3])
    assert again.tolist() != draft_token.tolist()
    tree.keep([0])
    assert tree.take_dropped().tolist() == again.tolist()


def beams_step():
    """Add, keep and walk the paths of two beams, which share only the prompt, and of their draft tokens."""
    tree = Tree([1, 2, 3])
    tips = tree.add([2, 2], [4, 5])

    def step():
        nonlocal tips
        draft_tokens = tree.draft(tips, [7, 7])
        tree.paths(draft_tokens)
        tips = tree.add(np.repeat(tips, 2), [6, 7, 6, 7])[1::2]
        tree.keep(tips)
        for tip, path in zip(tips.tolist(), tree.paths(tips).tolist(), strict=True):
            assert path[-1] == tip
            assert path[3] == 3 + tips.tolist().index(tip)
            assert tree.parents(path).tolist() == [-1, *path[:-1]]

    return tree, step, 3


def draft_step():
    """Drop one of two draft tokens."""
    tree = Tree([1])

    def step():
        (accepted, _) = tree.draft([tree.tip, tree.tip], [2, 3]).tolist()
        tree.add(tree.tip, 2)
        tree.keep(accepted)

    return tree, step, 301


def token_step():
    tree = Tree([1])

    def step():
        tree.keep(tree.add(tree.tip, 2))
        assert tree.take_dropped().tolist() == []

    return tree, step, 301


@pytest.mark.parametrize("make", [beams_step, draft_step, token_step])
def test_a_step_costs_the_same_late_in_the_sequence_as_early_in_it(make):
    tree, step, prefix = make()
    work = [calls_made(step) for _ in range(300)]
    assert len(tree.prefix) == prefix
    assert work[-1] <= work[10]
