"""Prompts from the command line, from standard input and from files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbeam.errors import SpecbeamError
from specbeam.text.escapes import hint_for_prompt


@dataclass(frozen=True)
class PromptRow:
    """A prompt, and what else its line says.

    Attributes:
        name: the file and the line, for error messages; empty without a file.
        prompt: as it is given: a text, messages or token ids.
        fields: the other fields, if the line is a JSON object.
    """

    name: str
    prompt: Any
    fields: Mapping[str, Any] = field(default_factory=dict)


def read_rows(prompt: str | None, file: str | None) -> Iterator[PromptRow]:
    """The prompt, or the prompts of a file.

    Raises:
        SpecbeamError: no source or two, an unreadable file, or a line that is no prompt.
    """
    if (prompt is None) == (file is None):
        raise SpecbeamError("give one of PROMPT (- for standard input) and --prompts FILE")
    if prompt == "-":
        yield PromptRow("", _read("standard input").rstrip("\n"))
        return
    if prompt is not None:
        if hint := hint_for_prompt(prompt):
            print(f"specbeam: {hint}", file=sys.stderr)
        yield PromptRow("", prompt)
        return
    assert file is not None
    found = 0
    for name, line in read_lines(file):
        found += 1
        yield _json_row(name, line) if file.endswith((".jsonl", ".json")) else PromptRow(name, line)
    if not found:
        raise SpecbeamError(f"{_shown(file)} holds no prompts: put one on each line")


def read_lines(file: str) -> Iterator[tuple[str, str]]:
    """The lines of a file (- for standard input) that are not empty, each with its place for messages.

    Raises:
        SpecbeamError: the file cannot be read.
    """
    for number, line in enumerate(_read(_shown(file)).split("\n"), 1):  # splitlines() would also cut at U+2028
        if line.strip():
            yield f"{_shown(file)} line {number}", line.removesuffix("\r")


def read_text(file: str) -> str:
    """The text of a file (- for standard input). Raises SpecbeamError if it cannot be read."""
    return _read(_shown(file))


def read_json(name: str, line: str) -> Any:
    """The value on a line. Raises SpecbeamError if it is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SpecbeamError(f"{name} is not JSON: {error}") from error


def _shown(file: str) -> str:
    return "standard input" if file == "-" else file


def _read(file: str) -> str:
    try:
        data = sys.stdin.buffer.read() if file == "standard input" else Path(file).read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise SpecbeamError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpecbeamError(f"{file} is not UTF-8 text (byte {error.start:,}): convert it") from error


def _json_row(name: str, line: str) -> PromptRow:
    value = read_json(name, line)
    if isinstance(value, dict):
        match [key for key in ("prompt", "messages") if key in value]:
            case [key]:
                return PromptRow(name, value.pop(key), value)
            case [_, _]:
                raise SpecbeamError(f'{name} has both "prompt" and "messages": leave one out')
        raise SpecbeamError(
            f'{name} has neither "prompt" nor "messages", but {", ".join(map(repr, value)) or "nothing"}'
        )
    return PromptRow(name, value)
