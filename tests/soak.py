"""A soak: random requests of every kind, with cancels, interrupts and failing passes, for as long as one likes.

    python -m tests.soak [--minutes 20] [--seed 0] [--patience 120] [--without interrupts failures cancels]

A toy model with random weights runs on the cpu backend. Two engines share it, with new limits in each round. One runs
on the main thread and gets real SIGINTs. The other runs on a second thread, and passes there raise KeyboardInterrupt.
Eight threads submit requests to both, and cancel some. Some passes raise RuntimeError or MemoryError, before or after
their work. It checks, and exits with 1 if one of these does not hold:

- no request takes longer than ``--patience`` seconds (if one does, the stacks of all threads are printed);
- a text that finished has the bits of the same request alone: every sequence, score and streamed piece;
- a request fails only by a pass that was made to fail, which ends at most one request. No interrupt ends one;
- after the first minute, memory grows by less than MAX_GROWTH_MB.

A seed gives the same requests. The order of events still depends on the scheduler of the machine.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import faulthandler
import gc
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import transformers

import specbeam
from bench.machine import describe
from bench.toy import load_toy
from specbeam import Engine, LanguageModel, SpecbeamError
from specbeam.engine.request import Request

FAULTS = ("interrupts", "failures", "cancels")
SUBMITTERS = 8
MOST_OUTSTANDING = 3
"""Requests that a submitter has at once."""
CASES = 240
"""Different requests."""
ROUND_SECONDS = 10.0
CONTEXT = 320
CANCEL_SHARE = 0.1
PASS_FAILURE_SHARE = 0.004
SECONDS_BETWEEN_INTERRUPTS = 0.25
WARM_UP_SECONDS = 60.0
"""Memory is measured from then on."""
MAX_GROWTH_MB = 48.0
INJECTED = "injected by the soak"


@dataclass(frozen=True)
class Case:
    """A request, and the outcome it has alone.

    Attributes:
        draft: the name of a draft in ``Models.drafts``, or None.
    """

    number: int
    prompt: list[int]
    options: dict[str, Any]
    draft: str | None
    expected: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Models:
    lm: LanguageModel
    drafts: dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=120.0, metavar="SECONDS", help="for one request")
    parser.add_argument("--without", nargs="+", choices=FAULTS, default=(), help="to find the fault that matters")
    given = parser.parse_args()
    faulthandler.enable()
    print(describe(f"seed {given.seed}"), flush=True)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        models = make_models(Path(folder))
    cases = make_cases(models, given.seed)
    print(f"{len(cases)} different requests, each run alone first", flush=True)
    soak = Soak(models, cases, given.seed, given.patience, {*FAULTS} - {*given.without})
    soak.run(60 * given.minutes)
    return soak.report()


# Models and requests.


def make_models(folder: Path) -> Models:
    """A target, a draft with its vocabulary, and a draft with another vocabulary."""
    lm = load_toy(folder / "target", context=CONTEXT)
    sibling = load_toy(folder / "sibling", context=CONTEXT, layers=1)
    foreign = load_toy(folder / "foreign", context=CONTEXT, seed=1, layers=1, hidden=32, shuffled=True)
    corpus = specbeam.suffix_automaton(lm, ["a text of other days, and of other days again"])
    drafts = {"ngram": "ngram", "suffix": "suffix", "corpus": corpus, "itself": lm}
    return Models(lm, drafts | {"sibling": sibling, "foreign": foreign})


def make_cases(models: Models, seed: int) -> list[Case]:
    """Random requests of every kind, with their outcomes alone."""
    draw = random.Random(seed)
    made: list[Case] = []
    while len(made) < CASES:
        case = _random_case(models, draw, made)
        # The plain search is the reference for drafts, except where a seed gives another text with drafts.
        samples = "temperature" in case.options
        plain = case if samples else replace(case, draft=None, options=_without_draft_sizes(case.options))
        engine = Engine(models.lm)
        try:
            request = submit(engine, models, plain)
        except SpecbeamError:  # options that do not go together
            continue
        engine.run()
        made.append(replace(case, expected=outcome(request)))
    return made


def _random_case(models: Models, draw: random.Random, made: list[Case]) -> Case:
    length = draw.choice((1, 3, 10, 30, 100, 250))
    period = draw.choice((3, 7, 1000))  # repetition makes lookups succeed
    tokens = [draw.randrange(256) for _ in range(min(period, length))]
    prompt = (tokens * length)[:length]
    if made and draw.random() < 0.5:  # cached prefixes are for prompts that begin alike
        earlier = draw.choice(made).prompt
        prompt = (earlier[: draw.choice((5, 20, len(earlier)))] + prompt)[:250]
    options: dict[str, Any] = {"max_new_tokens": draw.choice((1, 5, 20, 50))}
    if draw.random() < 0.2:
        options["min_new_tokens"] = draw.randrange(options["max_new_tokens"] + 1)
    if draw.random() < 0.3:
        options["eos_token_id"] = draw.sample(range(258), 8)
    if draw.random() < 0.2:
        options["repetition_penalty"] = draw.choice((1.1, 1.5))
    if draw.random() < 0.3:
        options["stop_strings"] = [chr(draw.randrange(32, 127)), "and", "é"]
    kind = draw.choice(("greedy", "greedy", "sample", "sample", "beams", "beams", "diverse", "beam sampling"))
    if "sampl" in kind:
        options |= {"seed": draw.randrange(1000), "temperature": draw.choice((0.7, 1.0, 3.0))}
        options |= draw.choice(({}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.1}))
    if kind in ("beams", "diverse", "beam sampling"):
        beams = draw.choice((2, 4, 8))
        options |= {"num_beams": beams, "num_return_sequences": draw.choice((1, 2, beams))}
        options |= {
            "length_penalty": draw.choice((0.0, 1.0, 2.0)),
            "early_stopping": draw.choice((True, False, "never")),
        }
    if kind == "diverse":
        options |= {"num_beam_groups": 2, "diversity_penalty": 0.5}
    limit = draw.choice(("", "", "", "", "trie", "prefix", "processor"))
    if limit == "trie":
        outputs = [[draw.randrange(256) for _ in range(draw.randrange(1, 6))] for _ in range(30)]
        options["constraint"] = specbeam.TokenTrie(outputs)
    if limit == "prefix":
        allowed = draw.sample(range(258), 40)
        options["prefix_allowed_tokens_fn"] = lambda _, ids: allowed if len(ids) % 2 else [*range(258)]
    if limit == "processor":
        token = draw.randrange(256)
        options["logits_processor"] = specbeam.tensors(
            lambda ids, scores: scores.index_fill(1, torch.tensor([token]), -1.0)
        )
    draft = draw.choice((None, None, *models.drafts))
    if draft is not None and draw.random() < 0.4:
        options |= {"num_draft_tokens": draw.choice((1, 3, 8)), "draft_width": draw.choice((1, 2, 4))}
    if draft is not None and draw.random() < 0.2:
        options["trace"] = True
    return Case(len(made), prompt, options, draft)


def _without_draft_sizes(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if not name.startswith(("num_draft", "draft", "trace"))}


def submit(engine: Engine, models: Models, case: Case) -> Request:
    draft = None if case.draft is None else models.drafts[case.draft]
    return engine.submit(case.prompt, case.options, draft=draft)


def outcome(request: Request) -> tuple[Any, ...]:
    """All that has to be the same bits: the sequences, or the message of an error."""
    try:
        result = request.result()
    except SpecbeamError as error:
        return ("error", str(error))
    return tuple((s.text, tuple(s.token_ids), s.score.hex(), s.finish_reason) for s in result.sequences)


# Faults.


class FailingPasses:
    """Lets passes of a backend fail now and then, and its caches run out of memory.

    Attributes:
        count: the failures so far.
        share: of the passes that fail.
    """

    def __init__(self, backend: Any, seed: int) -> None:
        self.count = self.passes = 0
        self.share = 0.0
        self._draw = random.Random(seed)
        forward, forward_ahead, reserve = backend.forward, backend.forward_ahead, backend.reserve

        def failing_forward(segments: Any) -> Any:
            self._begin()
            before, after = (self._draw.random() < self.share / 2 for _ in range(2))
            if before:
                self._fail()
            logits = forward(segments)
            if after:
                self._fail()
            return logits

        def failing_forward_ahead(*arguments: Any) -> Any:
            self._begin()
            if self._draw.random() < self.share:
                self._fail()
            return forward_ahead(*arguments)

        def failing_reserve(slots: int) -> None:
            if self._draw.random() < self.share:
                self._fail()
            reserve(slots)

        backend.forward, backend.reserve = failing_forward, failing_reserve
        backend.forward_ahead = failing_forward_ahead

    def _begin(self) -> None:
        self.passes += 1
        if (thread := threading.get_ident()) in interrupted:
            interrupted.remove(thread)
            raise KeyboardInterrupt

    def _fail(self) -> None:
        self.count += 1
        raise self._draw.choice((RuntimeError, MemoryError, torch.OutOfMemoryError))(INJECTED)


class Interruptible:
    """A place where one KeyboardInterrupt may arrive at a time: ``run`` catches it.

    Args:
        interrupt: sends a KeyboardInterrupt to the thread with this id.

    Attributes:
        count: the interrupts so far.
    """

    def __init__(self, interrupt: Callable[[int], None]) -> None:
        self.count = 0
        self._interrupt = interrupt
        self._lock = threading.Lock()
        self._thread: int | None = None

    def run(self, work: Callable[[], None]) -> None:
        """Call a function, which may be interrupted at most once."""
        try:
            self._thread = threading.get_ident()
            work()
            with self._lock:
                self._thread = None
            for _ in range(100):  # an interrupt that was sent arrives here
                pass
        except KeyboardInterrupt:
            pass

    def send(self) -> None:
        """Interrupt the thread, if it is at work."""
        with self._lock:
            if self._thread is not None:
                thread, self._thread = self._thread, None
                self.count += 1
                self._interrupt(thread)


interrupted: set[int] = set()
"""Threads whose next pass raises KeyboardInterrupt."""


def press_ctrl_c(thread: int) -> None:
    """Send the signal of Ctrl-C to the main thread."""
    signal.pthread_kill(thread, signal.SIGINT)


def held_mb() -> float:
    """Resident memory in MB, after free memory went back to the system."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc
        libc.malloc_trim(0)
    return psutil.Process().memory_info().rss / 1e6


