"""The CPU backend against CTranslate2 and llama.cpp: same weights, same prompts, same threads, one run.

    pip install ctranslate2 llama-cpp-python
    python bench/cpu.py MODEL.gguf [--draft DRAFT.gguf] [--data FILE ...] [--tokens 64] [--prompts 10] [--seed 0]
        [--repeats 1] [--threads 2] [--isa avx2] [--without-int8]
        [--parts load memory greedy beams batch prefill passes drafts] [--json FILE]

Every engine has its own process, which sleeps while others run. All take turns on every prompt, so that a drifting
machine favours none. Figures are medians over the prompts, with the worst and the best; the warm-up is left out. The
tables with drafts have each kind of prompt for itself, the others have all kinds. CTranslate2 quantizes the file's own
values to int8; llama.cpp runs the file as it is. If a peer is not installed or cannot run the model, a line says so.
--isa forces our kernels, and CTranslate2's and oneDNN's, to an instruction set. llama.cpp has the one it was built for.
"memory" is how fast all threads together read memory with NumPy.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from figures import Figures, add_json_option
from float_checkpoint import float_checkpoint
from isa import add_isa_option, for_ctranslate2, kernels, load
from llama_batch import LlamaBatch
from machine import describe
from prompts import CODING, PROSE, add_prompt_options, kinds

import specbeam
from specbeam.cache.slots import Slots
from specbeam.checkpoints import open_checkpoint
from specbeam.core.tree import NO_NODES, Tree
from specbeam.system.machine import reading_speeds

PARTS = ("load", "memory", "greedy", "beams", "batch", "prefill", "passes", "drafts")
SEARCHES: dict[str, dict[str, int]] = {"greedy": {}, "4 beams": {"num_beams": 4}}
Ask = dict[str, Any]
"""A task for an engine: token ids, the number of new tokens, and specbeam's options."""
BATCH = 8
PREFILLS = 3
PREFILL_TOKENS = (256, 512)
MEMORY_BYTES, MEMORY_READS = 2**28, 5
"""Far more than the caches hold, for each thread."""
REST_SECONDS = 0.3
"""Between two engines: the threads of a peer's OpenMP spin for 0.2 s after its work."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    add_prompt_options(parser)
    parser.add_argument("--threads", type=int, default=2)
    add_isa_option(parser)
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument("--without-int8", action="store_true", help="the file's int8 weights would not fit into memory")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    add_json_option(parser)
    given = parser.parse_args()
    print(describe(kernels(given.isa)))
    print(f"{given.model.stem}, {given.threads} threads, {given.tokens} new tokens, {given.prompts} prompts per kind\n")
    figures = Figures.of_this_run(kernels(given.isa))

    engines: dict[str, Engine] = {}
    for name, make in ENGINES.items():  # one loads after the other
        left_out = given.without_int8 if make is int8 else given.without_peers and make is not keep
        if not left_out:
            engine = Engine(make, given)
            if wrong := engine.started():
                print(f"{name}: {wrong}\n")
            else:
                engines[name] = engine
    figures.settings = {name: engine.ask({"settings": True}) for name, engine in engines.items()}
    print("\n".join(f"{name}: {settings}" for name, settings in figures.settings.items()), end="\n\n")
    ours = {name: engine for name, engine in engines.items() if name.startswith("specbeam")}
    if "load" in given.parts:
        print("| load | s, first or packed | later | resident, MB | weights, MB |\n| --- | --- | --- | --- | --- |")
        for name, engine in ours.items():
            loading = engine.ask({"loading": True})
            for what, unit, x in zip(
                ("load, first", "load", "resident", "weights"), ("s", "s", "MB", "MB"), loading, strict=True
            ):
                figures.add(given.model.stem, what, name, unit=unit, samples=[x])
            print(f"| {name} |", " | ".join(f"{x:.1f}" for x in loading), "|")
        print()

    if "memory" in given.parts:
        speeds = reading_speeds(given.threads, MEMORY_BYTES, MEMORY_READS)
        rates = figures.add("memory", "reading", "NumPy", unit="GB/s", samples=[speed / 1e9 for speed in speeds])
        print(f"memory, {given.threads} threads: {rates.value:.1f} GB/s ({rates.min:.1f} to {rates.max:.1f})\n")
    tokenizer = open_checkpoint(given.model).tokenizer
    by_kind = {kind: [ask.ids(tokenizer) for ask in asks] for kind, asks in kinds(given).items()}
    every = [ids for some in by_kind.values() for ids in some]
    if "greedy" in given.parts:
        table(figures, given, "greedy", rows(engines, new=given.tokens), every)
    if "beams" in given.parts:
        beams = {name: engine for name, engine in engines.items() if "llama" not in name}
        table(figures, given, "4 beams", rows(beams, new=given.tokens, num_beams=4), every)
    if "batch" in given.parts:
        batches = [every[i : i + BATCH] for i in range(0, len(every), BATCH)]
        others = {name: engine for name, engine in engines.items() if "CTranslate2" not in name}
        table(figures, given, f"{BATCH} greedy at once", rows(others, new=given.tokens), batches)
    if "prefill" in given.parts:
        long = tokenizer(" ".join([*CODING, *PROSE] * 4)).input_ids
        for n in PREFILL_TOKENS:
            table(figures, given, f"prefill of {n} tokens", rows(engines, new=1), [long[:n]] * PREFILLS)
    if "passes" in given.parts:
        sizes = (1, 2, 4, 8, 16, 28, 32, 64)
        print("| one pass, ms | " + " | ".join(f"M={n}" for n in sizes) + " |\n| ---" + " | ---" * len(sizes) + " |")
        for name, engine in ours.items():
            took = engine.ask({"passes": sizes, "repeats": 3 * given.repeats})
            for n, t in zip(sizes, took, strict=True):
                figures.add(given.model.stem, f"pass of {n} nodes", name, unit="ms", samples=[1e3 * t])
            print(f"| {name} |", " | ".join(f"{1e3 * t:.1f} ({t / took[0]:.2f})" for t in took), "|", flush=True)
        print()
    if given.draft and "drafts" in given.parts:
        for kind, some in by_kind.items():
            for title, options in SEARCHES.items():
                width, depth = (4, 3) if options else (1, 6)
                size = {"draft": "model", "draft_width": width, "num_draft_tokens": depth}
                asks: dict[str, Ask] = {"plain": options} | {
                    draft: {**options, "draft": draft} for draft in ("ngram", "suffix", "model")
                }
                asks[f"model, {width} x {depth}"] = {**options, **size}
                for engine_name, own in ours.items():
                    methods = {name: (own, {"new": given.tokens, **ask}) for name, ask in asks.items()}
                    table(figures, given, f"{engine_name}: {title} with drafts, {kind}", methods, some)
    figures.write(given.json)
    for engine in engines.values():
        engine.process.terminate()


def rows(engines: dict[str, Engine], **ask: Any) -> dict[str, tuple[Engine, Ask]]:
    return {name: (engine, ask) for name, engine in engines.items()}


class Engine:
    """An engine in its own process."""

    def __init__(self, make: Callable[[argparse.Namespace], Callable[[Ask], Any]], given: argparse.Namespace) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(make, given, theirs), daemon=True
        )
        self.process.start()
        theirs.close()

    def started(self) -> str:
        """Empty once it is ready, else the reason why it cannot run."""
        return str(self.pipe.recv())

    def ask(self, ask: Ask) -> Any:
        self.pipe.send(ask)
        return self.pipe.recv()


def serve(make: Callable[[argparse.Namespace], Callable[[Ask], Any]], given: argparse.Namespace, pipe: Any) -> None:
    try:
        run = make(given)
    except Exception as error:  # a peer that cannot run is a line of the output
        pipe.send(f"{type(error).__name__}: {str(error).splitlines()[0][:120]}")
        return
    pipe.send("")
    while True:
        pipe.send(run(pipe.recv()))


def keep(given: argparse.Namespace) -> Callable[[Ask], Any]:
    return ours("keep", given)


def int8(given: argparse.Namespace) -> Callable[[Ask], Any]:
    return ours("int8", given)


def ours(mode: str, given: argparse.Namespace) -> Callable[[Ask], Any]:
    seconds, resident = [], 0.0
    for _ in range(2):
        lm: Any = None
        gc.collect()
        before, start = psutil.Process().memory_info().rss, time.perf_counter()
        lm = load(given.model, given.isa, mode, given.threads)
        seconds.append(time.perf_counter() - start)
        specbeam.generate(lm, [1, 2, 3], max_new_tokens=2)
        resident = (psutil.Process().memory_info().rss - before) / 1e6
    size = sum(part.size for parts in lm.backend._weights.parts.values() for part in parts) / 1e6
    draft = None
    if given.draft:
        draft = load(given.draft, given.isa, "int4", given.threads)  # its tokens are verified

    def run(ask: Ask) -> Any:
        if "settings" in ask:
            return f"{specbeam.__version__}, {kernels(given.isa)}, {given.threads} threads"
        if "loading" in ask:
            return [*seconds, resident, size]
        if "passes" in ask:
            return passes(lm, **ask)
        options = {name: value for name, value in ask.items() if name not in ("ids", "new")}
        if options.get("draft") == "model":
            options["draft"] = draft
        new = ask["new"]
        if isinstance(ask["ids"][0], list):
            engine = specbeam.Engine(lm, max_requests=BATCH)
            options |= {"max_new_tokens": new, "min_new_tokens": new}
            requests = [engine.submit(ids, options) for ids in ask["ids"]]
            engine.run()
            return sum(request.result().stats.new_tokens for request in requests)
        return specbeam.generate(lm, ask["ids"], max_new_tokens=new, min_new_tokens=new, **options).stats.new_tokens

    return run


def table(
    figures: Figures,
    given: argparse.Namespace,
    title: str,
    methods: dict[str, tuple[Engine, Ask]],
    prompts: Sequence[Any],
) -> None:
    """Print the tokens per second of each method. The prompt's tokens count if only one token is new.

    Args:
        prompts: the token ids of one, or of several that are asked at once.
    """
    rates: dict[str, list[float]] = {name: [] for name in methods}
    for i, ids in enumerate(prompts[:1] + prompts * given.repeats):
        for name, (engine, ask) in methods.items():
            time.sleep(REST_SECONDS)
            start = time.perf_counter()
            came = engine.ask({**ask, "ids": ids}) + (len(ids) - 1 if ask["new"] == 1 else 0)
            if i > 0:  # the first one warms up
                rates[name].append(came / (time.perf_counter() - start))
    first = next(iter(rates))
    print(f"| {title} | tokens/s (min to max) | times {first} (min to max) |\n| --- | --- | --- |")
    for name, values in rates.items():
        ratios = [a / b for a, b in zip(values, rates[first], strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rate = figures.add(given.model.stem, title, name, unit="tokens/s", samples=values)
        print(f"| {name} | {rate.value:.1f} ({rate.min:.1f} to {rate.max:.1f}) | {spread} |", flush=True)
    print()


def passes(lm: Any, passes: list[int], repeats: int) -> list[float]:
    """The seconds of a pass over each number of nodes, below a sequence of 128 tokens."""
    tree = Tree([*range(10, 138)])
    slots = Slots(tree, lm.backend)
    prompt = slots.missing([tree.tip])
    lm.backend.forward([slots.tree_batch(prompt, np.array([len(prompt) - 1]))])
    slots.evaluated(NO_NODES)
    nodes = tree.add([tree.tip] * max(passes), [*range(max(passes))])
    segments = [slots.tree_batch(slots.missing(nodes[:n]), np.arange(n)) for n in passes]
    lm.backend.forward([segments[-1]])
    slots.evaluated(NO_NODES)
    taken: list[list[float]] = [[] for _ in passes]
    for _ in range(5 * repeats):
        for segment, times in zip(segments, taken, strict=True):
            start = time.perf_counter()
            lm.backend.forward([segment])
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in taken]


def ctranslate2(given: argparse.Namespace) -> Callable[[Ask], Any]:
    """CTranslate2 on the file's values, which it quantizes to int8."""
    os.environ["CT2_VERBOSE"] = "1"  # it then reports its instruction set, on standard error when it is first used
    if given.isa:
        os.environ.update(for_ctranslate2(given.isa))
    import ctranslate2 as peer

    path = given.model
    where = Path(tempfile.gettempdir()) / f"specbeam-bench-{path.stem}"
    if not (where / "int8/model.bin").is_file():
        converter = peer.converters.TransformersConverter(str(float_checkpoint(path)), low_cpu_mem_usage=True)
        converter.convert(str(where / "int8"), quantization="int8", force=True)
    with standard_error() as printed:
        generator = peer.Generator(str(where / "int8"), device="cpu", compute_type="int8", intra_threads=given.threads)
    chosen = [line.split(" - ")[-1] for line in printed if "Selected ISA" in line or "GEMM_S8 backend" in line]
    if given.isa:
        chosen.append(f"oneDNN at most {os.environ['ONEDNN_MAX_CPU_ISA']}")
    tokens = open_checkpoint(path).tokenizer.convert_ids_to_tokens

    def run(ask: Ask) -> Any:
        if "settings" in ask:
            return ", ".join([peer.__version__, *chosen, "compute type int8", f"{given.threads} threads"])
        new, beams = ask["new"], ask.get("num_beams", 1)
        (result,) = generator.generate_batch(
            [tokens(ask["ids"])], max_length=new, min_length=new, beam_size=beams, include_prompt_in_result=False
        )
        return len(result.sequences_ids[0])

    return run


