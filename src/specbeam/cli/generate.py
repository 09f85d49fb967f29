"""``specbeam generate``: text from a model."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbeam.cli.trace import show_trace
from specbeam.errors import SpecbeamError

if TYPE_CHECKING:  # it imports PyTorch, which takes a second
    from specbeam.model import LanguageModel

DEFAULT_MODEL = "smollm2-135m-instruct"


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="generate text from a prompt",
        description="Generate text from a prompt, or from each prompt of a file.",
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; - reads it from standard input")
    parser.add_argument(
        "--prompts", metavar="FILE", help="a prompt a line; in a .jsonl file a JSON text, list or object a line"
    )
    add_model_to(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message to put first")
    parser.add_argument("--raw", action="store_true", help="do not apply the model's chat template")
    add_options_to(parser)
    add_draft_to(parser)
    parser.add_argument(
        "--stream", action=argparse.BooleanOptionalAction, default=True, help="print the text as it comes (default)"
    )
    parser.add_argument("--show-prompt", action="store_true", help="print exactly what the model sees first")
    parser.add_argument(
        "--trace",
        action="store_true",
        default=None,
        help="print round by round what was drafted, accepted and rejected (with --json, as data)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a prompt and nothing else")
    parser.set_defaults(run=run)


def add_model_to(parser: argparse.ArgumentParser) -> None:
    """The options that say which model, where and how."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="SOURCE",
        help="an alias, a folder, a .gguf file or a hub id (default %(default)s)",
    )
    model.add_argument("--revision", help="a branch, tag or commit of a hub id")
    model.add_argument("--backend", default="auto", help="auto, cpu, torch or transformers (default %(default)s)")
    model.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default %(default)s)")
    model.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default %(default)s)")
    model.add_argument(
        "--quantize", default="auto", help="on a CPU: auto, keep, int8, int4 or float32 (default %(default)s)"
    )
    model.add_argument("--threads", type=int, metavar="N", help="on a CPU: so many threads (default: all)")


def add_options_to(parser: argparse.ArgumentParser) -> None:
    """The fields of Options, under the same names."""
    options = parser.add_argument_group("generation (transformers' names; see specbeam.Options)")
    add = options.add_argument
    add("--max-new-tokens", type=int, metavar="N", help="at most so many new tokens (default 256)")
    add("--min-new-tokens", type=int, metavar="N", help="no end of text before so many (default 0)")
    add("--do-sample", action=argparse.BooleanOptionalAction, help="draw tokens instead of taking the likeliest")
    add("--temperature", type=float, metavar="T", help="over 1 flatter, under 1 sharper, 0 greedy")
    add("--top-k", type=int, metavar="K", help="draw among the K likeliest tokens")
    add("--top-p", type=float, metavar="P", help="draw among the likeliest tokens that sum to P")
    add("--min-p", type=float, metavar="P", help="draw among tokens at least P times as likely as the likeliest")
    add("--repetition-penalty", type=float, metavar="R", help="over 1 makes repetition less likely")
    add("--num-beams", type=int, metavar="B", help="beam search with so many beams (default 1)")
    add("--num-return-sequences", type=int, metavar="N", help="so many of the best beams (default 1)")
    add("--length-penalty", type=float, metavar="X", help="over 0 favours long beams (default 1)")
    add("--early-stopping", type=early_stopping, metavar="E", help="true, false or never (default false)")
    add("--num-beam-groups", type=int, metavar="G", help="diverse beam search: so many groups of beams (default 1)")
    add("--diversity-penalty", type=float, metavar="X", help="what a token loses that another group chose (default 0)")
    add("--seed", type=int, metavar="N", help="the same seed gives the same text")
    add("--eos-token-id", type=int, action="append", metavar="ID", help="a token that ends the text (repeatable)")
    add("--stop-strings", action="append", metavar="TEXT", help="end before this text (repeatable)")


