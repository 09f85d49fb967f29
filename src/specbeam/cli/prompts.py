"""Prompts from the command line, from standard input and from files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specbeam.errors import SpecbeamError


def read_prompts(prompt: str | None, file: str | None) -> Iterator[tuple[str, Any]]:
    """The prompts, each with a name for error messages.

    Raises:
        SpecbeamError: no source or two, an unreadable file, or a line that is no prompt.
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
    for number, line in enumerate(_read(file).split("\n"), 1):  # splitlines() would also cut at U+2028
        line = line.removesuffix("\r")
        if line.strip():
            found += 1
            name = f"{file} line {number}"
            yield name, _json_prompt(name, line) if file.endswith((".jsonl", ".json")) else line
    if not found:
        raise SpecbeamError(f"{file} holds no prompts: put one on each line")


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
