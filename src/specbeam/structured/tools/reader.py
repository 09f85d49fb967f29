"""Reads tool calls in the text of an answer while it grows."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from specbeam.structured.tools.formats import ToolFormat
from specbeam.structured.tools.syntax import Json

SPACE = r"[ \n\r\t]*"
"""Of JSON."""
FENCE = rf"(?:```(?:json)?{SPACE})?"
GAP = re.compile(r"(?:[\s,;\]}`]|</tool_calls?>|<\|/tool_call\|>|<tool_call\|>|json)*")
"""What stands between calls in all formats, beside a marker."""


@dataclass(frozen=True)
class Call:
    """A call of a function.

    Attributes:
        arguments: JSON text; its beginning where the answer was cut.
    """

    name: str
    arguments: str


@dataclass(frozen=True)
class Delta:
    """What more text adds to an answer.

    Attributes:
        content: of the message.
        thoughts: before it.
        call: the number of the call that the rest belongs to; None for content.
        name: the name of a call that begins.
        arguments: more of a call's arguments.
    """

    content: str = ""
    call: int | None = None
    name: str | None = None
    arguments: str = ""
    thoughts: str = ""


class Reader:
    """Reads one answer. Special tokens that are markers must be written out in its text.

    Args:
        names: of the tools. Nothing else is called.
        max_calls: calls in an answer.
        schemas: the schemas of their arguments, by name, which give types to arguments that are written as texts.
        has_form: an answer without calls has a form of its own. So calls come first.

    Attributes:
        content: the content so far.
        calls: the calls so far. More text may add to the arguments of the last one.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        names: Collection[str],
        max_calls: int,
        *,
        schemas: Mapping[str, Any] | None = None,
        has_form: bool = False,
    ) -> None:
        self.content = ""
        self.calls: list[Call] = []
        self._text = ""
        self._settled = 0  # no call opens before this position
        self._scanned: dict[int, Any] = {}  # by the start of arguments, how far they are read
        self._has_form = has_form
        self._schemas = schemas or {}
        self._names, self._max_calls = names, max_calls
        self._format = tool_format
        self._head = re.compile(rf"\s*\[?\s*{tool_format.head}", re.DOTALL)
        marker, opened, begun = tool_format.marker, [], []
        for mark in filter(None, (marker, tool_format.also)):
            opened.append(re.escape(mark))
            begun.append(_begun([*map(re.escape, mark)]))
        if tool_format.bare:
            opened.append(rf"{FENCE}(?P<object>{bare(names, tool_format.key)})")
            name, key = (['"', word, '"', SPACE] for word in (r'(?P<begun>[^"\\]*)', r'[^"\\]*'))
            object_parts = [r"\{", SPACE, *'"name"', SPACE, ":", SPACE, *name, ",", SPACE, *key, ":"]
            begun += [_begun([*"```", *"json"]), FENCE + _begun(object_parts)]
        if tool_format.prompt_marks:
            opened.append(rf"\A\s*(?=(?:{'|'.join(map(re.escape, names))})[ \t]*\r?\n)")
            spelled = ([*map(re.escape, name), r"[ \t]+"] for name in names)
            begun += [rf"\A\s*{_begun(parts)}" for parts in spelled]
        self._opening = re.compile("|".join(opened))
        self._begun = re.compile(rf"(?:{'|'.join(begun)})\Z")

    def push(self, text: str, is_last: bool = False, is_cut: bool = False) -> list[Delta]:
        """What more text adds. After the last text nothing is held that might have begun a call.

        Args:
            is_cut: a limit ended the answer with this text. What has begun a call is none of its content then.
        """
        self._text += text
        content, calls = self._read(is_last, is_cut)
        deltas = []
        if more := content[len(self.content) :]:
            deltas.append(Delta(more))
        for number, call in enumerate(calls):
            is_new = number >= len(self.calls)
            more = call.arguments if is_new else call.arguments[len(self.calls[number].arguments) :]
            if is_new or more:
                deltas.append(Delta("", number, call.name if is_new else None, more))
        self.content, self.calls = content, calls
        return deltas

    def _read(self, is_last: bool, is_cut: bool) -> tuple[str, list[Call]]:
        """The content and the calls of the text so far."""
        text = self._text
        opening = self._opening.search(text, self._settled)
        if opening is not None and self._has_form and text[: opening.start()].strip():
            opening = None
        if opening is None:
            held = self._begun.search(text, self._settled)
            assert held is not None
            self._settled = held.start()
            is_content = is_last and not (is_cut and self._begins_call(held))
            return text if is_content else text[: held.start()].rstrip(), []
        at = opening.end() if opening.groupdict().get("object") is None else opening.start("object")
        calls = self._calls(at)
        is_content = is_last and not is_cut and not calls
        return text if is_content else text[: opening.start()].rstrip(), calls

    def _begins_call(self, held: re.Match[str]) -> bool:
        """Whether a call may have begun where an answer was cut. Before a first one there may be space alone."""
        name = held.groupdict().get("begun")
        if name is not None and not any(known.startswith(name) for known in self._names):
            return False
        is_first = not self._text[: held.start()].strip()
        return is_first or (bool(held[0]) and not self._has_form)

    def _calls(self, at: int) -> list[Call]:
        """The calls in the text from a position on."""
        text, marker, calls = self._text, self._format.marker, list[Call]()
        is_json = isinstance(self._format.syntax, Json)
        while len(calls) < self._max_calls:
            if (head := self._head.match(text, at)) and head["name"] in self._names:
                schema = self._schemas.get(head["name"], True)
                arguments, end, is_whole = self._format.syntax.read(text, head.end(), schema, self._scanned)
                calls.append(Call(head["name"], arguments))
                if not is_whole:
                    return calls
            elif is_json and (found := _object(text, at)) and found[1].name in self._names:
                end, call = found
                calls.append(call)
            else:
                return calls
            gap = GAP.match(text, end)
            assert gap is not None
            at = gap.end()
            if marker and text.startswith(marker, at):
                at += len(marker)
            elif is_json and not text.startswith("{", at):
                return calls
        return calls


def bare(names: Collection[str], key: str) -> str:
    """A regular expression for the beginning of an object that calls one of some functions."""
    names = [*map(re.escape, names)]
    parts = (r"\{", '"name"', ":", f'"(?:{"|".join(names)})"', ",", f'"{key}"', ":")
    return SPACE.join(parts)


def _begun(parts: list[str]) -> str:
    """A regular expression that matches every beginning of a sequence of expressions, also the empty one."""
    return reduce(lambda rest, part: f"(?:{part}{rest})?", reversed(parts), "")


def _object(text: str, begin: int) -> tuple[int, Call] | None:
    """A call whose keys have another order, and where its object ends."""
    if (start := text.find("{", begin)) < 0:
        return None
    try:
        found, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    arguments = found.get("arguments", found.get("parameters"))
    if not isinstance(found.get("name"), str) or not isinstance(arguments, dict):
        return None
    return end, Call(found["name"], json.dumps(arguments, ensure_ascii=False))
