"""The CPU backend against CTranslate2 and llama.cpp: same weights, same prompts, same threads, one run.

    pip install ctranslate2 llama-cpp-python
    python bench/cpu.py MODEL.gguf [--draft DRAFT.gguf] [--tokens 64] [--repeats 3] [--threads 2]

Every method takes its turn in each repeat, so that a drifting machine favours none; figures are medians after a warm-up
that is left out. CTranslate2 quantizes the file's own values to int8; llama.cpp runs the file as it is. A peer that is
not installed, or cannot run the model, is a line that says so.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from machine import describe
from prompts import CODING, PROSE

import specbeam
from specbeam.backends.cpu.library import library
from specbeam.prompts import encode
from specbeam.slots import Slots
from specbeam.tree import Tree

Run = Callable[[list[int]], int]
"""Generates from token ids; returns how many tokens came."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=2, help="of each kind")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--without-peers", action="store_true")
    given = parser.parse_args()
    print(describe(f"kernels {library().specbeam_isa(b'').decode()}"))
    print(f"{given.model.stem}, {given.threads} threads, {given.tokens} new tokens, {given.prompts} prompts a kind\n")

    modes = loads(given)
    own = modes["keep"]
    prompts = [encode(own, text) for text in (*CODING[: given.prompts], *PROSE[: given.prompts])]
    peers = {} if given.without_peers else {"CTranslate2, int8": ctranslate2, "llama.cpp, the file": llama_cpp}
    others: dict[str, Any] = {}
    for name, make in peers.items():
        try:
            others[name] = make(given.model, given.threads)
        except Exception as error:  # whatever keeps it from running is what the table should say
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}\n")

    greedy: dict[str, Run] = {name: asked(peer, given.tokens) for name, peer in others.items()}
    greedy |= {f"specbeam, {mode}": plain(lm, given.tokens) for mode, lm in modes.items()}
    table("greedy", greedy, prompts, given.repeats)

    beams: dict[str, Run] = {n: asked(peer, given.tokens, 4) for n, peer in others.items() if "CT" in n}
    beams |= {f"specbeam, {mode}": plain(lm, given.tokens, num_beams=4) for mode, lm in modes.items()}
    table("4 beams", beams, prompts, given.repeats)

    long = encode(own, " ".join([*CODING, *PROSE] * 4))[:512]
    reading = {name: reads(asked(peer, 1)) for name, peer in others.items()}
    reading |= {f"specbeam, {mode}": reads(plain(lm, 1)) for mode, lm in modes.items()}
    table(f"prefill of {len(long)} tokens", reading, [long], given.repeats)
    passes(modes, given.repeats)

    if given.draft:
        draft = specbeam.load(given.draft, backend="cpu", quantize="keep", threads=given.threads)
        coding, prose = prompts[: given.prompts], prompts[given.prompts :]
        for kind, some in (("coding", coding), ("prose", prose)):
            methods = {"plain": plain(own, given.tokens)}
            methods |= {name: plain(own, given.tokens, draft=d) for name, d in drafts(draft).items()}
            table(f"greedy with drafts, {kind}", methods, some, given.repeats)
            methods = {"plain": plain(own, given.tokens, num_beams=4)}
            methods |= {name: plain(own, given.tokens, num_beams=4, draft=d) for name, d in drafts(draft).items()}
            for width, depth in ((4, 3), (6, 3), (8, 3), (8, 5)):
                sizes = {"draft_width": width, "num_draft_tokens": depth}
                methods[f"draft model, {width} x {depth}"] = plain(own, given.tokens, num_beams=4, draft=draft, **sizes)
            table(f"4 beams with drafts, {kind}", methods, some, given.repeats)


def drafts(model: Any) -> dict[str, Any]:
    return {"n-gram": "ngram", "suffix": "suffix", "draft model": model}


def loads(given: argparse.Namespace) -> dict[str, Any]:
    """The model as its file has it and in int8; what loading them took, and the memory."""
    print("| load | seconds, first or packed | later | resident, MB | weights, MB |\n| --- | --- | --- | --- | --- |")
    modes = {}
    for mode in ("keep", "int8"):
        seconds = []
        for _ in range(2):
            lm = None
            gc.collect()
            before, start = psutil.Process().memory_info().rss, time.perf_counter()
            lm = specbeam.load(given.model, backend="cpu", quantize=mode, threads=given.threads)
            seconds.append(time.perf_counter() - start)
            specbeam.generate(lm, [1, 2, 3], max_new_tokens=2)
        resident = (psutil.Process().memory_info().rss - before) / 1e6
        size = sum(part.size for parts in lm.backend._weights.parts.values() for part in parts) / 1e6  # type: ignore
        print(f"| {mode} | {seconds[0]:.1f} | {seconds[1]:.1f} | {resident:.0f} | {size:.0f} |")
        modes[mode] = lm
    print()
    return modes


