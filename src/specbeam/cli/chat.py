"""``specbeam chat``: a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbeam.cli.arguments import (
    add_generation_to,
    add_thinking_to,
    check_source,
    check_sources,
    load_draft,
    load_model,
    thinking_of,
    values_of,
)
from specbeam.cli.generate import CtrlCCancels, drain, summary
from specbeam.cli.printing import one_line, printing_to
from specbeam.cli.repetition import repeated_end
from specbeam.errors import FAILED, PromptTooLong, SpecbeamError, shown
from specbeam.models.sampling_defaults import DRAWN_BY, FALLBACK, SamplingDefaults, sampling_defaults
from specbeam.options.declared import OBJECTS, SHAPING, names_where
from specbeam.options.names import nearest_name
from specbeam.options.options import Options, check_names
from specbeam.text.escapes import unescaped

if TYPE_CHECKING:
    from specbeam.models.model import LanguageModel
    from specbeam.results import Result
    from specbeam.structured.tools.reader import Delta

MAX_NEW_TOKENS = 1024
"""Of an answer, by default."""
ONCE_MORE = "[Ctrl-C once more ends the chat, and so does /bye]"
COMMAND = re.compile(r"/\w+")
"""A first word like this is a command. The path /usr/bin is a message."""
SETTABLE = names_where(
    lambda option: (
        option.name not in OBJECTS
        and (option.changes_text or "draft" in option.needs)
        and "several" not in option.needs
    )
)
"""The options that have a use in a chat."""
PAGE_WIDTH = 80
SHOWN_CHARACTERS = 40
"""Of a part that an answer repeats."""
STRONG_PENALTY = 1.2
"""The least repetition_penalty to suggest after an answer that repeats itself."""
SPEAKERS = {"user": "User", "assistant": "Assistant"}
"""In the transcript that a model without a chat template reads."""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        allow_abbrev=False,
        help="talk with a model",
        description=f"Talk with a model. An answer has at most {MAX_NEW_TOKENS} tokens unless you say otherwise. "
        "/help lists the commands of a conversation. Without a terminal, each line of standard input is a message. "
        "With --raw the model reads a transcript.",
    )
    add_generation_to(parser, MAX_NEW_TOKENS)
    add_thinking_to(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    values = values_of(args)
    options = Options.of(FALLBACK.fill(values))  # wrong input is refused before the slow imports
    options.check_drafting(args.draft is not None)
    if options.num_return_sequences > 1:
        raise SpecbeamError("--num-return-sequences has no use in a chat, which goes on with one answer: leave it out")
    check_sources(args)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()

    def load(source: str) -> tuple[LanguageModel, Any]:
        if on_terminal:
            note(f"[loading {source}]")  # the libraries alone take seconds
        changes = {} if source == args.model else {"revision": None, "adapter": None}
        lm = load_model(argparse.Namespace(**vars(args) | changes | {"model": source}), says_precision=False)
        return lm, load_draft(args, lm)

    chat = Chat(load, args.model, values, args.system, args.raw, args.think)
    chat.introduce()
    read = line_reader(chat.commands) if on_terminal else piped_line
    if on_terminal:
        note("/help lists the commands. Ctrl-C stops an answer, Ctrl-D ends the chat.")
    with contextlib.suppress(EOFError):
        while True:
            line = read()
            try:
                chat.hear(line)
            except KeyboardInterrupt:  # a second one, or one before the answer began
                if not on_terminal:
                    raise
                chat.recover()
    return FAILED if chat.failed and not on_terminal else 0


class Chat:
    """A conversation. Its commands are the methods whose names begin with ``do_``.

    Args:
        load: loads a model by its source, and the draft for it as for :meth:`specbeam.Engine.submit`.
        source: of the first model.
        user_options: the options that the user gives, by their names.
        raw: use a transcript in place of the chat template.
        think: whether the model thinks first; None for the template's own choice.

    Attributes:
        failed: the number of messages and commands that gave an error.
    """

    def __init__(
        self,
        load: Callable[[str], tuple[LanguageModel, Any]],
        source: str,
        user_options: dict[str, Any],
        system: str | None,
        raw: bool,
        think: bool | None = None,
    ) -> None:
        self.load = load
        self.user_options = user_options
        self.system = system
        self.raw = raw
        self.think = think
        self.messages: list[dict[str, str]] = []
        self.results: list[Result] = []  # of all answers
        self.tries = 0  # answers to the last message
        self.failed = 0
        self.own_files: set[Path] = set()
        self.use(*load(source))

    def use(self, lm: LanguageModel, draft: Any) -> None:
        """Answer with this model from now on.

        Raises:
            SpecbeamError: it cannot be used for a conversation, or not with the options. The model before it stays.
        """
        from specbeam.engine import Engine
        from specbeam.structured.thoughts import thoughts_of

        if lm.backend.encoder_reads == "tokens":
            raise SpecbeamError(
                f"{lm.source} has an encoder: it reads one text and no conversation. Use specbeam generate"
            )
        sampling = sampling_defaults(lm)
        Options.of(sampling.fill(self.user_options))
        self.engine = Engine(lm, max_requests=1)
        self.lm, self.draft, self.sampling = lm, draft, sampling
        self.has_template = not self.raw and lm.has_chat_template
        self.thoughts = thoughts_of(lm.tokenizer.get_chat_template()) if self.has_template else None
        self.rendering = thinking_of(lm, self.think, self.raw)

    def check_draft(self) -> None:
        """Raise SpecbeamError for options of drafts that have no effect with this draft, or without one."""
        from specbeam.engine.drafts import check_draft

        self.options.check_drafting(self.draft is not None)
        check_draft(self.lm, self.draft, self.options)

    def recover(self) -> None:
        """Go on after an interrupt in the middle of a pass. The conversation stays as it was."""
        from specbeam.engine import Engine

        self.engine = Engine(self.lm, max_requests=1)
        note("\n[stopped: the conversation stays as it was]")

    def introduce(self) -> None:
        """Say how the model answers, and with which weights."""
        note(f"{self.lm.source} {self.how}")
        note(f"It runs {precision_of(self.lm)}.")
        if not self.has_template and not self.raw:
            note(f'{self.lm.source} has no chat template: it reads a transcript of "User:" and "Assistant:"')

    @property
    def options(self) -> Options:
        """The options of the next answer: the given ones, and else the model's."""
        options = Options.of(self.sampling.fill(self.user_options))
        if self.has_template:
            return options
        return replace(options, stop_strings=[*options.stop_strings, *(f"\n{name}:" for name in SPEAKERS.values())])

    @property
    def how(self) -> str:
        """How the model chooses tokens, as the end of a sentence."""
        options = self.options.with_defaults(self.lm.generation_defaults)
        set_by_user = {name for name, value in self.user_options.items() if value is not None}
        if not options.samples:
            beams = options.num_beams
            chosen = f"searches with {beams} beams" if beams > 1 else "takes the likeliest token (greedy)"
            is_yours = set_by_user & {"do_sample", *SHAPING, "num_beams"}
            return f"{chosen}, {'as you say' if is_yours else self.sampling.origin}"
        drawn = {"temperature": 1.0} | {name: value for name in DRAWN_BY if (value := getattr(options, name))}
        others = SamplingDefaults({n: v for n, v in drawn.items() if n not in set_by_user}, self.sampling.origin)
        return str(others.changed({n: v for n, v in drawn.items() if n in set_by_user}))

    @property
    def commands(self) -> list[str]:
        return sorted(f"/{name.removeprefix('do_')}" for name in dir(self) if name.startswith("do_"))

    def hear(self, line: str) -> None:
        """Answer a message, or obey a command. Errors are printed."""
        word, _, argument = line.partition(" ")
        try:
            if not COMMAND.fullmatch(word):
                if line.strip():
                    self.answer([*self.messages, {"role": "user", "content": line.strip()}])
            elif word in self.commands:
                getattr(self, f"do_{word[1:]}")(argument.strip())
            else:
                near = nearest_name(word, self.commands)
                hint = f"did you mean {near}?" if near else "/help lists the commands"
                raise SpecbeamError(f"unknown command {word}: {hint} (a space before it makes it a message)")
        except SpecbeamError as error:
            self.failed += 1
            note(f"specbeam: {one_line(error)}")

    def answer(self, messages: list[dict[str, str]], tries: int = 0) -> None:
        """Answer the last message, and let the conversation be these messages and the answer.

        If the answer is stopped before there is a text, the conversation stays as it was.

        Args:
            tries: how many answers to it there were.
        """
        from specbeam.models.answers import TokenReader

        ids = self.token_ids(messages)
        options = self.options
        if options.seed is not None:
            options = replace(options, seed=options.seed + tries)
        request = self.engine.submit(ids, options, draft=self.draft)
        reader = None if self.thoughts is None else TokenReader(self.lm, ids, options, self.thoughts)
        text = ""
        with CtrlCCancels([request]):
            more = True
            while more:
                more = self.engine.step()
                for piece in drain(request.pieces):
                    if reader is not None:
                        thought = reader.answer.thoughts
                        changes = reader.push(piece.token_ids)
                        changes += [] if piece.result is None else reader.finish(piece.result.finish_reason)
                        text += shown_changes(changes, bool(thought) and not text)
                        continue
                    new = piece.text if text or self.has_template else piece.text.lstrip()
                    text += new
                    print(new, end="", flush=True)
        print(flush=True)
        try:
            result = request.result()
        except SpecbeamError:
            raise
        except Exception as error:  # the conversation goes on after any error
            raise SpecbeamError(one_line(error)) from error
        answer = text if self.has_template else text.rstrip()
        if result.finish_reason == "cancelled" and not answer:
            is_new = len(messages) > len(self.messages)
            outcome = "the message is forgotten" if is_new else "the conversation stays as it was"
            note(f"[stopped before there was a text: {outcome}]")
            return
        thoughts = "" if reader is None else reader.answer.thoughts
        reasoning = {"reasoning_content": thoughts} if thoughts else {}
        self.messages = [*messages, {"role": "assistant", "content": answer, **reasoning}]
        self.results.append(result)
        self.tries = tries + 1
        new, context = len(result.token_ids), self.lm.backend.context_length
        if result.finish_reason == "cancelled":
            note("[stopped]")
        elif result.finish_reason == "length" and len(ids) + new == context:
            note(f"[the context of {context:,} tokens is full: /drop forgets the oldest turn, /clear all turns]")
        elif result.finish_reason == "length" and (part := repeated_end(answer)):
            less = max(STRONG_PENALTY, round((options.repetition_penalty or 1) + 0.1, 2))
            again = textwrap.shorten(part, SHOWN_CHARACTERS, placeholder=" ...")
            note(
                f'[the answer repeats itself: "{again}". /set repetition_penalty {less:g} makes that less likely, as '
                "--repetition-penalty does. /regenerate answers again]"
            )
        elif result.finish_reason == "length":
            note(f"[ended after {new:,} tokens: /set max_new_tokens {2 * new} allows longer answers]")

    def token_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """The messages as the model reads them. Raises SpecbeamError if the context cannot hold them."""
        from specbeam.models.prompts import encode, max_prompt_length

        max_tokens = max_prompt_length(self.lm)
        try:
            if self.has_template:
                how: dict[str, Any] = {"system": self.system, "rendering": self.rendering}
                return encode(self.lm, messages, max_tokens=max_tokens, **how)
            turns = [f"{SPEAKERS[m['role']]}: {m['content']}" for m in messages]
            text = "\n\n".join([*([self.system] if self.system else []), *turns, "Assistant:"])
            return encode(self.lm, text, raw=True, max_tokens=max_tokens)
        except PromptTooLong as error:
            raise SpecbeamError(
                f"the conversation with this message has {error.tokens} tokens, and the context of {self.lm.source} "
                f"holds {self.lm.backend.context_length:,}: /drop forgets the oldest turn, /clear all turns"
            ) from error

    def do_help(self, argument: str) -> None:
        """/help: list the commands."""
        for about in dict.fromkeys(getattr(self, f"do_{command[1:]}").__doc__ for command in self.commands):
            note(about)
        note("Alt-Enter, or a backslash before Enter, begins a new line.")
        note("Ctrl-C stops an answer. Where nothing is typed, Ctrl-C twice, or Ctrl-D, ends the chat.")

    def do_exit(self, argument: str) -> None:
        """/bye, /exit, /quit: end the chat."""
        raise EOFError

    do_bye = do_quit = do_exit

    def do_models(self, argument: str) -> None:
        """/models: list the models with a short name, and the models in the hub's cache."""
        from specbeam.cli.models import list_models

        with contextlib.redirect_stdout(sys.stderr):
            list_models(argparse.Namespace(json=False))

    def do_model(self, argument: str) -> None:
        """/model [NAME]: go on with another model: a name of /models, a folder, a .gguf file or a hub id."""
        if argument:
            check_source(argument)
            try:
                self.use(*self.load(argument))
            except KeyboardInterrupt:
                note(f"[stopped: {self.lm.source} stays]")
                return
            except SpecbeamError:
                raise
            except Exception as error:  # the conversation goes on after any error
                raise SpecbeamError(f"/model {argument}: {one_line(error)}") from error
        self.introduce()

    def do_set(self, argument: str) -> None:
        """/set [NAME [VALUE]]: show or change an option of the answers; "default" as the value takes it back."""
        name, _, text = argument.removeprefix("parameter ").partition(" ")  # as ollama has it
        name = name.strip("-").replace("-", "_")
        if name == "system":
            self.do_system(text.strip())
            return
        if name:
            check_names([name], SETTABLE, "option")
        value = value_of(name, text.strip())
        if value is not None:
            before, self.user_options = self.user_options, {**self.user_options, **value}
            try:
                self.check_draft()
            except SpecbeamError as error:
                self.user_options = before
                says = f"{error} (/set NAME default takes an option back)"
                raise SpecbeamError(says, option=error.options) from error
        options, others = self.options, []
        for option in [name] if name else SETTABLE:
            value_now = getattr(options, option)
            if self.user_options.get(option) is not None:
                note(f"{option} {number(value_now)}")
            elif value_now == self.sampling.settings.get(option) is not None:
                note(f"{option} {number(value_now)}, {self.sampling.origin}")
            elif name:
                note(f"{option} is not set")
            else:
                others.append(option)
        if others:
            note(textwrap.fill(f"not set: {', '.join(others)}", PAGE_WIDTH, subsequent_indent="  "))

    def do_temperature(self, argument: str) -> None:
        """/temperature [T]: show or set the temperature. 0 takes the likeliest token, higher ones draw more freely."""
        self.do_set(f"temperature {argument}")

    def do_clear(self, argument: str) -> None:
        """/clear: forget all turns. The system message stays."""
        self.messages, self.results = [], []
        note("[all turns are forgotten]")

    def do_drop(self, argument: str) -> None:
        """/drop [N]: forget the oldest N turns (1), for example when the context is full."""
        try:
            turns = int(argument or 1)
        except ValueError:
            turns = 0
        if turns < 1:
            raise SpecbeamError(f"/drop {argument}: give a number of turns, at least 1")
        begins = [at for at, message in enumerate(self.messages) if message["role"] == "user"]
        self.messages = self.messages[begins[turns] :] if turns < len(begins) else []
        note(f"[{max(0, len(begins) - turns)} of {len(begins)} turns are left]")

    def do_regenerate(self, argument: str) -> None:
        """/regenerate: answer the last message again."""
        if not self.messages:
            raise SpecbeamError("/regenerate: there is no message yet")
        *before, last = self.messages
        self.answer(before if last["role"] == "assistant" else self.messages, self.tries)
        answer = self.messages[-1]  # the last one itself if this one was stopped before there was a text
        if answer is not last and answer == last:
            why = (
                "drawn again: a higher /temperature"
                if self.options.samples
                else "as you do not sample: /temperature 0.7"
            )
            note(f"[the same answer, {why} draws others]")

    def do_system(self, argument: str) -> None:
        """/system [TEXT]: set the system message, also of the turns so far. Without TEXT, remove it."""
        self.system = argument or None
        note("[the system message is set]" if argument else "[there is no system message now]")

    def do_stats(self, argument: str) -> None:
        """/stats: show the cost of the last answer and of the conversation."""
        if not self.results:
            raise SpecbeamError("/stats: there is no answer yet")
        last, every = self.results[-1], [result.stats for result in self.results]
        note(f"last answer: {summary(last)}")
        note(f"  {last.stats.reused_tokens:,} of {last.stats.prompt_tokens:,} prompt tokens were cached")
        drafted, accepted = sum(stats.drafted for stats in every), sum(stats.accepted for stats in every)
        rate = f", {accepted / drafted:.0%} of {drafted:,} draft tokens accepted" if drafted else ""
        new, seconds = sum(stats.new_tokens for stats in every), sum(stats.seconds for stats in every)
        note(f"all {len(every)} answers: {new:,} tokens, {new / seconds:.1f} tokens/s{rate}")
        used = last.stats.prompt_tokens + last.stats.new_tokens
        note(f"context: {used:,} of {self.lm.backend.context_length:,} tokens")

    def do_save(self, argument: str) -> None:
        """/save FILE: write the conversation to FILE.json, for /load, specbeam generate --prompts and Python."""
        if not argument.endswith((".json", ".jsonl")):
            raise SpecbeamError(f"/save {argument}: give the name of a file that ends with .json")
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        with file_errors(f"/save {argument}: the file cannot be written"):
            path = Path(argument).expanduser().resolve()
            if path.exists() and path not in self.own_files:
                raise SpecbeamError(f"/save {argument}: there is such a file already, give another name")
            with printing_to(str(path)) as file:
                print(json.dumps([*system, *self.messages], ensure_ascii=False), file=file)
        self.own_files.add(path)
        note(f"[{len(self.messages)} messages are in {argument}]")

    def do_load(self, argument: str) -> None:
        """/load FILE: go on with a conversation that /save wrote, and with its system message if it has one."""
        if not argument:
            raise SpecbeamError("/load: give the name of a file that /save wrote")
        with file_errors(f"/load {argument}: the file cannot be read"):
            path = Path(argument).expanduser().resolve()
            text = path.read_text(encoding="utf-8")
        try:
            conversation: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SpecbeamError(f"/load {argument}: the file is not JSON ({error})") from error
        conversation = conversation.get("messages") if isinstance(conversation, dict) else conversation
        if not is_conversation(conversation):
            raise SpecbeamError(f'/load {argument}: a conversation is a list of messages with "role" and "content"')
        self.results = []
        if conversation[0]["role"] == "system":
            self.system = conversation[0]["content"]
        self.messages = [message for message in conversation if message["role"] != "system"]
        self.own_files.add(path)
        note(f"[{len(self.messages)} messages]")
        if self.messages[-1]["role"] == "user":
            self.answer(self.messages)


