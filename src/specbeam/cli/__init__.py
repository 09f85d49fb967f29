"""The command line: one file a command."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from specbeam.errors import SpecbeamError

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0, 1 if something failed, 2 for wrong input, 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows another one
    try:
        status = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return status
    except SpecbeamError as error:
        print(f"specbeam: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("specbeam: interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        # Whoever read our output has gone, or its disk is full; Python would complain once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):
            print(f"specbeam: cannot write the output: {error.strerror or error}", file=sys.stderr)
        return FAILED


def _run(words: list[str]) -> int:
    from specbeam.cli import batch, compare, generate, ladder, models, study, tokens

    parser = Parser(prog="specbeam", description="Exact and fast decoding of open causal language models.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in (generate, compare, batch, study, ladder, tokens, models):
        command.add_to(commands)
    end = words.index("--") if "--" in words else len(words)
    given, rest = parser.parse_known_args([*map(_dashes, words[:end]), *words[end:]])
    if given.command == "study" and not any(word.startswith("-") and word != "--" for word in rest):
        given.words += [word for word in rest if word != "--"]  # argparse takes no more of them after an option
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if given.version:
        from specbeam import __version__

        print(__version__)
        return 0
    if given.command is None:
        parser.error("give a command: generate, compare, batch, study, ladder, tokens or models")
    status: int = given.run(given)
    return status


def _dashes(argument: str) -> str:
    """Options may be spelled as in Python: --max_new_tokens."""
    name, equals, value = argument.partition("=")
    if not name.startswith("--") or any(c.isspace() for c in name):
        return argument
    return name.replace("_", "-") + equals + value