def plain(lm: Any, tokens: int, **options: Any) -> Run:
    def run(ids: list[int]) -> int:
        result = specbeam.generate(lm, ids, max_new_tokens=tokens, min_new_tokens=tokens, **options)
        return result.stats.new_tokens

    return run


def asked(peer: Callable[[list[int], int, int], int], tokens: int, num_beams: int = 1) -> Run:
    return lambda ids: peer(ids, tokens, num_beams)


def reads(one: Run) -> Run:
    """Counts the tokens of the prompt too, of what reads it and generates one."""
    return lambda ids: one(ids) + len(ids) - 1


def table(title: str, methods: dict[str, Run], prompts: list[list[int]], repeats: int) -> None:
    rates: dict[str, list[float]] = {name: [] for name in methods}
    for repeat in range(-1, repeats):
        for name, run in methods.items():
            taken = came = 0.0
            for ids in prompts:
                start = time.perf_counter()
                came += run(ids)
                taken += time.perf_counter() - start
            if repeat >= 0:
                rates[name].append(came / taken)
    first = next(iter(rates))
    print(f"| {title} | tokens/s | times {first} (min to max) |\n| --- | --- | --- |")
    for name, values in rates.items():
        ratios = [a / b for a, b in zip(values, rates[first], strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {name} | {statistics.median(values):.1f} | {spread} |", flush=True)
    print()


def passes(modes: dict[str, Any], repeats: int) -> None:
    """What a pass over some nodes below a text of 128 tokens takes, against one of one node."""
    sizes = (1, 2, 4, 8, 16, 28, 32, 64)
    print("| one pass, ms | " + " | ".join(f"M={n}" for n in sizes) + " |\n| ---" * 1 + " | ---" * len(sizes) + " |")
    for mode, lm in modes.items():
        tree = Tree([*range(10, 138)])
        slots = Slots(tree, lm.backend, 256)
        text = slots.missing([tree.tip])
        lm.backend.forward([slots.segment(text, np.array([len(text) - 1]))])
        nodes = tree.add([tree.tip] * max(sizes), [*range(max(sizes))])
        segments = {n: slots.segment(slots.missing(nodes[:n]), np.arange(n)) for n in sizes}
        taken: dict[int, list[float]] = {n: [] for n in sizes}
        for _ in range(5 * repeats):
            for n, segment in segments.items():
                start = time.perf_counter()
                lm.backend.forward([segment])
                taken[n].append(time.perf_counter() - start)
        best = {n: statistics.median(times) for n, times in taken.items()}
        cells = " | ".join(f"{1e3 * best[n]:.1f} ({best[n] / best[1]:.2f})" for n in sizes)
        print(f"| {mode} | {cells} |", flush=True)
    print()


def ctranslate2(path: Path, threads: int) -> Callable[[list[int], int, int], int]:
    """CTranslate2 on the file's values, which it quantizes to int8."""
    import ctranslate2 as peer
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = Path(tempfile.gettempdir()) / f"specbeam-bench-{path.stem}"
    if not (where / "int8/model.bin").is_file():
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
        model.save_pretrained(where / "folder")
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(where / "folder")
        converter = peer.converters.TransformersConverter(str(where / "folder"), low_cpu_mem_usage=True)
        converter.convert(str(where / "int8"), quantization="int8", force=True)
    generator = peer.Generator(str(where / "int8"), device="cpu", compute_type="int8", intra_threads=threads)
    tokens = specbeam.load(path, backend="cpu", quantize="keep").tokenizer.convert_ids_to_tokens

    def run(ids: list[int], new: int, beams: int) -> int:
        (result,) = generator.generate_batch(
            [tokens(ids)], max_length=new, min_length=new, beam_size=beams, include_prompt_in_result=False
        )
        return len(result.sequences_ids[0])

    return run


def llama_cpp(path: Path, threads: int) -> Callable[[list[int], int, int], int]:
    """llama.cpp on the file."""
    from llama_cpp import Llama

    model = Llama(str(path), n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False)

    def run(ids: list[int], new: int, _: int) -> int:
        model.reset()
        model.eval(ids)
        for _ in range(new - 1):
            model.eval([int(model.sample(temp=0.0))])
        return new

    return run


if __name__ == "__main__":
    main()
