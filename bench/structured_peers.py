"""JSON by a schema: specbeam beside llama.cpp's grammars and vLLM's guidance.

    python bench/structured_peers.py MODEL.gguf SCHEMAS.jsonl.gz [--schemas 30] [--seed 0] [--tokens 96]
        [--vllm-python VENV/bin/python] [--json FILE]

All engines write greedily on the same prompts, and take turns on each schema: with the schema, and freely with as many
tokens. "Of free" is the time per token over that of the free text. "Of specbeam" compares the constrained times per
token. Texts that came to their end are read and validated by jsonschema. "Refused" are schemas that an engine answers
with an error; llama-cpp-python has a converter of its own for schemas. The schemas are drawn among what specbeam takes
(docs/guides/constrain.md counts the others). vLLM runs on the same values in bfloat16, in an environment of its own. In
the last rows up to 32 requests run at once, each with a schema of its own that nobody refused. "Beside" is the time of
8 plain requests beside one with a schema, over their time beside a ninth plain one.
"""

from __future__ import annotations

import argparse
import atexit
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

import jsonschema
from figures import Figures, add_json_option
from float_checkpoint import float_checkpoint
from machine import describe
from peers import Peer, foreign_environment
from structured import drawn
from table import Table

import specbeam
from specbeam import Engine, JsonSchema, SpecbeamError

AT_ONCE, PLAIN, RUNS = 32, 8, 5
Texts = tuple[list[list[int]], float]
"""The tokens of each prompt, and the seconds."""


class Refused(Exception):
    """An engine does not take a schema."""


@dataclass
class Case:
    """A schema, its prompt as token ids, and how a text without it is bounded."""

    schema: dict[str, Any]
    prompt: list[int]
    tokens: int


