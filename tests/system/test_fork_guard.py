"""A fork and the end of the interpreter wait for a running step, and for no other reason."""

import threading

import pytest

from specbeam.system.fork_guard import ForkGuard

ENDED_WITHIN_SECONDS = 20
"""Without the repairs, these threads would wait for MAX_WAIT_SECONDS or for ever."""


def ends(function):
    """Whether a function ends when it runs in a thread of its own."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(ENDED_WITHIN_SECONDS)
    return not thread.is_alive()


def test_a_step_that_is_left_by_an_interrupt_makes_nobody_wait(monkeypatch):
    monkeypatch.setattr("specbeam.system.fork_guard.MAX_WAIT_SECONDS", 1e6)
    fork_guard = ForkGuard()

    @fork_guard
    def leave():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        leave()
    assert ends(fork_guard.be_alone)
    fork_guard.go_on()
    assert ends(fork_guard(lambda: None))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_end_of_the_interpreter_ends_threads_that_begin_a_step():
    fork_guard, steps = ForkGuard(), []
    step = fork_guard(lambda: steps.append(1))
    fork_guard.end()
    step()  # this thread is the one that ends
    assert ends(step)
    assert steps == [1]


def test_to_be_alone_waits_for_a_step_and_not_for_a_step_inside():
    fork_guard = ForkGuard()
    inside, go_on, order = threading.Event(), threading.Event(), []

    @fork_guard
    def outer():
        inside.set()
        go_on.wait()
        fork_guard(lambda: order.append("inner"))()

    thread = threading.Thread(target=outer)
    thread.start()
    inside.wait()
    waiting = threading.Thread(target=lambda: (fork_guard.be_alone(), order.append("alone")))
    waiting.start()
    go_on.set()
    thread.join()
    waiting.join()
    assert order == ["inner", "alone"]
