"""Arguments of tool calls: how formats write them, and how they become JSON while the answer grows.

Most models write JSON. Qwen3-Coder writes each argument as a text between tags, LFM2 as in a call of Python, and
Gemma 4 in a notation of its own.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specbeam.structured.disjoint import json_type
from specbeam.structured.json_schema import target_of

TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
PYTHON_WORDS = {"True": True, "False": False, "None": None}
WORDS: Mapping[str, Any] = {"true": True, "false": False, "null": None, **PYTHON_WORDS}
NUMBER = re.compile(r"-?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")
SPACES = re.compile(r"\s*")
PARTS = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
"""Of JSON: a string, which may be cut, or a bracket."""
TAG = re.compile(r"\s*(?:</function>|<parameter=(?P<key>[^>\n]*)>)")
"""The end of arguments between tags, or the beginning of the next one."""
WORD, BARE_WORD = re.compile(r"[^\s,\]})]*"), re.compile(r"[^,\]})]*")
PYTHON_STRING = re.compile(r"""\"(?:[^"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'""", re.DOTALL)
PYTHON_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(\n)|(.))", re.DOTALL)
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"}
QUOTES = {"\\": "\\", '"': '"', "'": "'", "/": "/"}
MAX_DEPTH = 100
"""Levels of lists and objects that are read."""
Read = tuple[str, int, bool]
"""The arguments as JSON, as far as they are final, the position behind them, and whether they are whole."""


class Cut(Exception):
    """The text ends within a value."""


class Syntax(ABC):
    """How a format writes the arguments of a call.

    Attributes:
        marks: the texts by which it separates arguments, which may be control tokens.
    """

    marks = ""

    @abstractmethod
    def write(self, arguments: Mapping[str, Any]) -> str:
        """The text of some arguments."""

    @abstractmethod
    def read(self, text: str, begin: int, schema: Any, scanned: dict[int, Any]) -> Read:
        """The arguments in a text from a position on.

        Args:
            schema: the JSON Schema of the arguments, which gives texts their types.
            scanned: what this method remembers of a text that grows, by positions.
        """


class Json(Syntax):
    """An object of JSON. It is passed on as it was written."""

    def write(self, arguments: Mapping[str, Any]) -> str:
        return json.dumps(arguments, ensure_ascii=False)

    def read(self, text: str, begin: int, schema: Any, scanned: dict[int, Any]) -> Read:
        at, depth = scanned.get(begin, (begin, 0))
        for part in PARTS.finditer(text, at):
            if part[0][0] == '"' and part.end() == len(text):
                break  # a string that may go on
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(part[0], 0)
            scanned[begin] = part.end(), depth
            if depth == 0:
                scanned[begin] = begin, 0
                return text[begin : part.end()], part.end(), True
        return text[begin:], len(text), False


@dataclass(frozen=True)
class Tagged(Syntax):
    """Qwen3-Coder's and Qwen3.5's: a text between ``<parameter=NAME>`` and ``</parameter>`` for each argument.

    A text has the type that the schema of its argument gives. Models write a line break before and behind it.
    """

    begin: str = "<parameter="
    named: str = ">\n"
    end: str = "\n</parameter>\n"
    marks = "<parameter= </parameter> </function>"

    def write(self, arguments: Mapping[str, Any]) -> str:
        return "".join(f"{self.begin}{key}{self.named}{_shown(value)}{self.end}" for key, value in arguments.items())

    def read(self, text: str, begin: int, schema: Any, scanned: dict[int, Any]) -> Read:
        members, at = scanned.get(begin, (Members(), begin))
        closing = self.end.strip()
        while (opened := TAG.match(text, at)) is not None:
            if (key := opened["key"]) is None:
                return members.whole(), opened.end(), True
            start = opened.end()
            if start == len(text):
                break
            start += text.startswith("\n", start)
            of_key = argument_schema(schema, key)
            types = types_of(of_key, schema)
            if (end := text.find(closing, start)) < 0:
                certain = self._certain(text[start:]) if types == {"string"} else None
                return members.begun(key, certain), len(text), False
            value = text[start:end].removesuffix("\n")
            members.add(key, value if types == {"string"} else typed(value, types, of_key))
            at = end + len(closing)
            scanned[begin] = members, at
        return members.cut(), len(text), False

    def _certain(self, text: str) -> str:
        """The beginning of a text, without what may belong to its end."""
        end = text.rfind("\n")
        return (
            text[:end] if end >= 0 and self.end.startswith(text[end:]) else _without_beginning(text, self.end.strip())
        )


