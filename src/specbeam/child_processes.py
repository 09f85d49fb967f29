"""Child processes for work on files of others: the kernel limits their memory and their processor time.

A library in C may take all memory and time in one call, which no thread can interrupt, and it may crash. So such work
is done in a child, which is a module of this package run as a program.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

from specbeam.errors import SpecbeamError


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
            "chat templates and files of sound are read: free memory or end other processes"
        ) from error


def ran_out_of_time(status: int) -> bool:
    """Whether :func:`end_after` ended a child, by its exit status."""
    return hasattr(signal, "SIGPROF") and status == -signal.SIGPROF


def limit_memory(most: int) -> None:
    """Limit the address space of this process, in bytes."""
    if sys.platform == "linux":
        import resource

        _, before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most if before < 0 else min(most, before), before))


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
