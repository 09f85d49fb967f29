"""Processes that are measured in turn: each is stopped while others are measured."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


class Peer:
    """A program and the processes that it starts.

    Args:
        environment: all of its variables.
        pipes: its standard streams, as for ``subprocess.Popen``. Without them they are closed.

    Raises:
        OSError: there is no such program.
    """

    def __init__(self, command: Sequence[str | Path], environment: Mapping[str, str], **pipes: Any) -> None:
        nowhere = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self.process = subprocess.Popen(
            command, env=environment, start_new_session=True, text=True, **{**nowhere, **pipes}
        )

    def pause(self) -> None:
        """Stop its processes, because idle processes of some programs poll."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let it run inside this block."""
        os.killpg(self.process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            if self.process.poll() is None:
                self.pause()

    def end(self) -> None:
        """End its processes."""
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def foreign_environment(**more: str) -> dict[str, str]:
    """The variables of a program that has its own Python packages and its own threads."""
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    return {**own, **more}