@dataclass(frozen=True)
class Notation(Syntax):
    """Arguments as a call of Python has them, or Gemma 4's.

    Attributes:
        first, last: what comes before and behind all arguments.
        assign: what stands between the name of an argument and its value.
        item, key: what stands between items, and between a key and its value, within values.
        words: how true, false and null are written.
        quote: what stands around strings, which have no escapes; None for Python's strings.
    """

    first: str
    last: str
    assign: str
    item: str
    key: str
    words: tuple[str, str, str]
    quote: str | None = None

    @property
    def marks(self) -> str:  # type: ignore[override]
        return self.quote or ""

    def write(self, arguments: Mapping[str, Any]) -> str:
        members = (f"{key}{self.assign}{self.value(value)}" for key, value in arguments.items())
        return f"{self.first}{self.item.join(members)}{self.last}"

    def value(self, value: Any) -> str:
        """The text of a value."""
        if isinstance(value, dict):
            members = (f"{self.named(key)}{self.key}{self.value(one)}" for key, one in value.items())
            return f"{{{self.item.join(members)}}}"
        if isinstance(value, list):
            return f"[{self.item.join(map(self.value, value))}]"
        if isinstance(value, str):
            return self.string(value)
        for known, word in zip((True, False, None), self.words, strict=True):
            if value is known:
                return word
        return json.dumps(value)

    def string(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False) if self.quote is None else f"{self.quote}{text}{self.quote}"

    def named(self, key: str) -> str:
        """The key of an object within a value."""
        return self.string(key) if self.quote is None or not re.fullmatch(BARE_KEY, key) else key

    def read(self, text: str, begin: int, schema: Any, scanned: dict[int, Any]) -> Read:
        members, at = scanned.get(begin, (Members(), begin))
        try:
            if self.first and at == begin:
                at = self._expect(text, self._after(text, at), self.first)
            while not self._is_at(text, at := self._next(text, at, bool(members.written)), self.last):
                name, at = self._name(text, at, self.assign)
                at = self._after(text, self._expect(text, self._after(text, at), self.assign))
                try:
                    value, at = self._read(text, at, 0)
                except Cut:
                    return members.begun(name, self._certain(text, at)), len(text), False
                members.add(name, value)
                scanned[begin] = members, at
            return members.whole(), at + len(self.last), True
        except (Cut, ValueError):
            return members.cut(), len(text), False

    def _certain(self, text: str, at: int) -> str | None:
        """The beginning of a string without escapes that is cut; None for another value."""
        if self.quote is None or not text.startswith(self.quote, at):
            return None
        return _without_beginning(text[at + len(self.quote) :], self.quote)

    def _read(self, text: str, at: int, depth: int) -> tuple[Any, int]:
        """A value, and the position behind it."""
        at = self._after(text, at)
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        if self.quote is not None and self._is_at(text, at, self.quote):
            begin = at + len(self.quote)
            if (end := text.find(self.quote, begin)) < 0:
                raise Cut
            return text[begin:end], end + len(self.quote)
        first = text[at : at + 1]
        if self.quote is None and first in ('"', "'"):
            if (found := PYTHON_STRING.match(text, at)) is None:
                raise Cut
            return _unescaped(found[0][1:-1]), found.end()
        if first == "{":
            return self._items(text, at + 1, depth, "}")
        if first in ("[", "("):
            return self._items(text, at + 1, depth, "]" if first == "[" else ")")
        return self._word(text, at)

    def _items(self, text: str, at: int, depth: int, last: str) -> tuple[Any, int]:
        """The items of a list, or the members of an object."""
        items: list[Any] = []
        members: dict[str, Any] = {}
        while not self._is_at(text, at := self._next(text, at, bool(items or members)), last):
            if last == "}":
                key, at = self._name(text, at, ":")
                at = self._expect(text, self._after(text, at), ":")
                members[key], at = self._read(text, at, depth + 1)
            else:
                value, at = self._read(text, at, depth + 1)
                items.append(value)
        return (members if last == "}" else items), at + 1

    def _name(self, text: str, at: int, before: str) -> tuple[str, int]:
        """The name of an argument or of a member, which may be a string."""
        is_string = text[at : at + 1] in ('"', "'") if self.quote is None else self._is_at(text, at, self.quote)
        if is_string:
            name, at = self._read(text, at, 0)
            return str(name), at
        if (end := text.find(before, at)) < 0:
            raise Cut
        if not (name := text[at:end].strip()):
            raise ValueError("no name")
        return name, end

    def _word(self, text: str, at: int) -> tuple[Any, int]:
        """A number, a word, or in Gemma's notation a string without quotation marks."""
        found = (WORD if self.quote is None else BARE_WORD).match(text, at)
        assert found is not None
        if found.end() == len(text):
            raise Cut
        word = found[0].strip()
        if word in WORDS:
            return WORDS[word], found.end()
        if NUMBER.fullmatch(word):
            return (int(word) if word.lstrip("-").isdigit() else float(word)), found.end()
        if self.quote is None or not word:
            raise ValueError("no value")
        return word, found.end()

    def _next(self, text: str, at: int, is_behind: bool) -> int:
        """The position of the next item, behind the comma if another one is before it."""
        at = self._after(text, at)
        return self._after(text, at + 1) if is_behind and text.startswith(",", at) else at

    def _after(self, text: str, at: int) -> int:
        """The position behind spaces."""
        found = SPACES.match(text, at)
        assert found is not None
        return found.end()

    def _expect(self, text: str, at: int, what: str) -> int:
        if not self._is_at(text, at, what):
            raise ValueError(f"no {what}")
        return at + len(what)

    def _is_at(self, text: str, at: int, what: str) -> bool:
        """Whether a text is at a position."""
        if what.startswith(text[at : at + len(what)]) and at + len(what) > len(text):
            raise Cut
        return text.startswith(what, at)