@contextmanager
def standard_error() -> Iterator[list[str]]:
    """The lines that native code prints on standard error in the meantime."""
    lines: list[str] = []
    before = os.dup(2)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            lines += file.read().splitlines()


def llama_cpp(given: argparse.Namespace) -> Callable[[Ask], Any]:
    """llama.cpp on the file."""
    import llama_cpp as peer
    from llama_cpp import Llama

    model = Llama(str(given.model), n_ctx=1024, n_threads=given.threads, n_threads_batch=given.threads, verbose=False)
    batch = LlamaBatch(model, BATCH, 1024, unified=True)

    def run(ask: Ask) -> Any:
        if "settings" in ask:
            build = peer.llama_print_system_info().decode().strip()
            return f"llama-cpp-python {peer.__version__}, {build}, {given.threads} threads"
        if isinstance(ask["ids"][0], list):
            samplers = [model._init_sampler(temp=0.0) for _ in ask["ids"]]
            return sum(map(len, batch.texts(ask["ids"], samplers, ask["new"])))
        model.reset()
        model.eval(ask["ids"])
        for _ in range(ask["new"] - 1):
            model.eval([int(model.sample(temp=0.0))])
        return int(ask["new"])

    return run


ENGINES = {
    "CTranslate2, int8": ctranslate2,
    "llama.cpp, the file": llama_cpp,
    "specbeam, keep": keep,
    "specbeam, int8": int8,
}


if __name__ == "__main__":
    main()
