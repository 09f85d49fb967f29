"""A fork and the end of the interpreter wait for a running step, and for no other reason."""

import threading

import pytest

from specbeam.whole_steps import WholeSteps

ENDED_WITHIN_SECONDS = 20
"""Without the repairs, these threads would wait for MAX_WAIT_SECONDS or for ever."""


def ends(function):
    """Whether a function ends when it runs in a thread of its own."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(ENDED_WITHIN_SECONDS)
    return not thread.is_alive()


def test_a_step_that_is_left_by_an_interrupt_makes_nobody_wait(monkeypatch):
    monkeypatch.setattr("specbeam.whole_steps.MAX_WAIT_SECONDS", 1e6)
    whole_step = WholeSteps()

    @whole_step
    def leave():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        leave()
    assert ends(whole_step.be_alone)
    whole_step.go_on()
    assert ends(whole_step(lambda: None))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_end_of_the_interpreter_ends_threads_that_begin_a_step():
    whole_step, steps = WholeSteps(), []
    step = whole_step(lambda: steps.append(1))
    whole_step.end()
    step()  # this thread is the one that ends
    assert ends(step)
    assert steps == [1]


def test_to_be_alone_waits_for_a_step_and_not_for_a_step_inside():
    whole_step = WholeSteps()
    inside, go_on, order = threading.Event(), threading.Event(), []

    @whole_step
    def outer():
        inside.set()
        go_on.wait()
        whole_step(lambda: order.append("inner"))()

    thread = threading.Thread(target=outer)
    thread.start()
    inside.wait()
    waiting = threading.Thread(target=lambda: (whole_step.be_alone(), order.append("alone")))
    waiting.start()
    go_on.set()
    thread.join()
    waiting.join()
    assert order == ["inner", "alone"]
