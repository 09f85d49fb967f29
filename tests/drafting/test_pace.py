"""Sizes of drafts: what they adapt to, with costs made up."""

import numpy as np
import pytest

from specbeam.drafting import Guesses
from specbeam.drafting.pace import Pace
from specbeam.tree import Tree

AUTO = (None, None, None)


def flat(nodes):
    return 1.0


def steep(nodes):
    return float(nodes)


def rounds(pace, accepted, n=60):
    """Tell a pace that of guesses six deep so many were accepted, again and again."""
    for _ in range(n):
        pace.shape()
        tree = Tree([1])
        nodes, parent = [], 0
        for _ in range(6):
            (parent,) = tree.guess(parent, 0).tolist()
            nodes.append(parent)
        reached = tree.add([0, *nodes][accepted], 9)
        chances = 0.8 ** np.arange(1, 7)
        pace.learn(Guesses(np.array(nodes), chances), tree, int(reached[0]))


@pytest.mark.parametrize("num_beams", [1, 4])
def test_what_is_accepted_is_drafted_further(num_beams):
    depths = []
    for accepted in (0, 3, 6):
        pace = Pace(*AUTO, num_beams=num_beams, target=lambda n: 10 + 0.1 * n, draft=lambda n: 1.0, chains=False)
        rounds(pace, accepted)
        depths.append(pace.shape()[1])
    assert depths == sorted(depths)
    assert depths[0] <= 1 < depths[1] < depths[2]


def test_passes_whose_cost_grows_with_their_size_are_kept_small():
    sizes = []
    for target in (flat, steep):
        pace = Pace(*AUTO, num_beams=4, target=target, draft=lambda n: 0.1, chains=False)
        rounds(pace, 3)
        width, depth = pace.shape()
        sizes.append(width * depth)
    assert sizes[0] > sizes[1] == 0  # a step more never pays for four guesses


def test_a_tree_below_one_text_takes_the_guesses_that_pay():
    chances = np.array([0.9, 0.8, 0.5, 0.1, 0.01])
    pace = Pace(*AUTO, num_beams=1, target=lambda n: 1 + 0.2 * n, draft=lambda n: 0.1, chains=False)
    # One token for 1.3; 1.9 for 1.5; 2.7 for 1.7; 3.2 for 1.9; 3.3 for 2.1: the fourth brings less than it costs.
    assert pace.worthwhile(chances, 1) == 3
    rounds(pace, 0)
    assert pace.worthwhile(chances, 1) == 0


def test_nothing_is_given_up_for_good():
    pace = Pace(*AUTO, num_beams=1, target=lambda n: 10 + 0.1 * n, draft=None, chains=True)
    rounds(pace, 0)
    pace.target = lambda n: 1 + 0.5 * n
    assert pace.shape()[1] == 0
    for _ in range(60):
        pace.learn(Guesses(), Tree([1]), 0)
    assert pace.survival(1) > 0.5


@pytest.mark.parametrize("sizes", [(3, 5, None), (3, None, None), (None, 5, 7), (None, None, 7), (3, 5, 7)])
@pytest.mark.parametrize("num_beams", [1, 4])
def test_what_is_fixed_stays(sizes, num_beams):
    tokens, width, budget = sizes
    pace = Pace(*sizes, num_beams=num_beams, target=flat, draft=flat, chains=False)
    rounds(pace, 6)
    got_width, got_depth = pace.shape()
    assert tokens is None or got_depth == tokens or budget
    assert width is None or got_width == width or budget
    assert budget is None or got_width * got_depth <= budget
