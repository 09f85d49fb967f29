"""Expected costs of passes, learned from measured ones."""

import math
import re
from itertools import combinations, product
from weakref import WeakKeyDictionary

import numpy as np
import pytest

import specbeam
from specbeam import Options, SpecbeamError
from specbeam.checkpoints.config import Config
from specbeam.checkpoints.parameters import expert_use
from specbeam.checkpoints.parts.experts import Experts, ExpertUse
from specbeam.checkpoints.parts.mlp import MLP
from specbeam.drafting.policy import SharedCost
from specbeam.drafting.policy.controller import Controller, Sizes
from specbeam.engine import costs
from specbeam.engine.costs import UNMEASURED_SECONDS, CostTable, PassTimes
from specbeam.engine.setup import make_setup
from tests.conftest import run_alone, table_of_costs


class Measured(PassTimes):
    def measure(self, nodes, seconds, count=2):
        for _ in range(count):
            self.add(nodes, seconds)


def test_what_a_pass_takes_is_learned_from_passes():
    times = Measured()
    times.measure(1, 1.0)
    # Not measured: a little more than a pass over fewer nodes, until it is tried twice.
    assert 1 < times.expected(8) < 1.5
    times.add(8, 9.0)
    assert times.expected(8) < 1.5
    times.add(8, 3.0)
    assert times.expected(8) == pytest.approx(3.0)
    times.measure(4, 2.0)
    assert times.expected(2) == pytest.approx(1 + 1 / 3)  # between 1 and 4
    assert times.expected(6) == pytest.approx(2.5)
    assert times.expected(16) == pytest.approx(5.0)  # on from 4 and 8
    times.measure(16, 9.0)
    assert times.expected(64) == pytest.approx(36.0)  # but never more than as many times as much


def test_how_many_nodes_a_time_is_enough_for_follows_the_latest_passes():
    times = PassTimes()
    assert times.nodes_within(100.0) == 8  # nothing is known: begin with a tile
    times.add(1, 1.0)
    assert times.nodes_within(100.0) == 8
    times.add(100, 100.0)
    assert times.nodes_within(100.0) == 96  # whole tiles
    times.add(96, 192.0)  # a longer sequence
    assert times.nodes_within(100.0) == 48
    times.add(48, 4800.0)  # another program
    assert times.nodes_within(100.0) == 24
    times.add(24, 24.0)
    assert times.nodes_within(100.0) == 48
    assert times.nodes_within(0.0) == 8


def test_a_machine_that_slows_down_does_so_for_passes_of_all_sizes():
    times = Measured()
    times.measure(1, 1.0, 3)
    times.measure(8, 2.0, 3)
    times.measure(1, 1.5, 200)
    assert times.expected(1) == pytest.approx(1.5, rel=0.01)
    assert times.expected(8) > 2.4


def test_passes_that_were_never_measured_are_taken_for_fast():
    """A draft is then tried and measured, also where only its prefill was."""
    times = Measured()
    assert times.expected(1) < times.expected(64) < 0.01
    times.measure(64, 1.0)
    assert times.expected(1) < 0.02
    assert times.expected(8) < 2 * times.expected(1)
    times.measure(1, 0.9)
    assert times.expected(32) <= 1.0


def linear_times(fixed, per_node):
    times = Measured()
    for nodes in (1, 2, 4, 8, 16, 32, 64):
        times.measure(nodes, fixed + per_node * nodes)
    return times


def test_passes_of_about_the_same_size_are_one_point_between_them():
    times = PassTimes()
    for _ in range(100):
        times.add(14, 14.0)
        times.add(18, 18.0)
        times.add(32, 32.0)
    assert times.expected(16) == pytest.approx(16.0, rel=0.05)
    assert times.expected(24) == pytest.approx(24.0, rel=0.05)


def test_a_request_bears_its_part_of_a_shared_pass_and_all_that_its_draft_tokens_add():
    cost = SharedCost(linear_times(8.0, 1.0).expected)
    assert [cost(1), cost(5)] == pytest.approx([9.0, 13.0])  # alone
    cost.join(other_nodes=15, requests=16)
    assert [cost(1), cost(5)] == pytest.approx([1.5, 5.5])
    assert cost(0) == pytest.approx(1.5)


@pytest.mark.parametrize(("live", "drafts"), [(1, True), (2, True), (16, False)])
def test_a_draft_token_that_pays_alone_does_not_pay_in_a_crowd(live, drafts):
    """Two of three draft tokens are expected to be accepted. With 16 live, one costs two thirds of a request's part."""
    cost = SharedCost(linear_times(8.0, 1.0).expected)
    cost.join(other_nodes=live - 1, requests=live)
    controller = Controller([Sizes(None, None, None, num_tips=1, chains=True)], cost, cost)
    assert (controller.shape(1)[1] > 0) == drafts


