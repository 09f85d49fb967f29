"""Ctrl-C while texts are generated."""

import signal

import pytest

from specbeam import Engine
from specbeam.cli.interrupts import ctrl_c_cancels


@pytest.fixture
def handler():
    """Sets what happens on Ctrl-C, until the end of the test."""
    before = signal.getsignal(signal.SIGINT)
    yield lambda handler: signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGINT, before)


def submit(engine, n):
    return [engine.submit([i + 1], {"max_new_tokens": 9, "min_new_tokens": 9}) for i in range(n)]


def test_the_first_ends_all_requests_and_the_second_interrupts(lm, handler):
    handler(signal.default_int_handler)
    engine = Engine(lm)
    requests = submit(engine, 2)
    with ctrl_c_cancels(requests) as ctrl_c:
        engine.step()
        assert not ctrl_c.pressed
        signal.raise_signal(signal.SIGINT)
        assert ctrl_c.pressed
        engine.run()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [request.result().finish_reason for request in requests] == ["cancelled"] * 2
    assert all(len(request.result().token_ids) < 9 for request in requests)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_background_job_goes_on(lm, handler):
    handler(signal.SIG_IGN)
    engine = Engine(lm)
    (request,) = submit(engine, 1)
    with ctrl_c_cancels([request]) as ctrl_c:
        signal.raise_signal(signal.SIGINT)
        engine.run()
    assert not ctrl_c.pressed
    assert len(request.result().token_ids) == 9
