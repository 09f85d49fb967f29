"""The command line. Each command is one file."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from specbeam.errors import BAD_INPUT, FAILED, INTERRUPTED, SpecbeamError


class Parser(argparse.ArgumentParser):
    """Reports a usage error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status: 0, or FAILED, BAD_INPUT or INTERRUPTED."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without a character shows "?"
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
        # The reader of our output is gone, or the disk is full. Without this, Python complains again at exit.
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
        given.words += [word for word in rest if word != "--"]  # argparse stops taking words at an option
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
    """Lets options be spelled as in Python: ``--max_new_tokens``."""
    name, equals, value = argument.partition("=")
    if not name.startswith("--") or any(c.isspace() for c in name):
        return argument
    return name.replace("_", "-") + equals + value
