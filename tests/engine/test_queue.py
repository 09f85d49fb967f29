"""The order in which waiting requests start, requests that are refused, and requests whose time is over."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import specbeam
from specbeam import Engine, QueueFull, SpecbeamError

ONE = {"max_new_tokens": 1}
OLDEST_TURN = 8  # one start in eight, as the documents say


def test_lower_priorities_start_first_and_equal_ones_in_the_order_of_submission(lm):
    engine, ended = Engine(lm, max_requests=1), []
    for i, priority in enumerate([2, 0, 1, 0, -3, 2]):
        engine.submit([i + 1], ONE, priority=priority).add_done_callback(lambda _, i=i: ended.append(i))
    engine.run()
    assert ended == [4, 1, 3, 2, 0, 5]


def test_a_priority_takes_no_place_from_live_requests(lm):
    engine = Engine(lm, max_requests=1)
    first = engine.submit([1], {"max_new_tokens": 6, "min_new_tokens": 6}, priority=9)
    engine.step()
    urgent = engine.submit([2], ONE, priority=-9)
    while not first.done:
        engine.step()
        assert not urgent.done


def test_urgent_requests_that_keep_coming_do_not_starve_the_others(lm):
    engine = Engine(lm, max_requests=1)
    patient = [engine.submit([1], ONE, priority=5) for _ in range(3)]
    urgent = []
    while not all(one.done for one in patient):
        urgent += [engine.submit([2], ONE, priority=0) for _ in range(2)]
        engine.step()
    assert sum(one.done for one in urgent) == 3 * (OLDEST_TURN - 1)


@given(
    batches=st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=1, max_size=30),
    cancelled=st.sets(st.integers(0, 60)),
)
def test_each_request_starts_within_the_promised_number_of_starts(lm, batches, cancelled):
    """At most 8 starts for itself and for each earlier request that waits."""
    engine = Engine(lm, max_requests=1)
    requests, bounds, starts = [], [], 0
    for priorities in [*batches, *[[]] * 200]:
        for priority in priorities:
            waiting = sum(not one.done for one in requests)
            requests.append(engine.submit([1], ONE, priority=priority))
            bounds.append(starts + OLDEST_TURN * (waiting + 1))
            if len(requests) in cancelled:
                requests[-1].cancel()
        before = [one.done for one in requests]
        engine.step()
        for at, (was_done, one) in enumerate(zip(before, requests, strict=True)):
            if one.done and not was_done and one.result().finish_reason != "cancelled":
                starts += 1
                assert starts <= bounds[at]
    assert all(one.done for one in requests)


def test_a_full_queue_refuses_and_takes_requests_again(lm):
    engine = Engine(lm, max_requests=2, max_waiting=3)
    requests = [engine.submit([1], ONE) for _ in range(5)]  # all of them wait
    with pytest.raises(QueueFull, match=r"5 requests are unfinished.*max_requests=2 and max_waiting=3") as refusal:
        engine.submit([1], ONE)
    assert isinstance(refusal.value, SpecbeamError)
    requests[4].cancel()
    engine.step()  # ends the cancelled one, and two others
    requests += [engine.submit([1], ONE) for _ in range(3)]
    with pytest.raises(QueueFull):
        engine.submit([1], ONE)
    engine.run()
    assert all(request.done for request in requests)


def test_a_request_that_is_refused_or_fails_takes_no_place(lm):
    def fail(*_):
        raise RuntimeError("it broke")

    engine = Engine(lm, max_requests=1, max_waiting=0)
    for _ in range(3):
        with pytest.raises(SpecbeamError, match="empty"):
            engine.submit([], ONE)
        request = engine.submit([1], ONE | {"logits_processor": [fail]})
        with pytest.raises(QueueFull):
            engine.submit([1], ONE)
        engine.run()
        assert request.done


def test_a_request_ends_when_its_time_is_over(lm):
    engine, endless = Engine(lm, max_requests=1), {"max_new_tokens": 250, "min_new_tokens": 250}
    generating = engine.submit([1], endless, timeout=1e-3)  # no machine is done within it
    waiting = [engine.submit([2], endless | {"num_beams": beams}, timeout=0) for beams in (1, 2)]
    in_time = engine.submit([3], {"max_new_tokens": 4, "min_new_tokens": 4}, timeout=3600)
    engine.run()
    assert [one.result().finish_reason for one in (generating, *waiting)] == ["timeout"] * 3
    length = len(generating.result().token_ids)
    assert generating.result().token_ids == specbeam.generate(lm, [1], endless).token_ids[:length]
    for request in waiting:
        assert request.result().token_ids == []
        assert [piece.result for piece in request.pieces] == [request.result()]
    assert in_time.result().finish_reason == "length"
    assert engine.cache_tokens == 0


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ({"priority": 1.5}, "priority=1.5 is not allowed: give an integer"),
        ({"priority": True}, "priority=True"),
        ({"timeout": -1}, "timeout=-1 is not allowed: give seconds, at least 0"),
        ({"timeout": math.nan}, "timeout=nan"),
        ({"timeout": "soon"}, "timeout='soon'"),
    ],
)
def test_a_wrong_priority_or_timeout_is_refused(lm, how, problem):
    with pytest.raises(SpecbeamError, match=problem):
        Engine(lm).submit([1], ONE, **how)


def test_an_engine_counts_its_requests(lm):
    engine, seen = Engine(lm, max_requests=2), []
    look = {"logits_processor": lambda ids, scores: (seen.append((engine.live, engine.waiting)), scores)[1]}
    requests = [engine.submit([1, 2, 3], ONE | look) for _ in range(5)]
    assert (engine.live, engine.waiting, engine.cache_tokens) == (0, 5, 0)
    requests[4].cancel()
    engine.run()
    assert (engine.live, engine.waiting, engine.cache_tokens) == (0, 0, 0)
    assert seen[0] == (2, 2)
    assert {*seen} <= {(live, waiting) for live in range(3) for waiting in range(3)}
