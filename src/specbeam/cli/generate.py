"""``specbeam generate``: text from a model."""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING, Any, TextIO

from specbeam.cli.arguments import (
    add_generation_to,
    add_strategy_to,
    add_thinking_to,
    check_sources,
    load_draft,
    load_model,
    load_strategy,
    options_of,
    thinking_of,
)
from specbeam.cli.printing import check_writable, json_line, one_line, print_lines, printing_to
from specbeam.cli.prompts import PromptRow, read_rows
from specbeam.cli.trace import show_trace
from specbeam.errors import FAILED, SpecbeamError, located
from specbeam.options.declared import OBJECTS, OPTIONS
from specbeam.options.names import OTHER_NAMES
from specbeam.options.options import Options, check_names

if TYPE_CHECKING:
    from specbeam.engine.request import Request
    from specbeam.results import Result, Sequence

OTHER_FIELDS = ("id", "system")
"""Fields of a line of --prompts beside its prompt and options. All others are the user's data."""
IN_LINES = [name for name in OPTIONS if name not in OBJECTS]
"""The options that a line of --prompts can have."""
MIN_LIKENESS = 0.75
"""difflib's ratio, from 0 to 1. A field whose name is less like all options is data, and no misspelt option."""
SHOWN_PROMPT_WIDTH = 80


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="generate text from a prompt",
        description="Generate text from a prompt, or from each prompt of a file.",
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; - reads it from standard input")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="one prompt per line; in a .jsonl file each is a JSON text, list or object, which may have options; - "
        "reads standard input",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="write the texts to a file instead, which appears once it is whole; .jsonl and .json as with --json",
    )
    add_generation_to(parser)
    add_thinking_to(parser)
    add_strategy_to(parser)
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="print a single text while it is generated (default)",
    )
    parser.add_argument("--show-prompt", action="store_true", help="first print the exact prompt that the model sees")
    parser.add_argument(
        "--trace",
        action="store_true",
        default=None,
        help="print the drafted, accepted and rejected tokens of each round (with --json, as data)",
    )
    parser.add_argument(
        "--record",
        metavar="FILE",
        help="write the rounds of one text to a file: .html is a page that replays them, and .jsonl opens in the page "
        "of specbeam serve",
    )
    parser.add_argument("--json", action="store_true", help="print only one JSON object per prompt")
    parser.add_argument(
        "--top-logprobs",
        type=int,
        metavar="K",
        help="with --json: each token's log-probability, and the K likeliest tokens at its position",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    rows = [*read_rows(args.prompt, args.prompts)]  # wrong input is refused before the slow imports
    args.json = args.json or str(args.output).endswith((".jsonl", ".json"))
    if args.top_logprobs is not None and not args.json:
        raise SpecbeamError("--top-logprobs goes with --json")
    options = [options_of_row(args, row) for row in rows]
    if args.record is not None:
        options = [options_to_record(args, options)]
    check_sources(args)
    check_no_input(args)
    try:
        with printing_to(args.output) as out:
            failed = generate(args, rows, options, out)
            if failed == len(rows) and out is not sys.stdout:
                raise NothingFinished
    except NothingFinished:
        print(f"specbeam: no prompt was finished, so {args.output} was not written", file=sys.stderr)
        return FAILED
    if out is not sys.stdout:
        prompts = "1 prompt" if len(rows) == 1 else f"{len(rows):,} prompts"
        print(f"[{prompts}, {failed:,} failed, in {args.output}]", file=sys.stderr)
    return FAILED if failed else 0


def options_to_record(args: argparse.Namespace, options: list[Options]) -> Options:
    """The options of the only text, with the rounds and the likeliest tokens that a recording has."""
    from specbeam.recording.events import LIKELIEST

    if len(options) > 1:
        raise SpecbeamError(f"--record goes with one prompt, and there are {len(options)}")
    if args.record in (args.output, "-"):
        raise SpecbeamError(f"--record {args.record} is where the text goes: name another file")
    check_writable(Path(args.record).resolve(), args.record)
    (only,) = options
    likeliest = LIKELIEST if only.top_logprobs is None else only.top_logprobs
    return replace(only, trace=True, top_logprobs=likeliest)


class NothingFinished(Exception):
    """Every prompt failed: there is nothing that could replace an earlier output."""


def check_no_input(args: argparse.Namespace) -> None:
    """Refuse an output that would replace a file of the input. Raises SpecbeamError."""
    if args.output in (None, "-") or not os.path.isfile(args.output):
        return
    for name in ("prompts", "draft_corpus", "model", "draft", "adapter"):
        source = getattr(args, name)
        if source is not None and os.path.exists(source) and os.path.samefile(source, args.output):
            option = name.replace("_", "-")
            raise SpecbeamError(f"--output {args.output} would replace the file of --{option}: name another file")


def options_of_row(args: argparse.Namespace, row: PromptRow) -> Options:
    """The options for a prompt. Options on the prompt's own line take the place of the command line's."""
    with located(row.name if row.fields else ""):
        strange = [name for name in row.fields if name not in (*IN_LINES, *OTHER_FIELDS)]
        check_names([name for name in strange if resembles(name, IN_LINES)], IN_LINES, "option")
        of_row = {name: value for name, value in row.fields.items() if name in IN_LINES and value is not None}
        return options_of(args, of_row)


def resembles(name: str, names: list[str]) -> bool:
    """Whether another tool has one of the names so, or a slip may have made it so."""
    elsewhere = name in chain.from_iterable(OTHER_NAMES.get(ours, ()) for ours in names)
    return elsewhere or bool(difflib.get_close_matches(name, names, n=1, cutoff=MIN_LIKENESS))


def generate(args: argparse.Namespace, rows: list[PromptRow], options: list[Options], out: TextIO) -> int:
    """Generate the texts and print them. Returns how many prompts failed."""
    from specbeam.engine import Engine
    from specbeam.models.prompts import encode, last_message, show_prompt

    lm = load_model(args)
    rendering = thinking_of(lm, args.think, args.raw)
    draft, strategy = load_draft(args, lm), load_strategy(args)
    engine = Engine(lm)
    requests, shown_prompts = [], []
    for row, row_options in zip(rows, options, strict=True):
        how: dict[str, Any] = {"system": row.fields.get("system", args.system), "raw": args.raw}
        with located(row.name):
            prompt = row.prompt
            if rendering.chat_template_kwargs:
                prompt, how = encode(lm, prompt, **how, rendering=rendering), {}
            requests.append(engine.submit(prompt, row_options, draft=draft, strategy=strategy, **how))
            shown_prompts.append(show_prompt(lm, prompt, **how) if args.show_prompt else None)

    one_text = len(rows) == 1 and options[0].num_return_sequences == 1
    stream = args.stream and one_text and not args.json and out is sys.stdout
    printer = Printer(rows, requests, shown_prompts, out, args.json, stream, shows_trace=bool(args.trace))
    with CtrlCCancels(requests) as ctrl_c:
        while engine.step():
            printer.print_ready()
        printer.print_ready()
    if ctrl_c.pressed:
        if out is not sys.stdout:
            raise KeyboardInterrupt(f"{args.output} was not written")
        if len(rows) > 1:
            raise KeyboardInterrupt(f"{printer.finished:,} of {len(rows):,} prompts were finished")
        raise KeyboardInterrupt
    if args.record is not None and not printer.failed:
        from specbeam.jobs.files import write_whole
        from specbeam.recording.events import event_line, events
        from specbeam.recording.replay import replay_page

        message = last_message(lm, rows[0].prompt, raw=args.raw)
        recording = events(lm, requests[0].prompt_ids, options[0], args.draft, requests[0].result(), message)
        if args.record.endswith(".html"):
            content = replay_page(recording, shortened(rows[0].prompt))
        else:
            content = "".join(f"{event_line(event)}\n" for event in recording)
        write_whole(Path(args.record).resolve(), content)
    return printer.failed


class CtrlCCancels:
    """In this block Ctrl-C ends requests between two passes, so that their texts so far are whole.

    A second one interrupts. A background job of a shell ignores Ctrl-C, and goes on doing so.

    Attributes:
        pressed: whether Ctrl-C was pressed. It has no lock, which a second Ctrl-C could find held by the first one's
            handler.
    """

    def __init__(self, requests: list[Request]) -> None:
        self.pressed = False
        self._requests = requests
        self._before: Any = signal.SIG_IGN

    def __enter__(self) -> CtrlCCancels:
        self._before = signal.getsignal(SIGINT)
        if self._before is not signal.SIG_IGN:
            signal.signal(SIGINT, self._cancel)
        return self

    def _cancel(self, *_: Any) -> None:
        self.pressed = True
        signal.signal(SIGINT, self._before)
        for request in self._requests:
            request.cancel()

    def __exit__(self, *_: object) -> None:
        if self._before is not signal.SIG_IGN:
            signal.signal(SIGINT, self._before)


class Printer:
    """Prints finished texts in the order of the prompts, and failed prompts as lines on standard error.

    Args:
        shown_prompts: the prompts as the model sees them, to be printed first; None for each that is not to be shown.
        out: where the texts go. Statistics go to standard error.
        stream: print the text of the only request while it comes.
        shows_trace: print the rounds, too.
    """

    def __init__(
        self,
        rows: list[PromptRow],
        requests: list[Request],
        shown_prompts: list[str | None],
        out: TextIO,
        as_json: bool,
        stream: bool,
        shows_trace: bool,
    ) -> None:
        self.waiting = [*enumerate(zip(rows, requests, shown_prompts, strict=True))]
        self.number_of_prompts = len(rows)
        self.finished = self.failed = 0
        self.out = out
        self._print = partial(print_lines, file=out)
        self.as_json = as_json
        self.stream = stream
        self.shows_trace = shows_trace
        self.bar = None
        if len(rows) > 1:
            from tqdm import tqdm

            self.bar = tqdm(total=len(rows), desc="prompts", leave=False, disable=None)
        if stream:
            self._print_heading(rows[0], 0, shown_prompts[0])

    def print_ready(self) -> None:
        if self.stream and self.waiting:
            _, (_, request, _) = self.waiting[0]
            for piece in drain(request.pieces):
                self._print(piece.text, end="")
        while self.waiting and self.waiting[0][1][1].done:
            index, (row, request, shown_prompt) = self.waiting.pop(0)
            if self.bar is not None:
                self.bar.update()
            try:
                result = request.result()
            except Exception as error:  # the other prompts go on after any error
                self.failed += 1
                print_lines(f"specbeam: {row.name or 'the prompt'} failed: {one_line(error)}", file=sys.stderr)
                continue
            self.finished += result.finish_reason != "cancelled"
            if self.as_json:
                if shown_prompt is not None:
                    print_lines(shown_prompt, file=sys.stderr)
                self._print(json_line(self._about(row, index) | result.to_dict(), out=self.out))
                continue
            if self.stream:
                self._print("")
            else:
                self._print_heading(row, index, shown_prompt)
                self._print(*numbered_texts(result))
            if self.shows_trace and result.trace is not None:
                self._print(*show_trace(result.trace, colour=self.out.isatty() and "NO_COLOR" not in os.environ))
            if self.out is sys.stdout or self.number_of_prompts == 1:
                print_lines(summary(result), file=sys.stderr)
        if not self.waiting and self.bar is not None:
            self.bar.close()

    def _about(self, row: PromptRow, index: int) -> dict[str, Any]:
        """The fields that tell the results of a file's prompts from each other."""
        id_field = {"id": row.fields["id"]} if "id" in row.fields else {}
        return {"index": index, **id_field, "prompt": row.prompt} if row.name else {}

    def _print_heading(self, row: PromptRow, index: int, shown_prompt: str | None) -> None:
        if self.number_of_prompts > 1:
            between = [""] if index else []
            which = f"prompt {index + 1} of {self.number_of_prompts}"
            self._print(*between, f"[{which}: {shortened(row.prompt)}]")
        if shown_prompt is not None:
            self._print(shown_prompt)


def drain(pieces: Any) -> Iterator[Any]:
    while pieces:
        yield pieces.popleft()


def numbered_texts(result: Result) -> Iterator[str]:
    """The text. Several texts come best first, each with a heading above it and an empty line between them."""
    several = len(result.sequences)
    if several == 1:
        yield result.text
        return
    for number, sequence in enumerate(result.sequences, 1):
        if number > 1:
            yield ""
        yield f"[{number} of {several}, {score_of(sequence)}, {sequence.finish_reason}]"
        yield sequence.text


def score_of(sequence: Sequence) -> str:
    """The log-probability of a text, and its score if the texts are ranked by another number."""
    log_prob = f"log-prob {sequence.log_prob:.3f}"
    return log_prob if sequence.score == sequence.log_prob else f"score {sequence.score:.4f}, {log_prob}"


def shortened(prompt: Any) -> str:
    """A prompt on one line: the beginning of a text, or of the last message."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        prompt = prompt[-1].get("content")
    text = prompt if isinstance(prompt, str) else str(prompt)
    return textwrap.shorten(text, SHOWN_PROMPT_WIDTH, placeholder=" ...")


def summary(result: Result) -> str:
    """The statistics in one line."""
    stats = result.stats
    parts = [f"{stats.prompt_tokens} + {stats.new_tokens} tokens", f"{stats.tokens_per_second:.1f} tokens/s"]
    if stats.time_to_first_token is not None:
        parts.append(f"first after {stats.time_to_first_token:.2f} s")
    if stats.drafted or stats.draft_passes:
        parts.append(f"{stats.target_passes} + {stats.draft_passes} passes")
        parts.append(f"{stats.accepted} of {stats.drafted} draft tokens accepted")
        parts.append(f"{stats.steps_per_target_pass:.2f} steps per target pass")
    else:
        parts.append(f"{stats.forward_passes} passes")
    if stats.peak_memory is not None:
        parts.append(f"{stats.peak_memory / 1e9:.2f} GB")
    parts += [stats.precision, result.finish_reason]
    notes = [stats.draft_note] if stats.draft_note else []
    if result.sequences[0].is_complete is False:
        notes.append("the text is cut before it satisfies its constraint: raise --max-new-tokens, or bound its parts")
    return "\n".join(f"[{part}]" for part in (", ".join(parts), *notes))
