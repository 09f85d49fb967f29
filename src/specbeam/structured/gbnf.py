"""llama.cpp's grammars (GBNF), written in the syntax of Lark that llguidance reads.

llguidance splits a text into lexemes, which take as much as they can. llama.cpp reads it character by character.
So a grammar without recursion becomes one lexeme. In one with recursion each character is a lexeme, but in parts that
repeat large sets of characters, which are lexemes as a whole: otherwise a mask would take too long.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import NoReturn

from specbeam.errors import ConstraintError

MAX_NESTING = 100
MAX_REPETITIONS = 100_000
MAX_SET = 24
"""Characters of a set that are lexemes one by one. A mask takes too long over all tokens of larger sets."""
LAST = 0x10FFFF
SURROGATES = range(0xD800, 0xE000)
SPACE, SPACE_AND_LINES = re.compile(r"(?:[ \t]|#[^\r\n]*)*"), re.compile(r"(?:\s|#[^\r\n]*)*")
NEXT_ALTERNATIVE = re.compile(r"(?:\s|#[^\r\n]*)*\|")
NAME, RULE = re.compile(r"[a-zA-Z0-9_-]+"), re.compile(r"([a-zA-Z0-9_-]+)[ \t]*::=")
COUNTS = re.compile(r"\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}")
HEX = {"x": 2, "u": 4, "U": 8}
"""The escapes with digits, and how many they have."""
PLAIN = {"n": "\n", "r": "\r", "t": "\t"}
QUANTIFIERS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class Node:
    """A part of a rule."""


@dataclass(frozen=True, eq=False)
class Characters(Node):
    """One character of a set: ranges of code points."""

    ranges: tuple[tuple[int, int], ...]
    is_negated: bool = False

    @property
    def is_large(self) -> bool:
        return self.is_negated or sum(last - first + 1 for first, last in self.ranges) > MAX_SET

    def __str__(self) -> str:
        if not self.ranges and not self.is_negated:
            return r"/[^\s\S]/"
        ranges = "".join(rf"\u{{{first:x}}}-\u{{{last:x}}}" for first, last in self.ranges)
        return f"/[{'^' * self.is_negated}{ranges}]/" if ranges else "/(?s:.)/"


@dataclass(frozen=True, eq=False)
class Reference(Node):
    name: str


@dataclass(frozen=True, eq=False)
class Sequence(Node):
    parts: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Alternatives(Node):
    parts: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Repetition(Node):
    part: Node
    minimum: int
    maximum: int | None


def to_lark(source: str) -> str:
    """A grammar of llama.cpp in llguidance's syntax.

    Raises:
        ConstraintError: it is wrong. Names the line.
    """
    return _Writer(_Reader(source).rules()).grammar()


class _Reader:
    """Reads a grammar as llama.cpp does. Lines may also begin with ``|``, and any punctuation may be escaped."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0

    def rules(self) -> dict[str, Node]:
        """The rules by their names."""
        rules, wanted = dict[str, Node](), dict[str, int]()
        self._wanted = wanted
        self._skip(SPACE_AND_LINES)
        while self._at < len(self._source):
            found = self._take(RULE)
            if found is None:
                self._fail("there should be a rule, as in root ::= ...")
            if found[1] in rules:
                self._fail(f"the rule {found[1]} is defined twice")
            self._skip(SPACE_AND_LINES)
            rules[found[1]] = self._alternatives(0)
            if self._at < len(self._source) and self._source[self._at] not in "\r\n":
                self._fail(f"{self._source[self._at]!r} is not expected here")
            self._skip(SPACE_AND_LINES)
        if "root" not in rules:
            raise ConstraintError("the grammar has no rule root, with which texts begin: add root ::= ...")
        for name, self._at in wanted.items():
            if name not in rules:
                self._fail(f"the rule {name} is not defined")
        return rules

    def _alternatives(self, depth: int) -> Node:
        if depth > MAX_NESTING:
            self._fail(f"there are more than {MAX_NESTING} parentheses within each other")
        parts = [self._sequence(depth)]
        while self._take(NEXT_ALTERNATIVE):
            self._skip(SPACE_AND_LINES)
            parts.append(self._sequence(depth))
        return parts[0] if len(parts) == 1 else Alternatives(tuple(parts))

    def _sequence(self, depth: int) -> Node:
        parts = list[Node]()
        while (part := self._part(depth)) is not None:
            self._skip(SPACE_AND_LINES if depth else SPACE)
            for number in count():
                if (counts := self._counts()) is None:
                    break
                if number == MAX_NESTING:
                    self._fail(f"a part has more than {MAX_NESTING} quantifiers")
                part = Repetition(part, *counts)
                self._skip(SPACE_AND_LINES if depth else SPACE)
            parts.append(part)
        return Sequence(tuple(parts))

    def _part(self, depth: int) -> Node | None:
        begin = self._source[self._at : self._at + 1]
        if begin == '"':
            return self._text()
        if begin == "[":
            return self._set()
        if begin == ".":
            self._at += 1
            return Characters((), is_negated=True)
        if begin == "(":
            self._at += 1
            self._skip(SPACE_AND_LINES)
            part = self._alternatives(depth + 1)
            self._skip(SPACE_AND_LINES)
            if self._source[self._at : self._at + 1] != ")":
                self._fail("a ) is missing")
            self._at += 1
            return part
        if begin in ("<", "!"):
            self._fail("tokens in <...> are not supported: write their text")
        if begin and begin in "*+?{":
            self._fail(f"{begin} has nothing before it that it repeats")
        if (found := self._take(NAME)) is not None:
            self._wanted.setdefault(found[0], self._at)
            return Reference(found[0])
        return None

    def _text(self) -> Node:
        start, parts = self._at, list[Node]()
        self._at += 1
        while self._source[self._at : self._at + 1] != '"':
            if self._at >= len(self._source) or self._source[self._at] in "\r\n":
                self._at = start
                self._fail('a " at the end of a text is missing')
            parts.append(Characters(((one := self._character(), one),)))
        self._at += 1
        return Sequence(tuple(parts))

    def _set(self) -> Node:
        start, ranges = self._at, list[tuple[int, int]]()
        is_negated = self._source.startswith("^", self._at + 1)
        self._at += 1 + is_negated
        while self._source[self._at : self._at + 1] != "]":
            if self._at >= len(self._source):
                self._at = start
                self._fail("a ] is missing")
            first = last = self._character()
            if self._source[self._at : self._at + 1] == "-" and self._source[self._at + 1 : self._at + 2] not in "]":
                self._at += 1
                last = self._character()
            if first > last:
                self._fail(f"the range {chr(first)}-{chr(last)} ends before it begins")
            ranges.append((first, last))
        self._at += 1
        return Characters(tuple(ranges), is_negated)

    def _character(self) -> int:
        """The code point of a character that may be an escape."""
        one = self._source[self._at]
        self._at += 1
        if one != "\\":
            return ord(one)
        kind = self._source[self._at : self._at + 1]
        self._at += 1
        if kind in HEX and kind:
            digits = self._source[self._at : self._at + HEX[kind]]
            if not re.fullmatch(f"[0-9a-fA-F]{{{HEX[kind]}}}", digits):
                self._fail(f"\\{kind} needs {HEX[kind]} hexadecimal digits")
            self._at += HEX[kind]
            number = int(digits, 16)
            if number > LAST or number in SURROGATES:
                self._fail(f"\\{kind}{digits} is no character")
            return number
        if not kind or (kind.isalnum() and kind not in PLAIN):
            self._fail(f"\\{kind} is no escape: there are \\n, \\r, \\t, \\x41, \\u0041, \\U00000041, and punctuation")
        return ord(PLAIN.get(kind, kind))

    def _counts(self) -> tuple[int, int | None] | None:
        """How often the last part is repeated, if the source says so here."""
        begin = self._source[self._at : self._at + 1]
        if begin and begin in QUANTIFIERS:
            self._at += 1
            return QUANTIFIERS[begin]
        if begin != "{":
            return None
        found = self._take(COUNTS)
        if found is None or not (found[1] or (found[2] and found[3])):
            self._fail("repetitions are written as {2}, {2,} or {2,5}")
        minimum, maximum = (self._count(digits) for digits in (found[1] or "0", found[3] if found[2] else found[1]))
        if maximum is not None and maximum < (minimum or 0):
            self._fail(f"{found[0]} is no number of repetitions")
        return minimum or 0, maximum

    def _count(self, digits: str) -> int | None:
        if not digits:
            return None
        if len(digits) > len(str(MAX_REPETITIONS)) or int(digits) > MAX_REPETITIONS:
            self._fail(f"a part is repeated more than {MAX_REPETITIONS:,} times")
        return int(digits)

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._source, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def _skip(self, pattern: re.Pattern[str]) -> None:
        self._take(pattern)

    def _fail(self, problem: str) -> NoReturn:
        line = self._source.count("\n", 0, self._at) + 1
        raise ConstraintError(f"the grammar cannot be read: line {line}: {problem}")


