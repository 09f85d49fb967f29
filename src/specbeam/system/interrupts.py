"""Interrupts (SIGINT, Ctrl-C) that wait until an engine's state is consistent.

Python calls the handler of a signal between any two statements of the main thread. While an engine changes its state,
the signal is only noted. Afterwards the handler that was there before is called, such as asyncio's or a notebook's. A
forward pass can be repeated, so interrupts come there at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
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
                self._before, self._noted = handler, None  # first: from the next statement on, interrupts wait
                signal.signal(SIGINT, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note an interrupt: this is the handler meanwhile."""
        if self._noted is not None:
            self._give_back()  # it may cut __exit__ short
            raise KeyboardInterrupt
        self._noted = number, frame

    def __exit__(self, *_: object) -> None:
        before = self._before
        if before is not None:
            self._give_back()  # before anything is forgotten: from here on, interrupts come at once
            noted, self._before, self._noted = self._noted, None, None
            if noted is not None:
                before(*noted)

    def _give_back(self) -> None:
        """Let the handler from before be the handler, unless a caller's function has set another."""
        before = self._before
        if signal.getsignal(SIGINT) is self:
            signal.signal(SIGINT, before)

    def released(self) -> ReleasedInterrupts:
        """A block in which interrupts do not wait, unless it is in another :class:`HeldInterrupts`."""
        return ReleasedInterrupts(self)


class ReleasedInterrupts:
    """Ends a block of held interrupts, and begins it again.

    A class, because a generator would be closed late if an interrupt came before the block. Then interrupts would be
    held from that moment on.
    """

    def __init__(self, held: HeldInterrupts) -> None:
        self._held = held

    def __enter__(self) -> None:
        self._held.__exit__()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._held.__enter__()