def value_of(name: str, text: str) -> dict[str, Any] | None:
    """The option that a user writes, with its value as JSON or as it is; None if there is no value."""
    if not text:
        return None
    if text == "default":
        return {name: MAX_NEW_TOKENS if name == "max_new_tokens" else None}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    if name == "stop_strings" and not isinstance(value, str | list):
        value = text
    return {name: unescaped(text) if value is text else value}


def number(value: Any) -> str:
    """The value of an option, for a person."""
    return f"{value:g}" if isinstance(value, float) else shown(value)


def precision_of(lm: LanguageModel) -> str:
    """The precision and the device of a model, for a person."""
    precision, device = lm.backend.precision, lm.backend.device
    if precision in ("int8", "int4"):
        return f"on the {device} with weights rounded to {precision[3:]} bits (--dtype float32 does not round them)"
    stored = "" if precision.startswith(("float", "bfloat")) else "the file's own weights in "
    return f"on the {device} with {stored}{precision}"


@contextlib.contextmanager
def file_errors(what: str) -> Iterator[None]:
    """One line that begins with ``what``, in place of an error of the file system or of the file's name.

    Raises:
        SpecbeamError: a file cannot be used, or no file can have its name (a user who does not exist, a NUL byte).
    """
    try:
        yield
    except SpecbeamError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecbeamError(f"{what} ({reason})") from error


