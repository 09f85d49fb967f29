"""How far lookups guess, as matches of each length turn out right or wrong. Costs are invented."""

import numpy as np
import pytest

from specbeam.drafting import DECLINED, Guesses
from specbeam.drafting.lookup_pace import LookupPace
from specbeam.drafting.sizes import Sizes
from specbeam.engine.costs import PassTimes
from specbeam.tree import Tree

NONE = {"num_draft_tokens": None, "draft_width": None, "draft_budget": None}


def pace_of(num_beams=1, target=lambda n: 10.0 + n, plain=None, **sizes):
    costs = {"target": target, "draft": None, "chains": True}
    return LookupPace(Sizes(**NONE | sizes, num_beams=num_beams, **costs), plain or target)


def check(pace, matched, right, rounds=40):
    """Rounds with a chain of four guesses after a match of this length. The first ``right`` guesses are right."""
    for _ in range(rounds):
        pace.shape(matched)
        tree, chain = Tree([1]), [0]
        for token in range(4):
            chain += tree.guess(chain[-1], token).tolist()
        tips = [*chain[1 : right + 1], int(tree.add(chain[right], 9)[0])]
        pace.learn(Guesses(np.array(chain[1:])), tree, [np.array([tip]) for tip in tips])


def test_the_longer_the_match_the_deeper_the_chain():
    pace = pace_of()
    depths = [pace.shape(matched)[1] for matched in (0, 1, 2, 3, 4, 8)]
    assert depths == sorted(depths)
    assert depths[0] == 0 < depths[-1]


def test_chances_are_the_shares_of_guesses_that_were_right():
    pace = pace_of()
    check(pace, matched=1, right=2, rounds=200)  # the tokens after matches of 1 and 2 are right, after 3 never
    pace.shape(1)
    assert pace.chances(3).tolist() == pytest.approx([1.0, 1.0, 0.0], abs=0.01)
    assert pace.shape(1)[1] == 2
    assert pace.shape(3)[1] == 0  # the same match as after two right guesses
    assert pace.shape(8)[1] > 0  # no such match was checked


def test_what_was_wrong_is_tried_again_after_many_steps():
    pace = pace_of()
    before = pace.shape(8)
    check(pace, matched=8, right=0)
    assert pace.shape(8)[1] == 0
    for _ in range(400):
        pace.learn(DECLINED, Tree([1]), [])
    assert pace.shape(8) == before


def test_the_backend_goes_ahead_until_lookups_are_worth_their_time():
    pace = pace_of(plain=lambda n: 8.0 + n)  # going ahead is faster
    assert pace.shape(0)[1] == 0
    assert pace.no_guesses().declined
    check(pace, matched=8, right=4, rounds=1)  # five tokens for 15 seconds, and not for 45
    assert not pace.no_guesses().declined  # the next token may have a match, too
    tree = Tree([1])
    tip = np.array([tree.append(0, 5, -1.0)])
    waited = 0
    while not pace.no_guesses().declined:
        pace.learn(Guesses(), tree, [tip])
        waited += 1
    assert waited < 20


def test_a_step_of_beams_needs_all_its_tokens():
    one, four = pace_of(), pace_of(num_beams=4)
    one.shape(4)
    four.shape(4)
    assert four.chances(3) == pytest.approx(one.chances(3) ** 4)


def test_seconds_per_step_follow_the_latest_rounds_and_are_forgotten():
    pace = pace_of()
    at_first = pace.seconds_per_step(10)
    assert at_first < 11
    check(pace, matched=2, right=0)
    assert pace.seconds_per_step(10) > 11
    check(pace, matched=2, right=4)
    assert pace.seconds_per_step(10) < 4
    for _ in range(500):
        pace.forget()
    assert pace.seconds_per_step(10) == pytest.approx(at_first, rel=0.01)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_what_is_fixed_stays(num_beams):
    fixed = pace_of(num_beams, num_draft_tokens=5, draft_width=2)
    assert fixed.shape(0) == fixed.shape(9) == (2, 5)
    assert pace_of(num_beams, num_draft_tokens=5, draft_budget=2 * num_beams).shape(9) == (1, 2)
    width, depth = pace_of(num_beams, target=lambda n: 1.0, draft_budget=3 * num_beams).shape(9)
    assert (width, depth) == (1, 3)


def test_passes_that_go_ahead_have_times_of_their_own():
    single = PassTimes()
    ahead = PassTimes(otherwise=single)
    for _ in range(2):
        single.add(1, 3.0)
    assert ahead.expected(1) == 3.0
    for _ in range(200):
        single.add(1, 4.0)
    assert ahead.expected(1) == pytest.approx(4.0, rel=0.01)  # it follows
    for _ in range(2):
        ahead.add(1, 2.0)
    assert ahead.expected(1) == 2.0 < single.expected(1)
    assert ahead.expected(16) == single.expected(16)  # wide passes take too long to go ahead