def test_requests_learn_who_shares_their_passes(lm, monkeypatch):
    joined = []
    monkeypatch.setattr(SharedCost, "join", lambda self, other_nodes, requests: joined.append((other_nodes, requests)))
    engine = specbeam.Engine(lm, max_requests=3)
    for beams in (4, 4, 1):
        engine.submit("hello", {"max_new_tokens": 8, "num_beams": beams, "eos_token_id": []})
    for _ in range(4):
        engine.step()
    learned = {*joined[: len(joined) // 4]}, {*joined[-len(joined) // 4 :]}
    assert learned[0] == {(2, 3)}  # each has prefilled a prompt, and will bring one node at least
    assert learned[1] == {(5, 3), (8, 3)}


@pytest.mark.parametrize("num_beams", [1, 2])
def test_the_passes_of_a_draft_are_its_own(tiny, watch, monkeypatch, num_beams):
    """The seconds of a pass include its use by the request, which may ask its other model at the end of it."""
    target, draft, learned = tiny("llama")[1], tiny("gpt2")[1], ([], [])
    ran = watch(target), watch(draft)
    for lm, nodes in zip((target, draft), learned, strict=True):
        monkeypatch.setattr(costs.pass_times(lm.backend), "add", lambda n, seconds, nodes=nodes: nodes.append(n))
    sizes = {"num_draft_tokens": 3, "draft_width": num_beams}
    specbeam.generate(target, "hello", draft=draft, num_beams=num_beams, max_new_tokens=8, **sizes)
    assert ran[1]
    assert learned == ran


def test_a_table_gives_costs_and_learns_nothing():
    table = CostTable(lambda nodes: 0.01 * nodes)
    table.add(8, 100.0)
    assert table.expected(8) == 0.08
    assert [table.nodes_within(seconds) for seconds in (0.0, 0.08, 0.2, 0.24)] == [8, 8, 16, 24]
    assert CostTable(lambda nodes: 1.0).nodes_within(2.0) > 512  # where nodes cost nothing, all fit


@pytest.mark.parametrize("seconds", [0, 0.0, math.nan, math.inf, -1.0, "1", None])
@pytest.mark.parametrize("nodes", [1, 4])
def test_a_cost_that_no_pass_has_is_refused_by_name(lm, seconds, nodes):
    """It ended requests with ZeroDivisionError or ValueError."""
    how = {"options": {"max_new_tokens": 4, "num_beams": 4}, "draft": lm}
    with pytest.raises(SpecbeamError, match=re.escape(f"gives {seconds!r} seconds for nodes={nodes}: give")):
        run_alone(lm, [5, 6], **how, costs=table_of_costs(lambda count: seconds if count == nodes else 1.0))


def test_a_clock_that_measures_0_gives_costs_over_0():
    times = PassTimes()
    for nodes in (1, 1, 1, 8, 8, 64, 64, 64):
        times.add(nodes, 0.0)
    assert min(times.expected(nodes) for nodes in range(1, 200)) > 0
    assert SharedCost(times.expected)(4) > 0
    assert times.nodes_within(1.0) >= 8


def test_with_given_costs_counts_are_the_same_in_every_run(tiny):
    lm = tiny("llama", initializer_range=0.1)[1]  # likes to repeat itself

    def counts(seconds):
        engine = specbeam.Engine(lm, costs=table_of_costs(seconds))
        options = {"max_new_tokens": 30, "eos_token_id": []}
        requests = [engine.submit([n, 2, 3, n, 2], options, draft="ngram") for n in range(3)]
        engine.run()
        stats = [request.result().stats for request in requests]
        return [(one.target_passes, one.nodes_evaluated, one.drafted) for one in stats]

    flat, steep, flat_again, steep_again = map(counts, 2 * [lambda nodes: 1.0, float])
    assert (flat, steep) == (flat_again, steep_again)
    assert flat != steep


def test_lazy_beams_compare_costs_with_the_same_share_of_a_pass(lm, monkeypatch):
    monkeypatch.setattr(costs, "_pass_times", WeakKeyDictionary())
    setup = make_setup(lm, [1], Options(num_beams=16), costs.pass_times)
    for nodes in (1, 16, 64) * 2:
        costs.pass_times(lm.backend).add(nodes, 10.0 + nodes)
    for cost in (setup.cost, setup.plain_cost):
        cost.join(other_nodes=48, requests=4)
    assert setup.plain_cost(16) == pytest.approx(setup.cost(16))  # no pass went ahead yet


def test_passes_that_go_ahead_have_times_of_their_own():
    single = Measured()
    ahead = Measured(fallback=single)
    single.measure(1, 3.0)
    assert ahead.expected(1) == 3.0
    single.measure(1, 4.0, 200)
    assert ahead.expected(1) == pytest.approx(4.0, rel=0.01)  # it follows
    ahead.measure(1, 2.0)
    assert ahead.expected(1) == 2.0 < single.expected(1)
    assert ahead.expected(16) == single.expected(16)  # wide passes take too long to go ahead


@pytest.mark.parametrize(("experts", "used", "nodes"), [(4, 2, 1), (4, 2, 3), (5, 1, 4), (3, 3, 2)])
def test_nodes_read_as_many_experts_as_they_choose_on_average(experts, used, nodes):
    """Over all choices that the nodes may make. The cost of a pass grows with the experts that it reads."""
    choices = product(combinations(range(experts), used), repeat=nodes)
    mean = np.mean([len(set().union(*chosen)) for chosen in choices])
    assert ExpertUse(0.5, experts, used).growth(nodes) == pytest.approx(mean / used)
    expected = PassTimes(experts=ExpertUse(0.5, experts, used)).expected(nodes)
    dense = PassTimes().expected(nodes)
    assert expected == pytest.approx(dense + UNMEASURED_SECONDS * 0.5 * (mean / used - 1))


def test_a_model_says_what_its_passes_read_of_experts():
    parts = Experts(num_experts=8, experts_per_token=2, intermediate_size=30), MLP(intermediate_size=40)
    config = Config("tiny", 50, 20, tuple((part,) for part in parts), 64, 1e-5)
    of_experts, others = 2 * 3 * 30 * 20, 8 * 20 + 3 * 40 * 20 + 50 * 20 + 3 * 20
    assert expert_use(config) == pytest.approx((of_experts / (of_experts + others), 8, 2))
    assert expert_use(Config("tiny", 50, 20, (parts[1:],), 64, 1e-5)) is None
