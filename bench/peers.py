"""Processes that are measured in turn: each is stopped while others are measured."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from float_checkpoint import float_checkpoint


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


class Vllm:
    """vLLM in a process and an environment of its own, on the values of a GGUF file: ``serving_vllm.py``.

    Args:
        python: of its environment.
        settings: keywords of ``vllm.LLM``.
        pipes: as for :class:`Peer`.

    Attributes:
        settings: its version and settings, as it says them.

    Raises:
        OSError: there is no such program.
        PeerEnded: it cannot start.
    """

    def __init__(self, python: Path, model: Path, threads: int, settings: Mapping[str, Any], **pipes: Any) -> None:
        script = str(Path(__file__).with_name("serving_vllm.py"))
        # -P: neither this folder nor this project's packages are in its path.
        command = [str(python), "-P", script, str(float_checkpoint(model)), str(threads), json.dumps(dict(settings))]
        self._peer = Peer(command, foreign_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, **pipes)
        atexit.register(self._peer.end)
        self.settings = str(self._read())
        self._peer.pause()

    def ask(self, **question: Any) -> dict[str, Any]:
        """Its answer to a question, as ``serving_vllm.py`` describes both. It runs only meanwhile."""
        with self._peer.running():
            print(json.dumps(question), file=self._peer.process.stdin, flush=True)
            answer: dict[str, Any] = self._read()
        return answer

    def end(self) -> None:
        """End its processes. They also end with this one."""
        self._peer.end()

    def _read(self) -> Any:
        assert self._peer.process.stdout is not None
        if not (line := self._peer.process.stdout.readline()):
            raise PeerEnded("vLLM ended")
        return json.loads(line)


class PeerEnded(Exception):
    """A program ended before it answered."""