def add_draft_to(parser: argparse.ArgumentParser) -> None:
    """What drafts, and how much."""
    draft = parser.add_argument_group("draft (the same text sooner; see docs/speculation.md)")
    add = draft.add_argument
    add(
        "--draft",
        metavar="SOURCE",
        help="what guesses how the text goes on: a smaller model, or ngram or suffix to look it up in the text so far",
    )
    add("--draft-corpus", metavar="FILE", help="earlier texts for --draft suffix, one a line as for --prompts")
    add("--num-draft-tokens", type=auto_or_int, metavar="K", help="tokens to guess ahead (default auto)")
    add("--draft-width", type=auto_or_int, metavar="W", help="guesses a level of the tree of drafts (default auto)")
    add("--draft-budget", type=auto_or_int, metavar="N", help="guesses a pass at most (default auto)")


def auto_or_int(value: str) -> str | int:
    return value if value == "auto" else int(value)


auto_or_int.__name__ = "number"  # in error messages


def early_stopping(value: str) -> bool | str:
    return {"true": True, "false": False}.get(value.lower(), value)


def options_of(given: argparse.Namespace) -> Any:
    """The Options that were given on the command line."""
    from specbeam.options import Options

    values = {field.name: getattr(given, field.name, None) for field in fields(Options)}
    return Options.of({name: value for name, value in values.items() if value is not None})


def run(given: argparse.Namespace) -> int:
    options = options_of(given)  # wrong input is refused before a model is loaded
    if given.draft_corpus is not None and given.draft != "suffix":
        raise SpecbeamError("--draft-corpus goes with --draft suffix")
    if given.draft is None:
        from specbeam.engine.request import check_draft_sizes

        check_draft_sizes(options)
    prompts = list(read_prompts(given.prompt, given.prompts))

    from specbeam.engine import Engine
    from specbeam.prompts import show_prompt

    lm = load_model(given, given.model, revision=given.revision)
    draft = load_draft(given, lm)
    engine = Engine(lm)
    requests = {}
    for name, prompt in prompts:
        try:
            requests[name] = engine.submit(prompt, options, system=given.system, raw=given.raw, draft=draft)
        except SpecbeamError as error:
            raise SpecbeamError(f"{name}: {error}" if name else str(error)) from error

    stream = given.stream and not given.json and len(requests) == 1
    printer = Printer(requests, as_json=given.json, stream=stream)
    try:
        for _, prompt in prompts if given.show_prompt else ():
            shown = show_prompt(lm, prompt, system=given.system, raw=given.raw)
            print(shown, file=sys.stderr if given.json else sys.stdout, flush=True)
        while engine.step():
            printer.print_ready()
        printer.print_ready()
    except KeyboardInterrupt:
        for request in requests.values():
            request.cancel()
        engine.step()  # takes in what there is and evaluates nothing more
        printer.print_ready()
        raise
    return 1 if printer.failed else 0


def load_model(given: argparse.Namespace, source: str, revision: str | None = None) -> LanguageModel:
    """A model, where and how the options say."""
    from specbeam.model import load

    how = {name: getattr(given, name) for name in ("backend", "device", "dtype", "quantize", "threads")}
    return load(source, **how, revision=revision)


def load_draft(given: argparse.Namespace, lm: Any) -> Any:
    """What --draft names, ready to draft for a model."""
    from specbeam.drafting.suffix import suffix_automaton

    if given.draft_corpus is not None:
        return suffix_automaton(lm, (text for _, text in read_prompts(None, given.draft_corpus)))
    if given.draft in (None, "ngram", "suffix"):
        return given.draft
    return load_model(given, given.draft)


