"""A request: the caller's handle of a submitted prompt, and the ways to wait for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from types import TracebackType
from typing import Any, Protocol

from specbeam.engine.clients import CallSoon, Clients, Waiters, call_all, call_now
from specbeam.errors import SpecbeamError
from specbeam.results import Piece, Result, Sequence


class State(Protocol):
    """The engine's state of a request."""

    @property
    def used_slots(self) -> int:
        """Cache slots in use on the target."""


class Request:
    """The handle of a submitted prompt. It keeps alive only what is for the caller, once the request is done.

    While the engine runs in a thread of its own, any thread and any task of asyncio may wait for the request::

        result = request.result()                  # in a thread
        for piece in request: ...
        result = await request                     # in a task
        async for piece in request: ...

    Each piece goes to one taker: iteration, callbacks and ``pieces`` share them. After the last piece an iteration
    raises the error that ended the request, if any. As with a task of asyncio, cancelling a task that waits for a
    request cancels the request. ``with request:`` cancels it at the end of the block, unless it is done.

    Attributes:
        prompt_ids: the prompt's token ids.
        max_length: the maximum number of tokens of the sequence, prompt included.
        is_read: somebody has asked for its pieces. Until then tokens may wait for later ones, which is faster.
        found: finished sequences that nobody has taken yet, best first. Each comes as soon as it is final.
        done: there is a result or an error.
    """

    def __init__(
        self,
        prompt_ids: list[int],
        max_length: int,
        state: State,
        clients: Clients[Any],
    ) -> None:
        self.prompt_ids = prompt_ids
        self.max_length = max_length
        self.is_read = False
        self.found: deque[Sequence] = deque()
        self.done = False
        self.outcome: Result | Exception | None = None
        self.clients = clients  # of its engine
        self._pieces: deque[Piece] = deque()
        self._state: State | None = state  # the engine's, until the request is done
        self._end_waiters: Waiters = {}
        self._output_waiters: Waiters = {}  # for a piece, or the end

    @property
    def pieces(self) -> deque[Piece]:
        """Streamed pieces of text that nobody has taken yet."""
        self.is_read = True
        return self._pieces

    def cancel(self) -> None:
        """End the request before the next pass. Its result is the text so far. May be called from any thread."""
        if (state := self._state) is not None:
            self.clients.cancel(state)

    def result(self, timeout: float | None = None) -> Result:
        """The result. If the engine runs in a thread of its own, wait for it.

        Args:
            timeout: the maximum time to wait, in seconds. The request goes on after it.

        Raises:
            SpecbeamError: the request is not finished, and the engine does not run in a thread of its own.
            TimeoutError: the request was not finished in time.
            Exception: the error that ended the request.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"the request was not finished within {timeout} seconds")
        return self._outcome()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the request is done, but at most this many seconds. Returns whether it is done.

        Raises:
            SpecbeamError: the request is not done, and the engine does not run in a thread of its own.
        """
        if not self.done:
            self._sleep(self._end_waiters, lambda: self.done, timeout)
        return self.done

    def add_done_callback(self, callback: Callable[[Request], object], call_soon: CallSoon = call_now) -> None:
        """Call a function with this request once it is done.

        Args:
            callback: an error that it raises is logged.
            call_soon: how to call it, such as an event loop's ``call_soon_threadsafe`` or an executor's ``submit``. By
                default it is called in the thread in which the engine works, so it must be short.
        """
        self._call_later(self._end_waiters, lambda: callback(self), lambda: self.done, call_soon)

    def add_piece_callback(self, callback: Callable[[Piece], object], call_soon: CallSoon = call_now) -> None:
        """Call a function with each piece from now on. The last piece has the result, unless there was an error.

        Args:
            callback, call_soon: as for :meth:`add_done_callback`.
        """

        pieces = self.pieces

        def take() -> None:
            done = self.done  # before the pieces, because the last one comes before the end
            try:
                while pieces:
                    callback(pieces.popleft())
            finally:
                if not done or pieces:
                    self._call_later(self._output_waiters, take, self._has_output, call_soon)

        self._call_later(self._output_waiters, take, self._has_output, call_soon)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        while (piece := self._take()) is None:
            self._sleep(self._output_waiters, self._has_output)
        return piece

    def __await__(self) -> Generator[Any, None, Result]:
        while not self.done:
            yield from self._sleep_in_loop(self._end_waiters, lambda: self.done).__await__()
        return self._outcome()

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        try:
            while (piece := self._take()) is None:
                await self._sleep_in_loop(self._output_waiters, self._has_output)
        except StopIteration:
            raise StopAsyncIteration from None
        return piece

    def __enter__(self) -> Request:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.cancel()

    @property
    def used_slots(self) -> int:
        """Cache slots in use on the target. A request that waits, was preempted or is done uses none."""
        return 0 if (state := self._state) is None else state.used_slots

    # The engine's thread calls these.

    def give(self, piece: Piece) -> None:
        """Hand out a piece."""
        self._pieces.append(piece)
        if self._output_waiters:
            self.clients.wake(self._output_waiters)

    def end(self) -> None:
        """Note that there is a result or an error."""
        self.done = True
        self._state = None
        for waiters in (self._output_waiters, self._end_waiters):
            if waiters:
                self.clients.wake(waiters)

    def _outcome(self) -> Result:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome

    def _has_output(self) -> bool:
        return self.done or bool(self._pieces)

    def _take(self) -> Piece | None:
        """The next piece, or None if it has not come yet. After the last one, StopIteration or the request's error."""
        done = self.done  # before the pieces, because the last one comes before the end
        try:
            return self.pieces.popleft()
        except IndexError:
            if not done:
                return None
        self._outcome()
        raise StopIteration

    def _sleep(self, waiters: Waiters, is_over: Callable[[], bool], timeout: float | None = None) -> None:
        """Let the calling thread sleep until the engine wakes it, but at most ``timeout`` seconds."""
        event = threading.Event()
        waiters[event.set] = call_now
        try:
            if not is_over():
                self._check_that_the_engine_runs()
                event.wait(timeout)
        finally:
            waiters.pop(event.set, None)

    async def _sleep_in_loop(self, waiters: Waiters, is_over: Callable[[], bool]) -> None:
        """Let the calling task sleep until the engine wakes it. Cancelling the task cancels the request."""
        import asyncio  # in a function: programs without an event loop start sooner

        loop = asyncio.get_running_loop()
        woken = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        waiters[wake] = loop.call_soon_threadsafe
        try:
            if not is_over():
                self._check_that_the_engine_runs()
                await woken
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            waiters.pop(wake, None)

    def _call_later(
        self, waiters: Waiters, callback: Callable[[], object], is_over: Callable[[], bool], call_soon: CallSoon
    ) -> None:
        """Call a function when the engine wakes it, or now if there is nothing to wait for."""
        waiters[callback] = call_soon
        if is_over() and waiters.pop(callback, None) is not None:  # else the engine calls it
            call_soon(call_all, [callback])

    def _check_that_the_engine_runs(self) -> None:
        if threading.current_thread() is self.clients.engine_thread:
            raise SpecbeamError(
                "a callback in the engine's thread cannot wait for a request: wait in another thread, or add a callback"
            )
        if not self.clients.engine_runs:
            raise SpecbeamError(
                "the request is not finished: call Engine.run() or step() until it is done, or let the engine run in a "
                "thread of its own (Engine.start)"
            )
