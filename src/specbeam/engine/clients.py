"""The clients of an engine: who has cancelled a request, who waits for one, and how each is called.

A client registers a function, and how it is to be called: at once, or by an event loop's ``call_soon_threadsafe``. A
client that does not wait costs nothing. All calls of an iteration that go the same way are handed over as one.

There are no locks: a thread that held one while it waits for the interpreter would stop the engine. A client registers
first and then looks again, and the engine gives first and then looks for clients. So no wake-up is lost.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import numpy as np

logger = logging.getLogger("specbeam")

S = TypeVar("S")
Wake = Callable[[], object]
CallSoon = Callable[..., object]
"""Calls a function with arguments, now or later, as an event loop's ``call_soon_threadsafe`` does."""
Waiters = dict[Wake, CallSoon]
"""The clients that wait for one event of one request. Each is called once, and is then no longer among them."""


def call_now(function: Callable[..., object], *args: Any) -> None:
    """Call a function at once, in the calling thread."""
    function(*args)


class Clients(Generic[S]):
    """What an engine and the threads and tasks that use it tell each other. S is the engine's state of a request.

    Attributes:
        engine_thread: the thread in which the engine runs, if it has one of its own.
        cancelled: requests to be ended before the next pass.
        halt: int32 [1], not 0 if a request has come or was cancelled since the iteration began. A backend that goes
            ahead then stops after the pass that runs.
    """

    def __init__(self) -> None:
        self.engine_thread: threading.Thread | None = None
        self.cancelled: deque[S] = deque()
        self.halt = np.zeros(1, dtype=np.int32)
        self._calls: defaultdict[CallSoon, list[Wake]] = defaultdict(list)

    @property
    def engine_runs(self) -> bool:
        """Whether the engine runs in a thread of its own. After a fork, the child lacks that thread."""
        return (thread := self.engine_thread) is not None and thread.is_alive()

    def cancel(self, state: S) -> None:
        """End a request before the next pass. May be called from any thread."""
        self.cancelled.append(state)
        self.halt[0] = 1

    def wake(self, waiters: Waiters) -> None:
        """Note that these clients are to be called after the iteration. The engine's thread calls this."""
        for wake in list(waiters):  # a copy, because any thread may add and remove clients meanwhile
            if (call_soon := waiters.pop(wake, None)) is not None:
                self._calls[call_soon].append(wake)

    def call(self) -> None:
        """Call the clients that were noted in the iteration."""
        while self._calls:
            call_soon, wakes = self._calls.popitem()
            try:
                call_soon(call_all, wakes)
            except Exception:  # such as a loop that was closed: its tasks are gone
                logger.debug("clients of a request could not be called", exc_info=True)


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
