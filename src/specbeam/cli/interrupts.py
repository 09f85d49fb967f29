"""Ctrl-C while texts are generated."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it imports PyTorch, which takes a second
    from specbeam.engine import Request


@dataclass
class CtrlC:
    """Whether Ctrl-C was pressed. It has no lock, which a second Ctrl-C could find held by the first one's handler."""

    pressed: bool = False


@contextlib.contextmanager
def ctrl_c_cancels(requests: Sequence[Request]) -> Iterator[CtrlC]:
    """Let Ctrl-C end requests between two passes, so that their texts so far are whole. A second one interrupts.

    A background job of a shell ignores Ctrl-C, and goes on doing so.
    """
    ctrl_c = CtrlC()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        yield ctrl_c
        return

    def cancel(*_: Any) -> None:
        ctrl_c.pressed = True
        for request in requests:
            request.cancel()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, cancel)
    try:
        yield ctrl_c
    finally:
        signal.signal(signal.SIGINT, before)