class _Writer:
    """Writes rules in the syntax of Lark: those with recursion as rules, and others as terminals."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self.rules = rules
        self.lines = list[str]()
        self._large, self._repeats = set[str](), set[str]()
        self._empty, self._known = set[str](), set[str]()
        self._asked = list[str]()

    def grammar(self) -> str:
        self._numbers = {name: number for number, name in enumerate(self.rules)}
        below = {
            name: {part.name for part in _walk(node) if isinstance(part, Reference)}
            for name, node in self.rules.items()
        }
        order = _upwards(below)
        self._recursive = below.keys() - order
        for name in order:
            if self._may_be_empty(self.rules[name]):
                self._empty.add(name)
        self._large = _reaching(below, {n for n, node in self.rules.items() if self._has_large_set(node)})
        self._repeats = _reaching(below, {n for n, node in self.rules.items() if self._repeats_large_set(node)})
        for name in order:
            self.lines.append(f"R{self._numbers[name]}: {self._terminal(self.rules[name])}")
        self.lines.append(f"start: {self._rule(Reference('root'), is_whole=True)}")
        for name in self._asked:  # grows meanwhile
            self.lines.append(f"r{self._numbers[name]}: {self._rule(self.rules[name])}")
        return "\n".join(self.lines)

    def _terminal(self, node: Node) -> str:
        if isinstance(node, Reference):
            return f"R{self._numbers[node.name]}"
        return self._written(node, self._terminal)

    def _rule(self, node: Node, is_whole: bool = False) -> str:
        """A part of a rule, of which regular parts that repeat large sets are terminals.

        Args:
            is_whole: all regular parts are.
        """
        if self._is_regular(node) and (is_whole or self._repeats_large_set(node)):
            name = f"T{len(self.lines)}"
            self.lines.append(f"{name}: ({self._terminal(node)}) & /(?s:.+)/")
            return f"{name}?" if self._may_be_empty(node) else name
        if isinstance(node, Reference):
            if node.name not in self._known:
                self._known.add(node.name)
                self._asked.append(node.name)
            return f"r{self._numbers[node.name]}"
        if isinstance(node, Sequence):
            return self._written(Sequence(tuple(self._runs(node.parts))), self._rule)
        return self._written(node, self._rule)

    def _runs(self, parts: tuple[Node, ...]) -> Iterator[Node]:
        """The parts of a sequence. Regular parts that follow each other are one, if any repeats a large set."""
        run = list[Node]()
        for part in (*parts, None):
            if part is not None and self._is_regular(part):
                run.append(part)
                continue
            if len(run) > 1 and any(map(self._repeats_large_set, run)) and len(run) < len(parts):
                yield Sequence(tuple(run))
            else:
                yield from run
            run = []
            if part is not None:
                yield part

    def _written(self, node: Node, write: Callable[[Node], str]) -> str:
        if isinstance(node, Characters):
            return str(node)
        if isinstance(node, Sequence):
            return " ".join(map(write, node.parts)) or '""'
        if isinstance(node, Alternatives):
            return f"({' | '.join(map(write, node.parts))})"
        assert isinstance(node, Repetition)
        maximum = "" if node.maximum is None else node.maximum
        return f"({write(node.part)}){{{node.minimum},{maximum}}}" if node.maximum != 0 else '""'

    def _is_regular(self, node: Node) -> bool:
        return not any(isinstance(part, Reference) and part.name in self._recursive for part in _walk(node))

    def _has_large_set(self, node: Node) -> bool:
        return any(
            part.name in self._large if isinstance(part, Reference) else isinstance(part, Characters) and part.is_large
            for part in _walk(node)
        )

    def _repeats_large_set(self, node: Node) -> bool:
        return any(
            part.name in self._repeats
            if isinstance(part, Reference)
            else isinstance(part, Repetition) and part.maximum != 1 and self._has_large_set(part.part)
            for part in _walk(node)
        )

    def _may_be_empty(self, node: Node) -> bool:
        if isinstance(node, Reference):
            return node.name in self._empty
        if isinstance(node, Repetition):
            return not node.minimum or self._may_be_empty(node.part)
        each = (self._may_be_empty(part) for part in getattr(node, "parts", ()))
        return all(each) if isinstance(node, Sequence) else any(each)


def _walk(node: Node) -> Iterator[Node]:
    """A node and those in it."""
    yield node
    for part in [node.part] if isinstance(node, Repetition) else getattr(node, "parts", ()):
        yield from _walk(part)


def _reaching(below: Mapping[str, set[str]], names: set[str]) -> set[str]:
    """The rules that lead to some of these, and these."""
    above, found, waiting = _above(below), {*names}, [*names]
    while waiting:
        for name in above.get(waiting.pop(), ()):
            if name not in found:
                found.add(name)
                waiting.append(name)
    return found


def _upwards(below: Mapping[str, set[str]]) -> list[str]:
    """The rules without recursion, each behind the rules that it refers to."""
    above, left = _above(below), {name: len(some) for name, some in below.items()}
    order = [name for name, number in left.items() if not number]
    for name in order:
        for one in above.get(name, ()):
            left[one] -= 1
            if not left[one]:
                order.append(one)
    return order


def _above(below: Mapping[str, set[str]]) -> dict[str, list[str]]:
    above = dict[str, list[str]]()
    for name, some in below.items():
        for one in some:
            above.setdefault(one, []).append(name)
    return above
