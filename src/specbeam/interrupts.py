"""Interrupts (SIGINT, Ctrl-C) that wait until an engine's state is consistent.

Python calls the handler of a signal between any two statements of the main thread. While an engine changes its state,
the signal is only noted. Afterwards the handler that was there before is called, such as asyncio's or a notebook's. A
forward pass can be repeated, so interrupts come there at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from signal import SIGINT
from types import FrameType
from typing import Any


class HeldInterrupts:
    """``with HeldInterrupts():`` lets interrupts wait for the end of the block. A block in a block changes nothing.

    A second interrupt does not wait. It raises KeyboardInterrupt at once, because a caller's function may hang.

    Outside the main thread Python calls no handlers, so there is nothing to do. Handlers that are not Python functions
    stay, too: SIG_IGN, SIG_DFL, and handlers of C libraries.
    """

    def __init__(self) -> None:
        self._before: Callable[[int, FrameType | None], Any] | None = None
        self._noted: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            handler = signal.getsignal(SIGINT)
            if callable(handler) and not isinstance(handler, HeldInterrupts):
                self._before = handler  # first: from the next statement on, interrupts wait
                signal.signal(SIGINT, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note an interrupt: this is the handler meanwhile."""
        if self._noted is not None:
            raise KeyboardInterrupt
        self._noted = number, frame

    def __exit__(self, *_: object) -> None:
        before, self._before = self._before, None
        if before is not None:
            if signal.getsignal(SIGINT) is self:  # else a caller's function has set another
                signal.signal(SIGINT, before)  # from here on, interrupts come at once
            noted, self._noted = self._noted, None
            if noted is not None:
                before(*noted)

    @contextmanager
    def released(self) -> Iterator[None]:
        """In here interrupts do not wait, unless the block is in another one."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()
