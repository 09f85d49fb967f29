"""A fork and the end of the interpreter wait for a running step, and for no other reason."""

import linecache
import sys
import threading

import pytest

import specbeam.whole_steps
from specbeam.whole_steps import WholeSteps

ENDED_WITHIN_SECONDS = 20
"""Without the repairs, these threads would wait for MAX_WAIT_SECONDS or for ever."""


def ends(function):
    """Whether a function ends when it runs in a thread of its own."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(ENDED_WITHIN_SECONDS)
    return not thread.is_alive()


def interrupted_at(line, function):
    """Call a function, with a KeyboardInterrupt before the given line of whole_steps.py that it runs.

    Lines with "with" do not count. Python visits them again before it calls ``__exit__``, where it takes no interrupts.
    """
    lines, source = 0, specbeam.whole_steps.__file__

    def trace(frame, event, _):
        nonlocal lines
        text = linecache.getline(source, frame.f_lineno).strip()
        if event == "line" and frame.f_code.co_filename == source and not text.startswith("with "):
            lines += 1
            if lines == line:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return lines >= line


def test_an_interrupt_at_any_line_makes_nobody_wait(monkeypatch):
    monkeypatch.setattr("specbeam.whole_steps.MAX_WAIT_SECONDS", 1e6)
    line, interrupted = 0, True
    while interrupted:
        line += 1
        whole_step, found = WholeSteps(), []
        step = whole_step(lambda: None)
        assert ends(lambda: found.append(interrupted_at(line, step)))  # noqa: B023
        (interrupted,) = found
        assert ends(whole_step.be_alone)
        whole_step.go_on()
        assert ends(step)
    assert line > 5


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