class Printer:
    """Prints what is ready, in the order of the prompts; a prompt that failed is a line on standard error."""

    def __init__(self, requests: dict[str, Any], as_json: bool, stream: bool) -> None:
        from tqdm import tqdm

        self.waiting = list(requests.items())
        self.failed = 0
        self.as_json = as_json
        self.stream = stream
        several = len(requests) > 1
        self.bar = tqdm(total=len(requests), desc="prompts", leave=False, disable=None if several else True)

    def print_ready(self) -> None:
        if self.stream:
            for piece in drain(self.waiting[0][1].pieces) if self.waiting else ():
                print(piece.text, end="", flush=True)
        while self.waiting and self.waiting[0][1].done:
            name, request = self.waiting.pop(0)
            self.bar.update()
            try:
                result = request.result()
            except Exception as error:  # whatever it was, the other prompts go on
                self.failed += 1
                with self.bar.external_write_mode(file=sys.stderr):
                    print(f"specbeam: {name or 'the prompt'} failed: {one_line(error)}", file=sys.stderr, flush=True)
                continue
            with self.bar.external_write_mode(file=sys.stdout):
                if self.as_json:
                    print(json.dumps(result.to_dict(), ensure_ascii=not utf8()), flush=True)
                else:
                    print("" if self.stream else result.text, flush=True)
                    if result.trace is not None:
                        for line in show_trace(
                            result.trace, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ
                        ):
                            print(line, flush=True)
                    for other in result.sequences[1:]:
                        print(other.text, flush=True)
            if not self.as_json:
                with self.bar.external_write_mode(file=sys.stderr):
                    print(summary(result), file=sys.stderr, flush=True)
        if not self.waiting:
            self.bar.close()


def utf8() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def one_line(error: Exception) -> str:
    kind = "" if isinstance(error, SpecbeamError) else f"{type(error).__name__}: "
    return kind + " ".join(str(error).split())


def drain(pieces: Any) -> Iterator[Any]:
    while pieces:
        yield pieces.popleft()


def summary(result: Any) -> str:
    """The statistics in one line."""
    stats = result.stats
    parts = [f"{stats.prompt_tokens} + {stats.new_tokens} tokens", f"{stats.tokens_per_second:.1f} tokens/s"]
    if stats.time_to_first_token is not None:
        parts.append(f"first after {stats.time_to_first_token:.2f} s")
    if stats.drafted or stats.draft_passes:
        parts.append(f"{stats.target_passes} + {stats.draft_passes} passes")
        parts.append(f"{stats.accepted} of {stats.drafted} guesses accepted")
        parts.append(f"{stats.steps_per_target_pass:.2f} steps a target pass")
    else:
        parts.append(f"{stats.forward_passes} passes")
    if stats.peak_memory is not None:
        parts.append(f"{stats.peak_memory / 1e9:.2f} GB")
    return f"[{', '.join(parts)}, {result.finish_reason}]"


def read_prompts(prompt: str | None, file: str | None) -> Iterator[tuple[str, Any]]:
    """The prompts asked for, each with a name for error messages.

    Raises:
        SpecbeamError: none or two sources, an unreadable file, or a line that is no prompt.
    """
    if (prompt is None) == (file is None):
        raise SpecbeamError("give one of PROMPT (- for standard input) and --prompts FILE")
    if prompt == "-":
        yield "", _read("standard input").rstrip("\n")
        return
    if prompt is not None:
        yield "", prompt
        return
    assert file is not None
    number = found = 0
    for number, line in enumerate(_read(file).split("\n"), 1):  # splitlines() would cut at U+2028 and its like too
        line = line.removesuffix("\r")
        if line.strip():
            found += 1
            name = f"{file} line {number}"
            yield name, _json_prompt(name, line) if file.endswith((".jsonl", ".json")) else line
    if not found:
        raise SpecbeamError(f"{file} holds no prompts: put one a line")


def _read(file: str) -> str:
    try:
        data = sys.stdin.buffer.read() if file == "standard input" else Path(file).read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise SpecbeamError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpecbeamError(f"{file} is not UTF-8 text (byte {error.start:,}): convert it") from error


def _json_prompt(name: str, line: str) -> Any:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SpecbeamError(f"{name} is not JSON: {error}") from error
    if isinstance(value, dict):
        for key in ("prompt", "messages"):
            if key in value:
                return value[key]
        raise SpecbeamError(
            f'{name} has neither "prompt" nor "messages", but {", ".join(map(repr, value)) or "nothing"}'
        )
    return value
