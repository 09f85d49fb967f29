"""Sizes of drafts, and how they adapt to acceptance and to costs. Costs are invented."""

import numpy as np
import pytest

from specbeam.drafting import DECLINED, Guesses
from specbeam.drafting.pace import Pace
from specbeam.drafting.sizes import Sizes
from specbeam.tree import Tree

AUTO = (None, None, None)


def flat(nodes):
    return 1.0


def steep(nodes):
    return float(nodes)


def next_shape(pace):
    pace.begin_round()
    return pace.shape()


def rest(pace):
    pace.learn(DECLINED, Tree([1]), [])


def rounds(pace, accepted, n=60):
    """Rounds with six levels of guesses: this many levels are accepted, and one more token is chosen."""
    for _ in range(n):
        pace.begin_round()
        tree = Tree([1])
        nodes, parent = [], 0
        for _ in range(6):
            (parent,) = tree.guess(parent, 0).tolist()
            nodes.append(parent)
        last = tree.add([0, *nodes][accepted], 9)
        chances = 0.8 ** np.arange(1, 7)
        steps = [*np.array(nodes)[:accepted, None], last]
        pace.learn(Guesses(np.array(nodes), chances), tree, steps)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_what_is_accepted_is_drafted_further(num_beams):
    depths = []
    for accepted in (0, 3, 6):
        pace = Pace(Sizes(*AUTO, num_beams=num_beams, target=lambda n: 10 + 0.1 * n, draft=lambda n: 1.0, chains=False))
        rounds(pace, accepted)
        depths.append(next_shape(pace)[1])
    assert depths == sorted(depths)
    assert depths[0] <= 1 < depths[1] < depths[2]


def test_passes_whose_cost_grows_with_their_size_are_kept_small():
    sizes = []
    for target in (flat, steep):
        pace = Pace(Sizes(*AUTO, num_beams=4, target=target, draft=lambda n: 0.1, chains=False))
        rounds(pace, 3)
        width, depth = next_shape(pace)
        sizes.append(width * depth)
    assert sizes[0] > sizes[1] == 0  # a step more never pays for four guesses


def test_a_tree_below_one_text_takes_the_guesses_that_pay():
    chances = np.array([0.9, 0.8, 0.5, 0.1, 0.01])
    pace = Pace(Sizes(*AUTO, num_beams=1, target=lambda n: 1 + 0.2 * n, draft=lambda n: 0.1, chains=False))
    # One token for 1.3; 1.9 for 1.5; 2.7 for 1.7; 3.2 for 1.9; 3.3 for 2.1: the fourth brings less than it costs.
    assert pace.worthwhile(chances, 0.1) == 3
    rounds(pace, 0)
    assert pace.worthwhile(chances, 0.1) == 0


def test_a_draft_goes_deeper_while_that_pays():
    pace = Pace(Sizes(*AUTO, num_beams=1, target=lambda n: 10 + 0.1 * n, draft=lambda n: 2.0 * n, chains=False))
    assert pace.expanded(np.array([1.0]), 0, np.empty(0), 0.0) == 1
    # Two seconds bring what the guess is worth, as many tokens per second as without it, or fewer.
    assert pace.expanded(np.array([0.9]), 1, np.array([0.9]), 2.0) == 1
    assert pace.expanded(np.array([0.2]), 1, np.array([0.9, 0.2]), 2.0) == 0
    # The second of a level costs as much as the first here, and brings less.
    assert pace.expanded(np.array([0.9, 0.8, 0.1]), 1, np.array([0.9, 0.8, 0.1]), 2.0) == 2
    fixed = Pace(
        Sizes(3, None, None, num_beams=1, target=lambda n: 10 + 0.1 * n, draft=lambda n: 2.0 * n, chains=False)
    )
    assert fixed.expanded(np.array([0.01]), 2, np.array([0.01]), 2.0) == 1
    assert fixed.expanded(np.array([0.9]), 3, np.array([0.9]), 2.0) == 0


def test_guesses_are_as_wide_as_the_steps_needed():
    """Beams that are always among the first four of eight: eight are too many."""
    pace = Pace(Sizes(2, None, None, num_beams=4, target=lambda n: 1 + 0.1 * n, draft=lambda n: 0.1, chains=False))
    assert pace.sizes.widths == [4, 6, 8, 12]
    for _ in range(40):
        width, _ = next_shape(pace)
        tree = Tree([1])
        levels = [tree.guess(np.zeros(width, np.int64), np.arange(width))]
        levels.append(tree.guess(levels[0], np.arange(width)))
        pace.learn(Guesses(np.concatenate(levels), width=width), tree, [level[:4] for level in (*levels, levels[1])])
    assert next_shape(pace)[0] == 4
    assert pace.evidence.survival(4) == pytest.approx(pace.evidence.survival(12))


def test_nothing_is_given_up_for_good():
    """Drafting that fails is retried ever more rarely, and drafting that succeeds goes on at once."""
    pace = Pace(Sizes(*AUTO, num_beams=1, target=lambda n: 1 + 0.5 * n, draft=None, chains=True))
    rounds(pace, 0)

    def wait():
        waited = 0
        while not next_shape(pace)[1]:
            rest(pace)
            waited += 1
        return waited

    waits = []
    for _ in range(5):
        waits.append(wait())
        rounds(pace, 0, n=1)
    assert waits == [8, 16, 32, 64, 128]
    wait()
    rounds(pace, 6, n=1)
    assert wait() == 0


