"""Ctrl-C while texts are generated."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it imports PyTorch, which takes a second
    from specbeam.engine import Request


@contextlib.contextmanager
def ctrl_c_cancels(requests: Sequence[Request]) -> Iterator[threading.Event]:
    """Let Ctrl-C end requests between two passes, so that their texts so far are whole. A second one interrupts.

    A background job of a shell ignores Ctrl-C, and goes on doing so. The event is set once it was pressed.
    """
    pressed = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        yield pressed
        return

    def cancel(*_: Any) -> None:
        pressed.set()
        for request in requests:
            request.cancel()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, cancel)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