# The soak.


class Soak:
    """Rounds of requests, until the time is up or something is wrong."""

    def __init__(self, models: Models, cases: list[Case], seed: int, patience: float, faults: set[str]) -> None:
        self.faults = faults
        self.models = models
        self.cases = cases
        self.seed = seed
        self.patience = patience
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.memory: list[tuple[float, float]] = []  # seconds, MB
        self.outstanding: dict[Request, tuple[Case, float]] = {}
        self.slowest = 0.0  # seconds of a request
        backends = {id(lm.backend): lm.backend for lm in (models.lm, *models.drafts.values()) if hasattr(lm, "backend")}
        self.failing = [FailingPasses(backend, seed) for backend in backends.values()]
        self.places = [Interruptible(press_ctrl_c), Interruptible(interrupted.add)]
        self.lock = threading.Lock()

    def run(self, seconds: float) -> None:
        begin = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()
        number = 0
        while time.monotonic() - begin < seconds and not self.wrong:
            self._round(number, min(ROUND_SECONDS, seconds))
            number += 1
            now, held = time.monotonic() - begin, held_mb()
            self.memory.append((now, held))
            counts = ", ".join(f"{name} {count:,}" for name, count in sorted(self.counts.items()))
            print(f"{now:6.0f} s: {held:.0f} MB, slowest request {self.slowest:.1f} s, {counts}", flush=True)

    def _round(self, number: int, seconds: float) -> None:
        """Two engines with new limits, eight submitters, and an interrupter."""
        draw = random.Random(f"{self.seed} {number}")
        engines = [Engine(self.models.lm, **_random_limits(draw)) for _ in self.places]
        for failing in self.failing:
            failing.share = PASS_FAILURE_SHARE if "failures" in self.faults and number % 3 else 0.0
        full, drained = threading.Event(), threading.Event()  # no more requests come; all of them are done
        submitters = [
            threading.Thread(target=self._submit, args=(engines, full, random.Random(f"{self.seed} {number} {i}")))
            for i in range(SUBMITTERS)
        ]
        second = threading.Thread(target=self._serve, args=(engines[1], self.places[1], drained))
        rest = threading.Thread(
            target=self._conduct,
            args=(seconds, full, submitters, drained, "interrupts" in self.faults and number % 4 > 0, draw),
        )
        for thread in (*submitters, second, rest):
            thread.start()
        self._serve(engines[0], self.places[0], drained)
        for thread in (*submitters, second, rest):
            thread.join()
        self.counts["interrupts"] = sum(place.count for place in self.places)
        self.counts["failed passes"] = sum(failing.count for failing in self.failing)
        self.counts["passes"] = sum(failing.passes for failing in self.failing)
        if (ended := self.counts["ended by failed passes"]) > self.counts["failed passes"]:
            self._report(f"{ended} requests ended by {self.counts['failed passes']} failed passes")
        for engine in engines:
            if engine.cache_tokens:
                self._report(f"an engine without requests holds {engine.cache_tokens} cache slots")

    def _conduct(
        self,
        seconds: float,
        full: threading.Event,
        submitters: list[threading.Thread],
        drained: threading.Event,
        interrupting: bool,
        draw: random.Random,
    ) -> None:
        """Interrupt now and then, end the round, and wait until its requests are done."""
        end = time.monotonic() + seconds
        while any(submitter.is_alive() for submitter in submitters):
            time.sleep(draw.expovariate(1 / SECONDS_BETWEEN_INTERRUPTS))
            if time.monotonic() > end:
                full.set()
            elif interrupting:
                draw.choice(self.places).send()
        drained.set()

    def _serve(self, engine: Engine, place: Interruptible, drained: threading.Event) -> None:
        """Run an engine until the round is over."""

        def work() -> None:
            engine.run()
            time.sleep(0.001)

        while not drained.is_set():
            try:
                place.run(work)
            except Exception:
                self._report(f"the engine raised an error:\n{traceback.format_exc()}")

    def _submit(self, engines: list[Engine], full: threading.Event, draw: random.Random) -> None:
        """Submit requests, cancel some, and check the finished requests."""
        mine: dict[Request, tuple[Case, bool]] = {}
        while (mine or not full.is_set()) and not self.wrong:
            while len(mine) < MOST_OUTSTANDING and not full.is_set():
                case = draw.choice(self.cases)
                try:
                    request = submit(draw.choice(engines), self.models, case)
                except SpecbeamError:  # it needs more than max_cache_tokens
                    self._count("too large")
                    continue
                mine[request] = case, draw.random() < CANCEL_SHARE and "cancels" in self.faults
                self.outstanding[request] = case, time.monotonic()
            for request, (case, cancel) in list(mine.items()):
                if request.done:
                    del mine[request]
                    self._check(request, case)
                elif cancel and draw.random() < 0.02:
                    request.cancel()
            time.sleep(0.002)

    def _check(self, request: Request, case: Case) -> None:
        """Compare a request that is done with the same request alone."""
        _, begin = self.outstanding.pop(request)
        self.slowest = max(self.slowest, time.monotonic() - begin)
        try:
            found = outcome(request)
        except BaseException as error:
            if INJECTED in str(error):
                self._count("ended by failed passes")
            else:
                self._report(f"{_describe(case)} raised {error!r}:\n{''.join(traceback.format_exception(error))}")
            return
        if found[0] == "error" and found != case.expected:
            if "out of memory" in found[1]:
                self._count("ended by failed passes")
            else:
                self._report(f"{_describe(case)} failed: {found[1]}")
        elif found[0] != "error" and found[0][3] == "cancelled":
            self._count("cancelled")
            tokens = found[0][1]
            one_text = case.options.get("num_beams", 1) == 1 and case.expected[0] != "error"
            if one_text and case.expected[0][1][: len(tokens)] != tokens:
                self._report(f"{_describe(case)} was cancelled at {tokens}, and alone it is {case.expected}")
        elif found != case.expected:
            self._report(f"{_describe(case)} gave\n    {found}\nand alone it gives\n    {case.expected}")
        else:
            self._count("finished")
            streamed = "".join(piece.text for piece in request.pieces)
            if found[0] != "error" and streamed != found[0][0]:
                self._report(f"{_describe(case)} streamed {streamed!r}, and its text is {found[0][0]!r}")

    def _count(self, name: str) -> None:
        with self.lock:
            self.counts[name] += 1

    def _report(self, line: str) -> None:
        with self.lock:
            self.wrong.append(line)
        print(f"WRONG: {line}", file=sys.stderr, flush=True)

    def _watch(self) -> None:
        """End the process if a request takes too long."""
        while True:
            time.sleep(1)
            now = time.monotonic()
            late = [
                (case, now - begin) for case, begin in list(self.outstanding.values()) if now - begin > self.patience
            ]
            if late:
                for case, waited in late:
                    print(f"WEDGED: {_describe(case)} has waited for {waited:.0f} s", file=sys.stderr)
                print(
                    f"{len(self.outstanding)} requests are not done. {dict(self.counts)}", file=sys.stderr, flush=True
                )
                faulthandler.dump_traceback(all_threads=True)
                os._exit(1)

    def report(self) -> int:
        """Print the summary. Returns the exit status."""
        print(json.dumps(dict(self.counts)))
        after = [(at, held) for at, held in self.memory if at > WARM_UP_SECONDS]
        if len(after) > 3:
            times, held = np.array(after).T
            slope = float(np.polyfit(times, held, 1)[0])
            grown = slope * (times[-1] - times[0])
            print(f"memory after the first minute: {held[0]:.0f} to {held[-1]:.0f} MB, {60 * slope:+.2f} MB/minute")
            if grown > MAX_GROWTH_MB:
                self.wrong.append(f"memory grew by {grown:.0f} MB")
        print(
            *(self.wrong or ["nothing wedged, memory flat, and every finished text equal to the text alone"]), sep="\n"
        )
        return int(bool(self.wrong))


def _random_limits(draw: random.Random) -> dict[str, Any]:
    return {
        "max_requests": draw.choice((1, 2, 3, 8, 16)),
        "max_batch_tokens": draw.choice((1, 4, 8, 32, 512)),
        "max_cache_tokens": draw.choice((350, 700, 4000, None)),
        "max_pass_seconds": draw.choice((0.0, 0.02, None)),
    }


def _describe(case: Case) -> str:
    return f"request {case.number} ({len(case.prompt)} tokens, draft {case.draft}, {case.options})"


if __name__ == "__main__":
    sys.exit(main())