def is_conversation(messages: Any) -> bool:
    """Whether these are chat messages: perhaps a system message first, then user and assistant in turn."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return False
    roles = [message.get("role") for message in messages]
    roles = roles[1:] if roles[:1] == ["system"] else roles
    in_turn = all(role == ("user", "assistant")[at % 2] for at, role in enumerate(roles))
    return bool(roles) and in_turn and all(isinstance(message.get("content"), str) for message in messages)


def note(text: str, end: str = "\n") -> None:
    """Print a line that is no part of the conversation."""
    dim = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print(f"\x1b[2m{text}\x1b[0m" if dim else text, file=sys.stderr, end=end, flush=True)


def shown_changes(changes: Sequence[Delta], had_thoughts: bool) -> str:
    """Print what is new in an answer, thoughts as notes. Returns the text of the answer itself.

    Args:
        had_thoughts: thoughts were printed last.
    """
    text = ""
    for change in changes:
        if change.thoughts:
            note(change.thoughts, end="")
            had_thoughts = True
        elif change.content:
            if had_thoughts:
                note("\n")
                had_thoughts = False
            text += change.content
            print(change.content, end="", flush=True)
    return text


def piped_line() -> str:
    """A line of standard input. A backslash at its end continues it."""
    lines = [sys.stdin.readline()]
    while lines[-1].endswith("\\\n"):
        lines.append(sys.stdin.readline())
    if not lines[0]:
        raise EOFError
    return "".join(line.replace("\\\n", "\n") for line in lines).removesuffix("\n")


def line_reader(commands: list[str]) -> Callable[[], str]:
    """A function that lets the user edit and send a message, and recall earlier ones.

    Where nothing is typed, Ctrl-C twice or Ctrl-D ends the chat.

    Args:
        commands: Tab completes them.
    """
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.application import run_in_terminal
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.formatted_text import ANSI
        from prompt_toolkit.key_binding import KeyBindings
        from prompt_toolkit.shortcuts import CompleteStyle
    except ImportError:
        return plain_line
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")  # Alt-Enter
    def begin_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    leaves = False  # at the next Ctrl-C

    @keys.add("c-c")
    def clear_or_leave(event: Any) -> None:
        nonlocal leaves
        if event.current_buffer.text:
            event.current_buffer.reset()
        elif leaves:
            event.app.exit(exception=EOFError)
        else:
            leaves = True
            run_in_terminal(lambda: note(ONCE_MORE))

    session: Any = PromptSession(
        ANSI("> " if "NO_COLOR" in os.environ else "\x1b[1;32m>\x1b[0m "),
        multiline=True,
        prompt_continuation="  ",
        key_bindings=keys,
        completer=WordCompleter(commands, sentence=True),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        reserve_space_for_menu=0,
    )

    def stay(_: Any = None) -> None:
        nonlocal leaves
        leaves = False

    session.default_buffer.on_text_changed += stay

    def read() -> str:
        stay()
        return str(session.prompt())

    return read


def plain_line() -> str:
    """A message from a terminal without prompt_toolkit. A backslash at the end of a line continues it."""
    typed: Callable[[], str] = str
    with contextlib.suppress(ImportError):
        import readline  # lets input() edit lines and recall earlier ones

        typed = readline.get_line_buffer
    leaves = False  # at the next Ctrl-C
    while True:
        try:
            line = input("> ")
            while line.endswith("\\"):
                line = f"{line[:-1]}\n{input('  ')}"
            return line
        except KeyboardInterrupt:
            print()
            if typed():
                leaves = False
            elif leaves:
                raise EOFError from None
            else:
                leaves = True
                note(ONCE_MORE)
