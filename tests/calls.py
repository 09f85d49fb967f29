"""What functions of specbeam run: counts of calls, which tests compare in place of seconds, and each bytecode."""

import gc
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

import specbeam

SOURCE = str(Path(specbeam.__file__).parent)


def calls_made(function):
    """The calls that specbeam's functions make: work that can be compared with the same work at another size."""
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event in ("call", "c_call") and frame.f_code.co_filename.startswith(SOURCE)

    before = sys.getprofile()
    gc.disable()  # finalizers of objects that other tests left would count
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls


def press_within(places, work, at=()):
    """Run a function, and press Ctrl-C before some of the bytecodes that other functions run meanwhile.

    Args:
        places: these functions, or modules with all of their functions.
        at: numbers of bytecodes, from 0, in the order in which they run. If Ctrl-C raises an error, later numbers do
            not count. A number may be there twice.

    Returns:
        How many bytecodes there were, and the class of the error.
    """
    codes = {getattr(place, "__code__", None) for place in places}
    files = {getattr(place, "__file__", None) for place in places}
    left, count = Counter(at), 0

    def on_call(frame, event, arg):
        if frame.f_code not in codes and frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        return on_bytecode

    def on_bytecode(frame, event, arg):
        nonlocal count
        if event == "opcode":
            count += 1
            for _ in range(left[count - 1]):
                signal.raise_signal(signal.SIGINT)
        return on_bytecode

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        work()
    except BaseException as error:
        return count, type(error)
    finally:
        sys.settrace(before)
    return count, None


def check_interrupts():
    """Ctrl-C raises KeyboardInterrupt, as before the test."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def warpers(**values):
    """The warpers of a selection request, by their options. None is for one that is not there."""
    return tuple((name, value) for name, value in values.items() if value is not None)
