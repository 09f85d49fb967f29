"""How far drafts go, as draft tokens are accepted or not, and what that costs. Costs are given."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbeam.core.tree import Tree
from specbeam.drafting.policy import SKIPPED, DraftTokens
from specbeam.drafting.policy.acceptance import PRIOR_WEIGHT, Acceptance
from specbeam.drafting.policy.controller import Controller, Sizes, fewest_seconds

AUTO = (None, None, None)
KINDS = ["lookup", "chains", "tree", "levels"]
NUM_TIPS = {"lookup": 1, "chains": 1, "tree": 1, "levels": 4}


def flat(nodes):
    return 1.0


def memory_bound(nodes):
    return 1 + 0.02 * nodes if nodes <= 16 else max(1.32, 0.06 * nodes)


def small(nodes):
    return 0.6 + 0.4 * nodes


def quarter(nodes):
    return 0.25 * memory_bound(nodes)


def controller_of(kind, target=memory_bound, draft=quarter, plain=None, num_tips=None, sizes=AUTO, unread=0, room=512):
    chains, num_tips = kind in ("lookup", "chains"), num_tips or NUM_TIPS[kind]
    one = Sizes(*sizes, num_tips=num_tips, chains=chains, one_width=kind == "lookup", max_rows=room)
    draft = None if kind == "lookup" else draft
    return Controller([one], target, plain or target, draft, unread, matches=kind == "lookup")


def play(controller, kind, is_right, steps, target=memory_bound, draft=quarter, matched=8):
    """The cost of steps for which the draft token is right or not, in plain steps, and the length of each draft."""
    num_tips, at, cost, lengths = NUM_TIPS[kind], 0, 0.0, []
    while at < steps:
        width, depth = controller.shape(num_tips, matched=matched if kind == "lookup" else None)  # reading is free
        probabilities, spent = np.empty(0), 0.0
        if kind == "tree" and depth:  # a draft that gives each token the same probability
            for depth in range(13):
                if not controller.expanded(np.array([0.8**depth]), depth, probabilities, spent):
                    break
                spent += draft(1)
                probabilities = np.append(probabilities, 0.8 ** (depth + 1))
            depth = controller.worthwhile(probabilities, spent)
        elif depth and kind != "lookup":
            spent = draft(num_tips) + (depth - 1) * draft(width)
        lengths.append(depth)
        if not depth and not spent:
            controller.learn(SKIPPED, Tree([1]), [])
            cost, at = cost + target(num_tips), at + 1
            continue
        tree, levels = Tree([1]), [np.array([0])]
        for _ in range(depth):
            levels.append(tree.draft(np.repeat(levels[-1][:1], width), np.arange(width)))
        accepted = next((i for i in range(depth) if not is_right(at + i)), depth)
        tips = [level[:num_tips] for level in levels[1 : accepted + 1]] + [tree.add(levels[accepted][0], 99)]
        nodes = np.concatenate([np.empty(0, np.int64), *levels[1:]])
        controller.learn(DraftTokens(nodes, probabilities[:depth], width=width, seconds=spent), tree, tips)
        cost, at = cost + spent + target(num_tips + len(nodes)), at + accepted + 1
    return cost / (at * target(num_tips)), lengths


@pytest.mark.parametrize("target", [memory_bound, small])
@pytest.mark.parametrize(("kind", "most"), [("lookup", 1.02), ("chains", 1.03), ("tree", 1.03), ("levels", 1.03)])
def test_a_draft_that_is_never_right_costs_little(kind, most, target):
    cost, lengths = play(controller_of(kind, target), kind, lambda at: False, 500, target)
    assert cost < most
    assert len(lengths) == 500


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_that_is_right_is_used_in_full_and_a_sequence_that_changes_its_nature_is_followed(kind):
    right, lengths = play(controller_of(kind), kind, lambda at: True, 400)
    assert right < {"lookup": 0.15, "chains": 0.5, "tree": 0.5, "levels": 0.65}[kind]
    assert np.mean(lengths[10:]) >= 4
    controller = controller_of(kind)
    play(controller, kind, lambda at: False, 300)
    cost, lengths = play(controller, kind, lambda at: True, 400)
    assert cost < 0.3 + 0.7 * right
    assert lengths.index(next(filter(None, lengths))) < 200
    cost, _ = play(controller, kind, lambda at: False, 300)
    assert cost < 1.15


@given(st.sampled_from(KINDS), st.floats(0, 1), st.integers(0, 99), st.sampled_from([memory_bound, small, flat]))
def test_no_sequence_costs_much_more_than_without_drafts(kind, rate, seed, target):
    draw = np.random.default_rng(seed).random(1000) < rate
    cost, _ = play(controller_of(kind, target), kind, draw.__getitem__, 300, target)
    assert cost < 1.2


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 5)), max_size=30))
def test_acceptance_rates_are_chances_and_decay_to_the_prior(rounds):
    acceptance = Acceptance([0.2, 0.5, 1.0])
    for bucket, accepted, rejected in rounds:
        before = acceptance.rates
        acceptance.learn(bucket, accepted, accepted + rejected)
        assert ((acceptance.rates >= 0) & (acceptance.rates <= 1)).all()
        others = np.arange(3) != bucket
        assert (acceptance.rates[others] == before[others]).all()
    for _ in range(3000):
        acceptance.skip()
    assert acceptance.rates == pytest.approx([0.2, 0.5, 1.0], abs=1e-3)
    acceptance.learn(0, 1, 1)
    assert acceptance.rates[0] == pytest.approx((0.9 * PRIOR_WEIGHT * 0.2 + 1) / (0.9 * PRIOR_WEIGHT + 1), abs=1e-3)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.lists(st.floats(0.01, 1), min_size=8, max_size=8))
def test_the_depth_with_the_fewest_seconds_per_step_is_found(probabilities, more):
    steps, seconds = (1 + np.cumsum(np.cumprod(probabilities))).tolist(), np.cumsum(more)
    costs = [seconds[depth] / steps[depth - 1] for depth in range(1, len(steps))]
    found, depth = fewest_seconds(range(1, len(steps)), steps, lambda depth: seconds[depth], seconds[0])
    assert found == min([seconds[0], *costs])
    assert found == (costs[depth - 1] if depth else seconds[0])


def test_the_longer_the_match_the_deeper_the_chain():
    controller = controller_of("lookup")
    depths = [controller.shape(1, matched=matched)[1] for matched in (0, 1, 2, 3, 4, 8)]
    assert depths == sorted(depths)
    assert depths[0] == 0 < depths[1] < depths[-1]


def test_each_length_of_a_match_has_a_chance_of_its_own():
    controller = controller_of("lookup")
    tree, chain = Tree([1]), [0]
    for token in range(4):
        chain += tree.draft(chain[-1], token).tolist()
    tips = [np.array([tip]) for tip in [*chain[1:3], int(tree.add(chain[2], 9)[0])]]
    for _ in range(200):  # the tokens after matches of 1 and 2 are right, after 3 never
        controller.shape(1, matched=1)
        controller.learn(DraftTokens(np.array(chain[1:])), tree, tips)
    assert controller.shape(1, matched=1)[1] == 2
    assert controller.shape(1, matched=3)[1] == 0  # the same match as after two right draft tokens
    assert controller.shape(1, matched=8)[1] > 0  # no such match was verified


def test_a_step_of_beams_needs_all_its_tokens():
    assert [controller_of("lookup", num_tips=n).shape(n, matched=2)[1] for n in (1, 4)] == [12, 0]


def test_the_backend_goes_ahead_until_lookups_pay():
    controller = controller_of("lookup", plain=lambda nodes: 0.8)
    assert controller.shape(1, matched=0)[1] == 0
    assert controller.no_draft().skipped
    play(controller, "lookup", lambda at: True, 5)
    assert not controller.no_draft().skipped  # the next token may have a match, too
    tree = Tree([1])
    for _ in range(20):
        controller.learn(DraftTokens(), tree, [np.array([tree.append(0, 5, -1.0)])])
    assert controller.no_draft().skipped


def test_levels_are_as_wide_as_the_steps_needed():
    """Beams that are always among the first four of eight: eight are too many."""
    controller = controller_of("levels", lambda n: 1 + 0.1 * n, lambda n: 0.1, sizes=(2, None, None))
    for _ in range(40):
        width, _ = controller.shape(4)
        tree = Tree([1])
        levels = [tree.draft(np.zeros(width, np.int64), np.arange(width))]
        levels.append(tree.draft(levels[0], np.arange(width)))
        tips = [level[:4] for level in (*levels, levels[1])]
        controller.learn(DraftTokens(np.concatenate(levels), width=width), tree, tips)
    assert controller.shape(4)[0] == 4


def test_a_tree_takes_the_draft_tokens_that_pay():
    probabilities = np.array([0.9, 0.8, 0.5, 0.1, 0.01])
    controller = controller_of("tree", lambda n: 1 + 0.2 * n, lambda n: 0.1)
    # One token for 1.3; 1.9 for 1.5; 2.7 for 1.7; 3.2 for 1.9; 3.3 for 2.1: the fourth brings less than it costs.
    assert controller.worthwhile(probabilities, 0.1) == 3
    tree = Tree([1])
    rejected, chosen = tree.draft(0, 1), tree.add(0, 2)
    for _ in range(20):
        controller.learn(DraftTokens(rejected, probabilities[:1]), tree, [chosen])
    assert controller.worthwhile(probabilities, 0.1) == 0


def test_a_tree_grows_while_that_pays():
    costs = {"target": lambda n: 10 + 0.1 * n, "draft": lambda n: 2.0 * n}
    controller = controller_of("tree", **costs)
    # Two seconds bring what the token is worth, as many tokens per second as without it, or fewer.
    assert controller.expanded(np.array([0.9]), 1, np.array([0.9]), 2.0) == 1
    assert controller.expanded(np.array([0.2]), 1, np.array([0.9, 0.2]), 2.0) == 0
    # The second of a level costs as much as the first here, and brings less.
    assert controller.expanded(np.array([0.9, 0.8, 0.1]), 1, np.array([0.9, 0.8, 0.1]), 2.0) == 2
    fixed = controller_of("tree", **costs, sizes=(3, None, None))
    assert fixed.expanded(np.array([0.01]), 2, np.array([0.01]), 2.0) == 1
    assert fixed.expanded(np.array([0.9]), 3, np.array([0.9]), 2.0) == 0


@pytest.mark.parametrize("kind", ["lookup", "chains", "tree"])
def test_seconds_per_step_follow_the_latest_rounds_and_decay(kind):
    controller = controller_of(kind)
    at_first = controller.seconds_per_step(10)
    assert at_first < 1.02
    for _ in range(20):
        controller.shape(1, matched=8 if kind == "lookup" else None)
        tree = Tree([1])
        controller.learn(DraftTokens(tree.draft(0, 1), np.ones(1), seconds=1.0), tree, [tree.add(0, 2)])
    assert controller.seconds_per_step(10) > 1.3
    for _ in range(3000):
        controller.skip()
    controller._unread = 0
    assert controller.seconds_per_step(10) == pytest.approx(at_first, rel=0.01)


def test_a_draft_model_must_pay_for_its_reading_in_the_steps_to_come():
    for unread, steps, drafts in ((0, 64, True), (200, 64, True), (2000, 64, False), (200, 5, False)):
        controller = controller_of("levels", lambda n: 40.0 + n, lambda n: 1.0 * n, unread=unread)
        assert (controller.shape(4, steps)[1] > 0) == drafts
    read = controller_of("levels", lambda n: 40.0 + n, lambda n: 1.0 * n, unread=2000)
    read.learn(DraftTokens(), Tree([1]), [])
    assert read.shape(4, 64)[1]


def test_what_finds_nothing_says_nothing():
    controller = controller_of("chains")
    before = controller.shape(1)
    for _ in range(100):
        controller.learn(DraftTokens(), Tree([1]), [])
    assert controller.shape(1) == before


@pytest.mark.parametrize("sizes", [(3, 5, None), (3, None, None), (None, 5, 7), (None, None, 7), (3, 5, 7)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_fixed_stays(sizes, kind):
    tokens, width, budget = sizes
    controller = controller_of(kind, flat, lambda nodes: 0.01, sizes=sizes)
    got_width, got_depth = controller.shape(NUM_TIPS[kind], matched=9 if kind == "lookup" else None)
    assert tokens is None or got_depth == tokens or budget
    assert width is None or got_width == width or budget
    assert budget is None or got_width * got_depth <= budget
    assert controller.max_draft_tokens >= got_width * got_depth


@pytest.mark.parametrize("chains", [True, False])
@pytest.mark.parametrize("num_tips", [1, 4, 64])
@pytest.mark.parametrize("room", [0, 3, 64, 100, 300])
def test_sizes_that_adapt_fit_into_memory(room, num_tips, chains):
    controller = controller_of("chains" if chains else "levels", flat, lambda nodes: 1e-6, num_tips=num_tips, room=room)
    assert controller.max_draft_tokens <= room
    width, depth = controller.shape(num_tips, math.inf)
    assert width * depth * (num_tips if chains else 1) <= room
    assert bool(depth) == (room >= num_tips)  # a step needs a whole level
    if num_tips == 1:
        assert controller.worthwhile(np.ones(48), 1.0) <= room