def test_the_dearer_a_try_and_the_less_it_could_gain_the_longer_it_waits():
    def wait(failures, target, draft, unread=0):
        pace = Pace(Sizes(*AUTO, num_beams=4, target=target, draft=draft, chains=False), unread=unread)
        rounds(pace, 0, n=failures)
        for waited in range(1000):
            if next_shape(pace)[1]:
                return waited
            rest(pace)
        return 1000

    def cheap(nodes):
        return 10 + 0.1 * nodes

    assert wait(60, cheap, lambda n: 1.0) == 8 < wait(60, cheap, lambda n: 7.5) < 1000
    # With these costs it is clear from the start that only unusually good guesses would pay.
    waits = [wait(0, lambda n: 1 + 0.4 * n, lambda n: 0.15 + 0.01 * n, unread) for unread in (0, 100, 10_000)]
    assert 8 < waits[0] < waits[1] < waits[2] < 1000


@pytest.mark.parametrize("chains", [True, False])
def test_seconds_per_step_follow_the_latest_rounds_and_are_forgotten(chains):
    pace = Pace(Sizes(*AUTO, num_beams=1, target=lambda n: 9 + n, draft=None, chains=chains))
    at_first = pace.seconds_per_step(10)
    assert at_first < 10
    rounds(pace, accepted=0)
    assert pace.seconds_per_step(10) > 10
    rounds(pace, accepted=6)
    assert pace.seconds_per_step(10) < 4
    for _ in range(500):
        pace.forget()
    assert pace.seconds_per_step(10) == pytest.approx(at_first, rel=0.01)


def test_steps_to_come_share_the_reading_of_the_prompt():
    sizes = Sizes(*AUTO, num_beams=1, target=lambda n: 10.0, draft=lambda n: n / 10, chains=False)
    pace, without = Pace(sizes, unread=600), Pace(sizes)
    assert pace.seconds_per_step(30) - without.seconds_per_step(30) == pytest.approx(60 / 30)
    rounds(pace, accepted=6, n=1)
    assert pace.seconds_per_step(1) == pytest.approx(pace.seconds_per_step(1000))


def test_beams_are_drafted_below_only_if_the_reading_of_the_prompt_pays_in_the_steps_to_come():
    sizes = Sizes(*AUTO, num_beams=4, target=lambda n: 40.0 + n, draft=lambda n: 1.0 * n, chains=False)
    for unread, steps, drafts in ((0, 64, True), (200, 64, True), (2000, 64, False), (200, 5, False)):
        assert (Pace(sizes, unread).shape(steps)[1] > 0) == drafts
    read = Pace(sizes, unread=2000)
    rounds(read, accepted=6, n=1)
    assert read.shape(64)[1]


def test_what_could_not_pay_is_not_tried_again():
    pace = Pace(Sizes(*AUTO, num_beams=4, target=lambda n: 1 + 0.5 * n, draft=lambda n: 1.0, chains=False))
    for _ in range(200):
        assert next_shape(pace)[1] == 0
        rest(pace)


def test_a_draft_that_has_nothing_likely_is_asked_again():
    pace = Pace(Sizes(*AUTO, num_beams=1, target=lambda n: 10 + 1.0 * n, draft=lambda n: 1.0, chains=False))
    for _ in range(20):
        pace.begin_round()
        assert pace.expanded(np.array([1.0]), 0, np.empty(0), 0.0) == 1
        assert pace.worthwhile(np.array([0.01]), 1.0) == 0
        pace.learn(Guesses(), Tree([1]), [])


def test_lookups_that_find_nothing_say_nothing():
    pace = Pace(Sizes(*AUTO, num_beams=1, target=lambda n: 10 + 0.1 * n, draft=None, chains=True))
    before = next_shape(pace)
    for _ in range(100):
        pace.learn(Guesses(), Tree([1]), [])
    assert next_shape(pace) == before


@pytest.mark.parametrize("sizes", [(3, 5, None), (3, None, None), (None, 5, 7), (None, None, 7), (3, 5, 7)])
@pytest.mark.parametrize("num_beams", [1, 4])
def test_what_is_fixed_stays(sizes, num_beams):
    tokens, width, budget = sizes
    pace = Pace(Sizes(*sizes, num_beams=num_beams, target=flat, draft=flat, chains=False))
    rounds(pace, 6)
    got_width, got_depth = next_shape(pace)
    assert tokens is None or got_depth == tokens or budget
    assert width is None or got_width == width or budget
    assert budget is None or got_width * got_depth <= budget


@pytest.mark.parametrize("chains", [True, False])
@pytest.mark.parametrize("num_beams", [1, 4, 64])
@pytest.mark.parametrize("room", [0, 3, 64, 100, 300])
def test_sizes_that_adapt_fit_into_memory(room, num_beams, chains):
    sizes = Sizes(*AUTO, num_beams=num_beams, target=flat, draft=lambda n: 0.01, chains=chains, room=room)
    assert sizes.most_guesses <= room
    width, depth = sizes.best(lambda width: 1.0)
    assert width * depth * (num_beams if chains else 1) <= room
    assert bool(depth) == (room >= num_beams)  # a step needs a whole level
    assert sizes.worthwhile(np.ones(48), 1.0, 1.0) <= room
    pace = Pace(sizes)
    if not depth:
        for _ in range(50):  # and it is not tried in vain
            assert next_shape(pace)[1] == 0
            rest(pace)