@dataclass
class Writer:
    """An engine: texts of prompts, with a schema each or freely, or an error where a schema is refused."""

    name: str
    write: Callable[[Sequence[Case], bool], Texts]
    most: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("schemas_file", type=Path, metavar="SCHEMAS")
    parser.add_argument("--schemas", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vllm-python", type=Path, metavar="PYTHON")
    add_json_option(parser)
    given = parser.parse_args()
    lm = specbeam.load(given.model, threads=given.threads)
    writers = [specbeam_writer(lm), llama_writer(given.model, given.threads)]
    if given.vllm_python is not None:
        writers.append(vllm_writer(given.model, given.threads, given.vllm_python))
    names = [writer.name for writer in writers]
    print(describe(*names[1:]))
    figures = Figures.of_this_run(*names[1:])
    table = Table(figures, given.model.stem)
    table.head()
    cases = [*taken(lm, given.schemas_file, max(given.schemas, AT_ONCE), given.seed, given.tokens)]
    ends = lm.eos_token_ids
    for writer in writers:
        writer.write(cases[:1], False)  # it warms up
    per_token: dict[str, list[float]] = {name: [] for name in names}
    of_free: dict[str, list[float]] = {name: [] for name in names}
    ratios: dict[str, list[float]] = {name: [] for name in names}
    counts = {name: dict.fromkeys(("refused", "ended", "invalid"), 0) for name in names}
    refused: list[Case] = []
    for case in cases[: given.schemas]:
        own = 0.0
        for writer in writers:
            try:
                (text,), seconds = writer.write([case], True)
            except Refused:
                counts[writer.name]["refused"] += 1
                if writer.most >= AT_ONCE:
                    refused.append(case)
                continue
            (free,), free_seconds = writer.write([Case(case.schema, case.prompt, len(text))], False)
            each = seconds / len(text)
            own = own or each
            per_token[writer.name].append(1e3 * each)
            of_free[writer.name].append(each / (free_seconds / len(free)))
            ratios[writer.name].append(each / own)
            if text[-1] in ends:
                counts[writer.name]["ended"] += 1
                counts[writer.name]["invalid"] += not valid(lm.tokenizer.decode(text[:-1]), case.schema)
    for name in names:
        table.row(name, "a constrained token", unit="ms", samples=per_token[name])
        table.row(name, "of free", unit="times", samples=of_free[name])
        if name != names[0]:
            table.row(name, "of specbeam", unit="times", samples=ratios[name])
        print(f"| {name} | {counts[name]} of {given.schemas} | |", flush=True)
        for what, count in counts[name].items():
            figures.add(given.model.stem, name, what, unit="schemas", samples=[count])
    together = [case for case in cases[: given.schemas] if case not in refused][:AT_ONCE]
    rates: dict[str, list[float]] = {writer.name: [] for writer in writers if writer.most >= AT_ONCE}
    for _ in range(RUNS):
        for writer in writers:
            if writer.most >= AT_ONCE:
                texts, seconds = writer.write(together, True)
                rates[writer.name].append(sum(map(len, texts)) / seconds)
    for name, samples in rates.items():
        table.row(name, f"{len(together)} requests at once", unit="tokens/s", samples=samples)
    table.row(names[0], "plain requests beside", unit="times", samples=[*beside(lm, cases)])
    figures.write(given.json)


def taken(lm: specbeam.LanguageModel, file: Path, count: int, seed: int, tokens: int) -> Iterator[Case]:
    """Some schemas that specbeam takes, in the order of a seed."""
    for name, schema in drawn(file, seed):
        try:
            JsonSchema(schema).compile(lm)
        except SpecbeamError:
            continue
        yield Case(schema, lm.tokenizer.encode(f"Write a JSON object for {name}."), tokens)
        count -= 1
        if not count:
            return


def valid(text: str, schema: dict[str, Any]) -> bool:
    """Whether a text is JSON that a schema allows. Numbers are decimal, for jsonschema rounds ``multipleOf``."""
    try:
        jsonschema.validate(json.loads(text, parse_float=Decimal), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def specbeam_writer(lm: specbeam.LanguageModel) -> Writer:
    def write(cases: Sequence[Case], constrained: bool) -> Texts:
        asked = []
        for case in cases:
            how: dict[str, Any] = {"max_new_tokens": case.tokens}
            if constrained:
                how["constraint"] = JsonSchema(case.schema).compile(lm)
            else:
                how["eos_token_id"] = []
            asked.append((case.prompt, how))
        return timed(lm, asked)

    return Writer("specbeam", write, AT_ONCE)


def timed(lm: specbeam.LanguageModel, asked: Sequence[tuple[list[int], dict[str, Any]]]) -> Texts:
    start = time.perf_counter()
    engine = Engine(lm, max_requests=len(asked))
    requests = [engine.submit(prompt, how) for prompt, how in asked]
    engine.run()
    return [request.result().token_ids for request in requests], time.perf_counter() - start


def llama_writer(path: Path, threads: int) -> Writer:
    import llama_cpp as peer
    from llama_cpp import Llama, LlamaGrammar

    model = Llama(str(path), n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)
    vocab = peer.llama_model_get_vocab(model._model.model)
    ends = {token for token in range(model.n_vocab()) if peer.llama_vocab_is_eog(vocab, token)}

    def write(cases: Sequence[Case], constrained: bool) -> Texts:
        (case,) = cases
        try:
            grammar = LlamaGrammar.from_json_schema(json.dumps(case.schema), verbose=False) if constrained else None
        except Exception as error:  # its converter has errors of many kinds
            raise Refused(str(error)) from error
        plain: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temp": 0.0}
        start, text = time.perf_counter(), list[int]()
        model.reset()
        for token in islice(model.generate(case.prompt, grammar=grammar, **plain), case.tokens):
            text.append(int(token))
            if constrained and token in ends:
                break
        return [text], time.perf_counter() - start

    return Writer(f"llama-cpp-python {peer.__version__}", write, 1)


class Vllm:
    """vLLM in a process of its own, which starts anew where a schema ends it."""

    def __init__(self, model: Path, threads: int, python: Path) -> None:
        settings = {"enable_prefix_caching": False, "structured_outputs_config": {"backend": "guidance"}}
        script = str(Path(__file__).with_name("serving_vllm.py"))
        self._command = [str(python), "-P", script, str(float_checkpoint(model)), str(threads), json.dumps(settings)]
        self._peer, self.name = self._start()
        atexit.register(lambda: self._peer.end())

    def _start(self) -> tuple[Peer, str]:
        peer = Peer(self._command, foreign_environment(), stdin=-1, stdout=-1)
        name = str(json.loads(self._line(peer)))
        peer.pause()
        return peer, name

    @staticmethod
    def _line(peer: Peer) -> str:
        assert peer.process.stdout is not None
        return peer.process.stdout.readline()

    def write(self, cases: Sequence[Case], constrained: bool) -> Texts:
        """As :class:`Writer` says."""
        ask: dict[str, Any] = {"prompts": [case.prompt for case in cases], "tokens": cases[0].tokens, "options": {}}
        if constrained:
            ask |= {"schemas": [case.schema for case in cases], "ignore_eos": False}
        assert self._peer.process.stdin is not None
        with self._peer.running():
            self._peer.process.stdin.write(json.dumps(ask) + "\n")
            self._peer.process.stdin.flush()
            line = self._line(self._peer)
        if not line:
            self._peer.end()
            self._peer, _ = self._start()
            raise Refused("vLLM ended")
        answer = json.loads(line)
        if "error" in answer:
            raise Refused(answer["error"])
        return answer["texts"], answer["seconds"]


def vllm_writer(model: Path, threads: int, python: Path) -> Writer:
    one = Vllm(model, threads, python)
    return Writer(one.name, one.write, AT_ONCE)


def beside(lm: specbeam.LanguageModel, cases: Sequence[Case]) -> Iterator[float]:
    """The time of plain requests beside a constrained one, over that beside one more plain one."""
    plain = [(case.prompt, {"max_new_tokens": case.tokens, "eos_token_id": []}) for case in cases[: PLAIN + 1]]
    order = random.Random(0).sample(cases, RUNS)
    for case in order:
        how = {"max_new_tokens": case.tokens, "constraint": JsonSchema(case.schema).compile(lm)}
        _, with_it = timed(lm, [*plain[:PLAIN], (case.prompt, how)])
        _, without = timed(lm, plain)
        yield with_it / without


if __name__ == "__main__":
    main()
