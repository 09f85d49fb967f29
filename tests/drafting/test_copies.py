"""Beams that come back copy what the best hypothesis says after the same tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbeam import Options
from specbeam.core.tree import Tree
from specbeam.drafting.copies import Copies
from specbeam.drafting.drafter import Chains
from specbeam.drafting.policy.controller import MAX_ADAPTIVE_DEPTH
from specbeam.logits.processors import Processors
from specbeam.logits.stopping import Stopping

PROMPT, EOS, VOCAB = [0, 1], 9, 10
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def grown(tree, tokens):
    """The end of a new sequence below the prompt."""
    node = len(PROMPT) - 1
    for token in tokens:
        (node,) = tree.add(np.array([node]), np.array([token])).tolist()
    return node


def copies_below(tree, cost=lambda nodes: 1.0):
    stop = Stopping(frozenset({EOS}), 60, (), None)
    return Copies(tree, Chains(tree, Processors(Options(), frozenset({EOS}), VOCAB), stop, max_draft_tokens=64), cost)


def copied(best, own, cost=lambda nodes: 1.0):
    """The tokens copied below a beam."""
    tree = Tree(PROMPT)
    end, tip = grown(tree, best), grown(tree, own)
    return tree.tokens(copies_below(tree, cost).propose(np.array([tip]), end).nodes).tolist()


@given(TEXTS, TEXTS)
def test_what_is_copied_follows_the_longest_match_nearest_to_the_same_place(best, own):
    text, tokens = PROMPT + best, PROMPT + own
    found = copied(best, own)
    if len(own) >= len(best):
        assert not found
        return
    for matched in range(min(8, len(tokens)), 0, -1):
        ends = [i + matched for i in range(len(text) - matched) if text[i : i + matched] == tokens[-matched:]]
        if ends:
            nearest = min(ends, key=lambda end: (abs(end - len(tokens)), end))
            assert found == text[nearest : nearest + MAX_ADAPTIVE_DEPTH]
            return
    assert not found


def test_nothing_is_copied_beyond_a_token_that_ends_or_where_nodes_cost_too_much():
    best = [2, 3, 4, 5, 6, EOS, 7]
    assert copied(best, [2]) == [3, 4, 5, 6]
    assert copied(best, [2], cost=lambda nodes: float(nodes) ** 2) == []


@pytest.mark.parametrize("right", [True, False])
def test_the_cost_of_later_steps_follows_what_copies_save(right):
    tree = Tree(PROMPT)
    best, tip = grown(tree, [2, 3, 4, 5, 6, 7, 8, 2, 3, 4, 5, 6]), grown(tree, [3])
    copies = copies_below(tree)
    assert copies.rounds.seconds_per_step(1.0) == 1.0
    for _ in range(8):
        nodes = copies.propose(np.array([tip]), best).nodes
        copies.learn(nodes if right else nodes[:0], steps=1 + len(nodes) if right else 1)
    later = copies.rounds.seconds_per_step(1.0)
    assert later < 0.4 if right else later == pytest.approx(1.0)
