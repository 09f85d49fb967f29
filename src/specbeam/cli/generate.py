"""``specbeam generate``: text from a model."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any

from specbeam.cli.arguments import add_draft_to, add_model_to, add_options_to, load_draft, load_model, options_of
from specbeam.cli.printing import json_line, one_line
from specbeam.cli.prompts import read_prompts
from specbeam.cli.trace import show_trace
from specbeam.errors import FAILED, SpecbeamError


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="generate text from a prompt",
        description="Generate text from a prompt, or from each prompt of a file.",
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; - reads it from standard input")
    parser.add_argument(
        "--prompts", metavar="FILE", help="one prompt per line; in a .jsonl file each is a JSON text, list or object"
    )
    add_model_to(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message to put first")
    parser.add_argument("--raw", action="store_true", help="do not apply the model's chat template")
    add_options_to(parser)
    add_draft_to(parser)
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="print the text while it is generated (default)",
    )
    parser.add_argument("--show-prompt", action="store_true", help="first print the exact prompt that the model sees")
    parser.add_argument(
        "--trace",
        action="store_true",
        default=None,
        help="print the drafted, accepted and rejected tokens of each round (with --json, as data)",
    )
    parser.add_argument("--json", action="store_true", help="print only one JSON object per prompt")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    options = options_of(given)  # wrong input is refused before a model is loaded
    if given.draft_corpus is not None and given.draft != "suffix":
        raise SpecbeamError("--draft-corpus goes with --draft suffix")
    if given.draft is None:
        from specbeam.engine.drafters import check_draft_sizes

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
        engine.step()  # ends the cancelled requests without another pass
        printer.print_ready()
        raise
    return FAILED if printer.failed else 0


class Printer:
    """Prints finished texts in the order of the prompts, and failed prompts as lines on standard error."""

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
            except Exception as error:  # the other prompts go on after any error
                self.failed += 1
                with self.bar.external_write_mode(file=sys.stderr):
                    print(f"specbeam: {name or 'the prompt'} failed: {one_line(error)}", file=sys.stderr, flush=True)
                continue
            with self.bar.external_write_mode(file=sys.stdout):
                if self.as_json:
                    print(json_line(result.to_dict()), flush=True)
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
        parts.append(f"{stats.steps_per_target_pass:.2f} steps per target pass")
    else:
        parts.append(f"{stats.forward_passes} passes")
    if stats.peak_memory is not None:
        parts.append(f"{stats.peak_memory / 1e9:.2f} GB")
    return f"[{', '.join(parts)}, {result.finish_reason}]"
