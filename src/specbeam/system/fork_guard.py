"""Steps that neither a fork nor the end of the interpreter may cut in two.

A fork copies only the thread that forks. A lock that another thread holds stays locked in the child for ever, and its
half-done work stays half done. At the end of the interpreter, daemon threads are ended wherever they next ask for the
interpreter. Inside one of PyTorch's functions, that aborts the process. So a fork and the end of the interpreter wait
until no other thread is inside a step, and other threads begin none meanwhile.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from specbeam.errors import SpecbeamError

P = ParamSpec("P")
R = TypeVar("R")

MAX_WAIT_SECONDS = 30.0
"""A step that takes longer may itself be waiting for the thread that forks or ends."""


class InterpreterEnds(SystemExit):
    """Ends a thread silently, as the end of the interpreter would."""


class ForkGuard:
    """A decorator for the function of a step. Steps of threads may overlap, and one may contain another.

    Raises:
        SpecbeamError: this process was forked inside a step of another thread, which did not end in time.
    """

    def __init__(self) -> None:
        self._is_ending = False
        self._start()

    def _start(self, torn: bool = False) -> None:
        self._changed = threading.Condition()
        self._inside: set[int] = set()  # threads inside a step
        self._alone: int | None = None  # the thread that forks or ends: no other begins a step
        self._torn = torn  # whether a fork cut a step in two

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def step(*args: P.args, **kwargs: P.kwargs) -> R:
            me = threading.get_ident()
            if me in self._inside:
                return function(*args, **kwargs)
            try:
                self._begin(me)
                return function(*args, **kwargs)
            finally:
                self._inside.discard(me)  # here, not in a function: before its first line, an interrupt might come
                if self._alone is not None:
                    with self._changed:
                        self._changed.notify_all()

        return step

    def _begin(self, me: int) -> None:
        with self._changed:
            while self._alone not in (None, me):
                if self._is_ending:
                    raise InterpreterEnds
                self._changed.wait()
            if self._torn:
                raise SpecbeamError(
                    "this process was forked while another thread was inside a pass that did not end: fork earlier, or "
                    "use multiprocessing's spawn method"
                )
            self._inside.add(me)

    def be_alone(self) -> None:
        """Wait until no other thread is inside a step, at most ``MAX_WAIT_SECONDS``. Let none begin."""
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._alone in (None, me))
            self._alone = me
            self._changed.wait_for(lambda: self._inside <= {me}, MAX_WAIT_SECONDS)

    def end(self) -> None:
        """Let no thread begin a step any more: the interpreter ends."""
        with self._changed:
            self._is_ending = True
            self.be_alone()
            self._changed.notify_all()

    def go_on(self) -> None:
        """Let other threads begin steps again."""
        with self._changed:
            self._alone = None
            self._changed.notify_all()

    def go_on_in_child(self) -> None:
        """Go on in a forked process, where only this thread is left."""
        mine = self._inside & {threading.get_ident()}
        self._start(torn=self._torn or mine != self._inside)
        self._inside = mine


fork_guard = ForkGuard()
atexit.register(fork_guard.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=fork_guard.be_alone, after_in_parent=fork_guard.go_on, after_in_child=fork_guard.go_on_in_child
    )
