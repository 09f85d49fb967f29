"""Prompts from the command line, from standard input and from files, and templates that rows of a file fill."""

from __future__ import annotations

import json
import string
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbeam.errors import SpecbeamError
from specbeam.options.names import nearest_name
from specbeam.text.escapes import hint_for_prompt

if TYPE_CHECKING:
    from specbeam.jobs.formats import Rows


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
    """The prompt, or the prompts of a file."""
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
    count = 0
    for name, line in read_lines(file):
        count += 1
        yield _json_row(name, line) if file.endswith((".jsonl", ".json")) else PromptRow(name, line)
    if not count:
        raise SpecbeamError(f"{_shown(file)} holds no prompts: put one on each line")


def read_lines(file: str) -> Iterator[tuple[str, str]]:
    """The lines of a file (- for standard input) that are not empty, each with its place for messages."""
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


class Template:
    """The text of a prompt with columns in braces, such as ``{review}``. ``{{`` and ``}}`` stand for braces.

    Args:
        name: of the file, for messages.
        text: of the file. One line end at its end is no part of the prompt: editors put it there.

    Attributes:
        text: without that line end.
        columns: the names in braces, each once.
    """

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text.replace("\r\n", "\n").removesuffix("\n")
        self._parts: list[tuple[str, str | None]] = []  # a text, and the column that follows it
        try:
            for before, column, form, conversion in string.Formatter().parse(self.text):
                self._parts.append((before, column))
                if column == "" or form or conversion:
                    raise ValueError("braces hold the name of a column, and nothing else")
        except ValueError as error:
            raise SpecbeamError(
                f"{name} is no template ({error}): write {{{{ and }}}} for braces in the text"
            ) from error
        self.columns = [*dict.fromkeys(column for _, column in self._parts if column is not None)]
        if not self.columns:
            raise SpecbeamError(f"{name} names no column, so all prompts would be the same: write {{review}} or so")

    def check(self, rows: Rows) -> None:
        """Raise SpecbeamError if the rows lack a column of the template."""
        for name in self.columns:
            if name not in rows.columns:
                near = nearest_name(name, rows.columns)
                hint = f"did you mean {{{near}}}? " if near else ""
                columns = ", ".join(rows.columns)
                message = f"{self.name} has {{{name}}}, but {rows.path} has no such column"
                raise SpecbeamError(f"{message}: {hint}there are {columns}; {{{{ and }}}} stand for braces")

    def fill(self, cells: Mapping[str, Any]) -> str | SpecbeamError:
        """The prompt of a row, or why it has none. A text stands there as it is, and another value as JSON has it."""
        from specbeam.jobs.formats import json_of

        texts = []
        for before, column in self._parts:
            texts.append(before)
            if column is not None:
                if (value := cells[column]) is None:
                    return SpecbeamError(f"the row has no {column}")
                try:
                    texts.append(value if isinstance(value, str) else json_of(value))
                except (TypeError, ValueError) as error:
                    return SpecbeamError(f"the row's {column} cannot stand in a prompt: {error}")
        return "".join(texts)
