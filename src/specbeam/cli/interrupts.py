"""Ctrl-C while texts are generated."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from signal import SIGINT
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it imports PyTorch, which takes a second
    from specbeam.engine import Request


class CtrlCCancels:
    """In this block Ctrl-C ends requests between two passes, so that their texts so far are whole.

    A second one interrupts. A background job of a shell ignores Ctrl-C, and goes on doing so.

    Attributes:
        pressed: whether Ctrl-C was pressed. It has no lock, which a second Ctrl-C could find held by the first one's
            handler.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.pressed = False
        self._requests = requests
        self._before: Any = signal.SIG_IGN

    def __enter__(self) -> CtrlCCancels:
        self._before = signal.getsignal(SIGINT)
        if self._before is not signal.SIG_IGN:
            signal.signal(SIGINT, self._cancel)
        return self

    def _cancel(self, *_: Any) -> None:
        self.pressed = True
        signal.signal(SIGINT, self._before)
        for request in self._requests:
            request.cancel()

    def __exit__(self, *_: object) -> None:
        if self._before is not signal.SIG_IGN:
            signal.signal(SIGINT, self._before)
