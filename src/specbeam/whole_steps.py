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
from contextlib import ContextDecorator

from specbeam.errors import SpecbeamError

MAX_WAIT_SECONDS = 30.0
"""A step that takes longer may itself be waiting for the thread that forks or ends."""


class WholeSteps(ContextDecorator):
    """A context, or a decorator, for the code of a step. Steps of threads may overlap, and one may contain another.

    Raises:
        SpecbeamError: this process was forked inside a step of another thread, which did not end in time.
    """

    def __init__(self) -> None:
        self._start()

    def _start(self, depths: dict[int, int] | None = None, torn: bool = False) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._depths = depths or {}  # of steps inside steps, by thread
        self._alone: int | None = None  # the thread that forks or ends: no other begins a step
        self._torn = torn  # whether a fork cut a step in two

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._lock:
            if me not in self._depths:
                while self._alone not in (None, me):
                    self._changed.wait()
                if self._torn:
                    raise SpecbeamError(
                        "this process was forked while another thread was inside a pass that did not end: fork "
                        "earlier, or use multiprocessing's spawn method"
                    )
            self._depths[me] = self._depths.get(me, 0) + 1

    def __exit__(self, *_: object) -> None:
        me = threading.get_ident()
        with self._lock:
            self._depths[me] -= 1
            if not self._depths[me]:
                del self._depths[me]
                if self._alone is not None:
                    self._changed.notify_all()

    def be_alone(self) -> None:
        """Wait until no other thread is inside a step, at most ``MAX_WAIT_SECONDS``. Let none begin."""
        me = threading.get_ident()
        with self._lock:
            while self._alone not in (None, me):
                self._changed.wait()
            self._alone = me
            self._changed.wait_for(lambda: self._depths.keys() <= {me}, MAX_WAIT_SECONDS)

    def go_on(self) -> None:
        """Let other threads begin steps again."""
        with self._lock:
            self._alone = None
            self._changed.notify_all()

    def go_on_in_child(self) -> None:
        """Go on in a forked process, where only this thread is left."""
        me = threading.get_ident()
        mine = {thread: depth for thread, depth in self._depths.items() if thread == me}
        self._start(mine, self._torn or mine != self._depths)


whole_step = WholeSteps()
atexit.register(whole_step.be_alone)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=whole_step.be_alone, after_in_parent=whole_step.go_on, after_in_child=whole_step.go_on_in_child
    )
