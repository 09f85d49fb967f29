"""Counts of calls, which tests compare in place of seconds."""

import gc
import sys
from pathlib import Path

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
