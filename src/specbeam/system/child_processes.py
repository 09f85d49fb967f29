"""Child processes for work on files of others: the kernel limits their memory and their processor time.

A library in C may take all memory and time in one call, which no thread can interrupt, and it may crash. So such work
is done in a child, which is a module of this package run as a program.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from threading import Lock
from typing import Any

from specbeam.errors import SpecbeamError

SECONDS_BETWEEN_LOOKS = 0.1
"""While a child works, how often somebody looks whether its answer is still wanted."""
_is_wanted: ContextVar[Callable[[], bool]] = ContextVar("is_wanted", default=lambda: True)


@contextmanager
def wanted_while(is_wanted: Callable[[], bool]) -> Iterator[None]:
    """Within this, children work only for as long as their answer is wanted."""
    token = _is_wanted.set(is_wanted)
    try:
        yield
    finally:
        _is_wanted.reset(token)


class Ended(Exception):
    """A child ended while it worked.

    Attributes:
        status: its exit status.
    """

    def __init__(self, status: int) -> None:
        super().__init__(f"the child process ended with status {status}")
        self.status = status


class Worker:
    """A child that answers lines. It starts when it is first needed, and again after it has exceeded a limit.

    Args:
        file: of a module of this package, which is run as a program.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.end)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forget)

    def start(self) -> None:
        """Start the child and do not wait: it needs a quarter of a second before it can work."""
        with self._lock:
            self._running()

    @property
    def is_ready(self) -> bool:
        """Whether the child runs and has nothing to do. So its last task was well-behaved."""
        child = self._process
        return child is not None and child.poll() is None and not self._lock.locked()

    def ask(self, line: bytes) -> bytes:
        """The child's answer to a line, a line as well. Threads take turns.

        Raises:
            Ended: the child ended before it had answered.
            SpecbeamError: the answer is no longer wanted.
        """
        is_wanted = _is_wanted.get()
        while not self._lock.acquire(timeout=SECONDS_BETWEEN_LOOKS):
            _check(is_wanted)
        try:
            _check(is_wanted)
            child = self._running()
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                with suppress(BrokenPipeError):
                    child.stdin.write(line)
                    child.stdin.flush()
                while not select.select([child.stdout], [], [], SECONDS_BETWEEN_LOOKS)[0]:
                    _check(is_wanted)
                answer = child.stdout.readline()
                if not answer.endswith(b"\n"):
                    raise Ended(child.wait())
            except BaseException:  # after an interrupt, the next task would get this one's answer
                self._end()
                raise
        finally:
            self._lock.release()
        return answer

    def end(self) -> None:
        """End the child."""
        with self._lock:
            self._end()

    def forget(self) -> None:
        """Leave the child to the process from which this one was forked."""
        self._lock, self._process = Lock(), None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            pipe = subprocess.PIPE
            self._process = start(self._file, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        return self._process

    def _end(self) -> None:
        child, self._process = self._process, None
        if child is not None:
            child.kill()
            with suppress(BrokenPipeError), child:  # closes the pipes and waits
                pass


def _check(is_wanted: Callable[[], bool]) -> None:
    if not is_wanted():
        raise SpecbeamError("nobody waits for it any more")


def start(file: str, *arguments: str, **how: Any) -> subprocess.Popen[bytes]:
    """Run a file as a program. It finds the packages that this process finds, and no Ctrl-C of a terminal.

    Its standard output is buffered, whatever the environment says: a write to a raw file may be partial.

    Args:
        file: of a module of this package. It is run by its path, so that the package that it is in is not imported.
        how: arguments of :class:`subprocess.Popen`.

    Raises:
        SpecbeamError: the system starts no process.
    """
    path = os.pathsep.join(sys.path)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", file, *arguments],
            env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
            **how,
        )
    except OSError as error:
        raise SpecbeamError(
            f"{sys.executable or 'Python'} cannot be started as a child process ({error.strerror}), and only there "
            "chat templates, audio files and grammars are read: free memory or end other processes"
        ) from error


def ran_out_of_time(status: int) -> bool:
    """Whether :func:`end_after` ended a child, by its exit status."""
    return hasattr(signal, "SIGPROF") and status == -signal.SIGPROF


def limit_memory(maximum: int) -> None:
    """Limit the address space of this process, in bytes."""
    if sys.platform == "linux":
        import resource

        _, before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (maximum if before < 0 else min(maximum, before), before))


def limit_stack(maximum: int) -> None:
    """Limit the stack of this process, in bytes."""
    if sys.platform != "win32":
        import resource

        _, before = resource.getrlimit(resource.RLIMIT_STACK)
        resource.setrlimit(resource.RLIMIT_STACK, (maximum if before < 0 else min(maximum, before), before))


def end_after(cpu_seconds: float) -> None:
    """End this process after some seconds of processor time from now; 0 for never."""
    if hasattr(signal, "setitimer"):  # not Windows
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)


def memory_of_this_process() -> int:
    """Bytes of its address space; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