BARE_KEY = r"[A-Za-z_][A-Za-z0-9_.-]*"
"""Of an object in Gemma's notation."""
JSON = Json()
TAGGED = Tagged()
PYTHON = Notation("", ")", "=", ", ", ": ", ("True", "False", "None"))
GEMMA = Notation("{", "}", ":", ",", ":", ("true", "false", "null"), quote='<|"|>')


@dataclass
class Members:
    """The members of an object, as JSON that only grows."""

    written: list[str] = field(default_factory=list)

    def add(self, key: str, value: Any) -> None:
        self.written.append(f"{_dumped(key)}: {_dumped(value)}")

    def cut(self) -> str:
        """The JSON so far."""
        return "{" + ", ".join(self.written)

    def whole(self) -> str:
        return self.cut() + "}"

    def begun(self, key: str, text: str | None) -> str:
        """The JSON so far, with the beginning of a string if there is one."""
        if text is None:
            return self.cut()
        return "{" + ", ".join([*self.written, f"{_dumped(key)}: {_dumped(text)[:-1]}"])


def argument_schema(schema: Any, key: str) -> Any:
    """The schema of an argument."""
    schema = resolved(schema, schema)
    if not isinstance(schema, dict):
        return True
    properties = schema.get("properties")
    others = schema.get("additionalProperties", True)
    return properties.get(key, others) if isinstance(properties, dict) else others


def resolved(schema: Any, root: Any) -> Any:
    """A schema without a reference at its top. A reference that leads nowhere allows anything."""
    seen = 0
    while isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        schema = target_of(root, schema["$ref"])
        schema, seen = (True, seen) if schema is None or seen > MAX_DEPTH else (schema, seen + 1)
    return schema


def types_of(schema: Any, root: Any, within: tuple[int, ...] = ()) -> frozenset[str]:
    """The types of values that a schema may allow. All numbers of the type "number" may be integers.

    Args:
        within: the schemas around it, whose types it cannot add to.
    """
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or id(schema) in within:
        return TYPES if schema is not False and not isinstance(schema, dict) else frozenset()
    within = (*within, id(schema))
    kind = schema.get("type")
    types = TYPES if kind is None else frozenset([kind] if isinstance(kind, str) else kind)
    types |= {"integer"} if "number" in types else frozenset()
    if (values := listed(schema)) is not None:
        types &= {type_of(value) for value in values}
    for name in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(name), list):
            types &= frozenset[str]().union(*(types_of(one, root, within) for one in parts))
    for one in schema.get("allOf") or ():
        types &= types_of(one, root, within)
    return types


def listed(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema lists; None if it lists none."""
    if isinstance(values := schema.get("enum"), list):
        return values
    return [schema["const"]] if "const" in schema else None


def type_of(value: Any) -> str:
    """The type of a value. A number without a fraction is an integer."""
    kind = json_type(value)
    return "integer" if kind == "number" and float(value).is_integer() else kind


def typed(text: str, types: frozenset[str], schema: Any) -> Any:
    """The value that a text stands for, where a schema allows others than strings.

    A text that can be a value of another type is that value.
    """
    word = text.strip()
    try:
        value = PYTHON_WORDS[word] if word in PYTHON_WORDS else json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, str):
        return text
    if isinstance(schema, dict) and (values := listed(schema)) is not None and value not in values:
        return text
    return value if type_of(value) in types or "string" not in types else text


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _shown(value: Any) -> str:
    """A value as a text between tags."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _without_beginning(text: str, end: str) -> str:
    """A text without its own end, where that may begin another text."""
    for size in range(min(len(end) - 1, len(text)), 0, -1):
        if text.endswith(end[:size]):
            return text[:-size]
    return text


def _unescaped(text: str) -> str:
    """A string of Python, from the text between its quotation marks."""

    def character(found: re.Match[str]) -> str:
        code = next((digits for digits in found.groups()[:3] if digits), None)
        if code is not None:
            return chr(min(int(code, 16), 0x10FFFF))
        if found[4] is not None:
            return ""
        return ESCAPED.get(found[5]) or QUOTES.get(found[5]) or found[0]

    made = PYTHON_ESCAPE.sub(character, text)
    return made.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # two halves of a pair are a character
