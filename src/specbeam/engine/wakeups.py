"""Wakes the clients that wait for requests: threads, tasks of asyncio, and callbacks.

A client registers a function, and how it is to be called: at once, or by an event loop's ``call_soon_threadsafe``. A
client that does not wait costs nothing. All calls of an iteration that go the same way are handed over as one. While
passes go ahead, clients may be called in the middle of an iteration, but functions that run in the engine's thread wait
for its end.

There are no locks: a thread that held one while it waits for the interpreter would stop the engine. A client registers
first and then looks again, and the engine gives first and then looks for clients. So no wake-up is lost.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from threading import Thread
from typing import Any

logger = logging.getLogger("specbeam")

Wake = Callable[[], object]
CallSoon = Callable[..., object]
"""Calls a function with arguments, now or later, as an event loop's ``call_soon_threadsafe`` does."""
Waiters = dict[Wake, CallSoon]
"""The clients that wait for one event of one request. Each is called once, and is then no longer among them."""


def call_now(function: Callable[..., object], *args: Any) -> None:
    """Call a function at once, in the calling thread."""
    function(*args)


def wake_thread(function: Callable[..., object], *args: Any) -> None:
    """Wake another thread that sleeps. Unlike a callback this is short, so it may come within an iteration."""
    call_now(function, *args)


class Wakeups:
    """The wake-ups of one engine's clients.

    Attributes:
        thread: the thread in which the engine runs, if it has one of its own.
    """

    def __init__(self) -> None:
        self.thread: Thread | None = None
        self._calls: defaultdict[CallSoon, list[Wake]] = defaultdict(list)

    @property
    def engine_runs(self) -> bool:
        """Whether the engine runs in a thread of its own. After a fork, the child lacks that thread."""
        return (thread := self.thread) is not None and thread.is_alive()

    def add(self, waiters: Waiters) -> None:
        """Note that these clients are to be called after the iteration. The engine's thread calls this."""
        for wake in list(waiters):  # a copy, because any thread may add and remove clients meanwhile
            if (call_soon := waiters.pop(wake, None)) is not None:
                self._calls[call_soon].append(wake)

    def send(self, in_iteration: bool = False) -> None:
        """Call the clients of the iteration.

        Args:
            in_iteration: the iteration goes on. Leave functions that run in this thread to its end.
        """
        later = self._calls.pop(call_now, []) if in_iteration else []
        while self._calls:
            call_soon, wakes = self._calls.popitem()
            try:
                call_soon(call_all, wakes)
            except Exception:  # such as a loop that was closed: its tasks are gone
                logger.debug("clients of a request could not be called", exc_info=True)
        if later:
            self._calls[call_now] = later


def call_all(wakes: Iterable[Wake]) -> None:
    """Call functions, although one of them fails or is interrupted."""
    wakes = iter(wakes)
    for wake in wakes:
        try:
            wake()
        except Exception:
            logger.exception("a callback of a request failed")
        except BaseException:
            call_all(wakes)
            raise
