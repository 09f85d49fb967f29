"""``Engine.as_completed``: the engine stays full, and requests come back as they finish."""

import pytest

import specbeam
from specbeam import Engine, Options, SpecbeamError

LENGTHS = [5, 2, 9, 1, 4, 4, 7, 3]


def options(length):
    return Options(max_new_tokens=length, min_new_tokens=length)


def test_requests_come_back_as_they_finish_with_what_generate_returns(lm):
    engine = Engine(lm, max_requests=3)
    submissions = ((i, engine.submit([i + 1], options(length))) for i, length in enumerate(LENGTHS))
    finished = {}
    for number, request in engine.as_completed(submissions):
        assert request.done
        finished[number] = request.result().token_ids
    expected = [specbeam.generate(lm, [i + 1], max_new_tokens=n, min_new_tokens=n) for i, n in enumerate(LENGTHS)]
    assert [finished[i] for i in range(len(LENGTHS))] == [result.token_ids for result in expected]
    # Three at a time, a token per iteration: the order follows from the lengths, then from the order of submission.
    assert [*finished] == [1, 3, 0, 4, 2, 5, 7, 6]


def test_as_many_requests_as_share_a_pass_are_submitted_and_no_more(lm):
    engine = Engine(lm, max_requests=3)
    unfinished, most = set(), []

    def submissions():
        for i, length in enumerate(LENGTHS):
            unfinished.add(i)
            most.append(len(unfinished))
            yield i, engine.submit([i + 1], options(length))

    for number, _ in engine.as_completed(submissions()):
        unfinished.remove(number)
    assert most == [1, 2, 3, 3, 3, 3, 3, 2]  # when the last is submitted, two have finished at once
    assert engine.cache_tokens == 0


def test_a_submission_that_is_refused_is_raised_and_a_request_that_fails_is_yielded(lm):
    engine = Engine(lm)

    def fail(*_):
        raise RuntimeError("it broke")

    failing = Options(max_new_tokens=4, logits_processor=[fail])
    submissions = (
        (i, engine.submit([1], failing if i == 0 else options(2) if i < 3 else {"max_new_tokens": 0})) for i in range(4)
    )
    with pytest.raises(SpecbeamError, match="max_new_tokens=0"):
        dict(engine.as_completed(submissions))
    submissions = ((i, engine.submit([1], failing if i == 0 else options(2))) for i in range(3))
    (failed, *good) = [request for _, request in sorted(engine.as_completed(submissions), key=lambda pair: pair[0])]
    with pytest.raises(RuntimeError, match="it broke"):
        failed.result()
    assert [len(request.result().token_ids) for request in good] == [2, 2]
    assert [*engine.as_completed([])] == []


def test_a_request_of_another_engine_is_refused(lm):
    engine, other = Engine(lm), Engine(lm)
    with pytest.raises(SpecbeamError, match="submitted to another engine"):
        dict(engine.as_completed([(0, other.submit([1]))]))
