"""The command line. Each command is one file."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from typing import Any, NoReturn

from specbeam.cli.printing import buffered, one_line
from specbeam.errors import BAD_INPUT, FAILED, INTERRUPTED, SpecbeamError
from specbeam.options.names import nearest_name

COMMANDS = [
    *("generate", "chat", "serve", "demo", "compare", "batch", "transcribe"),
    *("score", "study", "verify", "ladder", "tokens", "models"),
]
"""In the order of ``--help``. Each is a module beside this one."""
OTHER_WORDS = {
    "run": "chat --model MODEL",
    "pull": "models pull MODEL",
    "list": "models list",
    "ls": "models list",
    "ps": "models list",
    "show": "models show MODEL",
    "rm": "models rm MODEL",
}
"""Commands of ollama, and what they are here."""
PATHS = ("FILE", "DIR", "IN", "OUT", "SOURCE")
"""The metavars of arguments that may be paths."""


class CommandsHelp(argparse.HelpFormatter):
    """Gives the names of commands their room: argparse forgets that they are indented."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += self._indent_increment


class Parser(argparse.ArgumentParser):
    """Reports a usage error in one line, and suggests the nearest name for an unknown one.

    Paths may begin with "~", which shells leave alone in quotes and after "=".
    """

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stdout:
            file.write(message)  # argparse ignores errors, also of a full disk
        else:
            super()._print_message(message, file)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:  # type: ignore[override]
        parsed, rest = super().parse_known_args(args, namespace)
        for word in rest:
            if word == "--":
                break
            if word.startswith("-"):  # this command's names are suggested, no other command's
                self.error(f"unknown option {word}{self._hint(word)}")
        return parsed, rest

    def _hint(self, word: str) -> str:
        names = {name.strip("-").replace("-", "_"): name for name in self._option_string_actions}
        if near := nearest_name(word.partition("=")[0].strip("-"), [*names]):
            return f": did you mean {names[near]}?"
        return ": put -- before a text that begins with a dash" if word[1:2] != "-" else ""

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        return super()._get_value(action, os.path.expanduser(text) if action.metavar in PATHS else text)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = [str(name) for name in action.choices]
        allowed = f"give {', '.join(names[:-1])} or {names[-1]}"
        if isinstance(action, argparse._SubParsersAction):
            near = nearest_name(str(value), names)
            if action.dest == "command" and value in OTHER_WORDS:
                near = f"{self.prog} {OTHER_WORDS[value]}"
            self.error(f"unknown {action.dest} {value!r}: {f'did you mean {near!r}?' if near else allowed}")
        raise argparse.ArgumentError(action, f"{value!r} is not allowed: {allowed}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status: 0, or FAILED, BAD_INPUT or INTERRUPTED.

    A command may raise ``KeyboardInterrupt(message)``, to say after Ctrl-C what is finished and how to go on.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without a character shows "?"
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with redirect_stdout(buffered(sys.stdout)):
            try:
                return _run(arguments)
            finally:  # after --help, too
                sys.stdout.flush()
    except SpecbeamError as error:
        print(f"specbeam: {_with_flags(error, arguments)}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt as interrupt:
        print(": ".join(["specbeam: interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        # The reader of our output is gone, or the disk is full. Without this, Python complains again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):
            what = "cannot write the output" if error.filename is None else error.filename
            print(f"specbeam: {what}: {error.strerror or error}", file=sys.stderr)
        return FAILED


def _with_flags(error: SpecbeamError, arguments: Sequence[str]) -> str:
    """The message of an error, with flags that were typed in place of the Python names of its options."""
    flags = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    typed = {flag.strip("-").replace("-", "_"): flag for flag in flags}
    message = one_line(error)
    for option in error.options:
        message = message.replace(f"{option}=", f"{typed.get(option, option)}=")
    return message


def _run(words: list[str]) -> int:
    about = "Exact and fast decoding of open causal language models."
    parser = Parser(prog="specbeam", description=about, formatter_class=CommandsHelp)
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in words[:1] if words and words[0] in COMMANDS else COMMANDS:  # one parser is made sooner than all
        import_module(f"specbeam.cli.{command}").add_to(commands)
    explain = commands.add_parser("help", help="explain a command, as COMMAND --help does")
    explain.add_argument("name", nargs="?", choices=[*commands.choices], metavar="COMMAND", help="the command")
    if "_ARGCOMPLETE" in os.environ:  # the shell asks how the line may go on (docs/reference/command-line.md)
        import argcomplete

        argcomplete.autocomplete(parser)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    end = words.index("--") if "--" in words else len(words)
    args, rest = parser.parse_known_args([*map(_dashes, words[:end]), *words[end:]])
    if args.command == "study" and not any(word.startswith("-") and word != "--" for word in rest):
        args.words += [word for word in rest if word != "--"]  # argparse stops taking words at an option
    elif rest:
        hint = f": did you mean --model {rest[0]}?" if args.command in ("chat", "serve", "demo") else ""
        parser.error(f"unexpected arguments: {' '.join(rest)}{hint}")
    if args.version:
        from specbeam.version import __version__

        print(__version__)
        return 0
    if args.command is None:
        parser.error(f"give a command: {', '.join(commands.choices)}")
    status: int = args.run(args)
    return status


def _dashes(argument: str) -> str:
    """Lets options be spelled as in Python: ``--max_new_tokens``."""
    name, equals, value = argument.partition("=")
    if not name.startswith("--") or any(c.isspace() for c in name):
        return argument
    return name.replace("_", "-") + equals + value
