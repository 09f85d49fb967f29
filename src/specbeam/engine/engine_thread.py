"""An engine's own thread. It works while there are requests, and sleeps otherwise."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

from specbeam.engine.request_state import RequestState
from specbeam.engine.scheduler import Scheduler
from specbeam.errors import SpecbeamError
from specbeam.system.fork_guard import InterpreterEnds, fork_guard

logger = logging.getLogger("specbeam")
SECONDS_FOR_ANOTHER = 0.0005
"""After a sleep, the thread waits this long for another request, and again as long as further ones come."""
MAX_WINDOW_SECONDS = 0.01
"""A request waits no longer than this for further ones."""


class EngineThread:
    """Runs the iterations of an engine in a thread of its own, between :meth:`start` and :meth:`stop`.

    It is a daemon thread, so a program that does not stop it ends all the same. The lock is taken only under the fork
    guard: a fork meanwhile would leave it locked in the child.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._clients = scheduler.clients
        self._lock = threading.Lock()  # of submit, start and stop. Iterations do without it
        self._has_work = threading.Event()
        self._is_stopping = False  # it takes no new requests
        self._is_cancelling = False  # nothing is evaluated any more
        self._failure: str | None = None  # how an error ended the thread, or the engine

    @fork_guard
    def start(self, iterate: Callable[[], bool]) -> None:
        """Start the thread, as :meth:`specbeam.Engine.start` says.

        Args:
            iterate: runs one iteration of the engine, and returns whether there is more to do.
        """
        with self._lock:
            if self._clients.engine_runs:
                raise SpecbeamError("the engine runs in a thread of its own already")
            self._is_stopping = self._is_cancelling = False
            self._failure = None
            self._has_work = threading.Event()
            self._has_work.set()
            thread = threading.Thread(target=self._work, args=[iterate], name="specbeam-engine", daemon=True)
            self._clients.engine_thread = thread  # first: its iterations ask whether it runs
            thread.start()

    @fork_guard
    def add(self, request: RequestState) -> None:
        """Queue a request, or refuse it as :meth:`specbeam.Engine.submit` says. Wake the thread if there is one."""
        with self._lock:
            if self._failure is not None:
                raise RuntimeError(self._failure)
            if self._is_stopping:
                raise SpecbeamError("the engine is stopping: submit the request after it was started again")
            self._scheduler.add(request)
            if self._clients.engine_runs:
                self._has_work.set()

    def stop(self, grace: float | None) -> None:
        """Finish all requests and end the thread, as :meth:`specbeam.Engine.stop` says."""
        thread = self._clients.engine_thread
        if thread is None or not thread.is_alive():
            return
        if thread is threading.current_thread():
            raise SpecbeamError("a callback in the engine's thread cannot stop it: stop it from another thread")
        self._begin_to_stop(thread, cancel=False)
        thread.join(grace)
        self._begin_to_stop(thread, cancel=True)
        thread.join()

    @fork_guard
    def _begin_to_stop(self, thread: threading.Thread, cancel: bool) -> None:
        with self._lock:
            if thread is self._clients.engine_thread:
                self._is_stopping = True
                self._is_cancelling |= cancel
                self._has_work.set()

    def _work(self, iterate: Callable[[], bool]) -> None:
        try:
            while not (self._is_stopping and self._scheduler.is_empty):
                self._has_work.wait()
                for _ in batching_window(lambda: self._scheduler.waiting):
                    time.sleep(SECONDS_FOR_ANOTHER)
                self._has_work.clear()  # before an iteration looks for new requests
                more = True
                while more:
                    if self._is_cancelling:
                        self._scheduler.cancel_all()
                    more = iterate()
                    self._clients.call()
            self.end()
        except InterpreterEnds:
            pass
        except BaseException as error:
            logger.exception("the engine's thread ended with an error")
            self.end(f"the engine's thread ended with {type(error).__name__}: {error}. Start the engine again")

    @fork_guard
    def end(self, failure: str | None = None) -> None:
        """Note that no thread runs any more. After a failure all requests fail, and no further ones are taken."""
        with self._lock:
            self._failure = failure
            self._is_stopping = False
            self._clients.engine_thread = None
            if failure is not None:
                self._scheduler.fail_all(failure)
        self._clients.call()


def batching_window(count: Callable[[], int]) -> Iterator[None]:
    """Yield before each pause in which another request may come, until none has come in the last one.

    Args:
        count: the requests that have come so far.
    """
    end, seen = time.monotonic() + MAX_WINDOW_SECONDS, 0
    while (come := count()) > seen and time.monotonic() < end:
        seen = come
        yield
