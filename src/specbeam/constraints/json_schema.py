"""The part of JSON Schema that is enforced. What llguidance reads otherwise than the standard is refused or repaired.

Each rule has a case in ``tests/constraints/test_grammar.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from math import lcm
from typing import Any

MAX_STATES = 10_000
"""``multipleOf`` becomes an automaton with about as many states as the number, without its point: 999983 takes 14 s and
370 MB. Where several numbers meet, it has as many as their least common multiple."""
MAX_WHOLE = 2**53
"""Larger numbers are rounded."""
FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
"""The values of ``format`` that are enforced. Any other is an annotation."""
ANNOTATIONS = (
    "$comment",
    "default",
    "deprecated",
    "description",
    "example",
    "examples",
    "readOnly",
    "title",
    "writeOnly",
)
NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
"""The keywords whose values are schemas by names."""
BOUNDS = ("const", "enum", "exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum")
CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")
"""Characters that strings can only have as an escape with u, which could also be a second form of a key."""
NUL = re.compile(r"\\(?:x00|x\{0+\}|u0{4}|u\{0+\}|U0{8}|0)")
OPEN_CLASS = re.compile(r"\\P|\\p(?!\{?[LMNPSZ])")
FLAGS = re.compile(r"\\.|\(\?([a-zA-Z-]+)[:)]", re.DOTALL)
"""Escapes, so that they are passed over, and groups with flags."""
ALLOWED_FLAGS = frozenset("ims")


class NotEnforceable(Exception):
    """Says where a schema has what cannot be enforced, and what that is."""


def enforceable(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without annotations, and with patterns that llguidance reads as the standard does.

    Raises:
        NotEnforceable: something in it cannot be enforced.
    """
    multiples: set[int] = set()
    made = _enforceable(schema, "#", multiples)
    if lcm(*multiples) > MAX_STATES:
        raise NotEnforceable(f"multipleOf has numbers whose least common multiple is over {MAX_STATES:,}")
    return made


def _enforceable(schema: Mapping[str, Any], place: str, multiples: set[int]) -> dict[str, Any]:
    kept = {name: value for name, value in schema.items() if name not in ANNOTATIONS or isinstance(value, dict)}
    if "x-guidance" in kept:
        raise NotEnforceable(f"{place} has x-guidance, which may switch enforcement off")
    if place != "#" and "$id" in kept:
        raise NotEnforceable(f"{place} has an $id of its own")
    if "prefixItems" in kept and isinstance(kept.get("items"), list):
        raise NotEnforceable(f"{place} has prefixItems, and a list of items beside them")
    if isinstance(kept.get("format"), str) and kept["format"] not in FORMATS:
        del kept["format"]
    if kept.get("uniqueItems") is False:
        del kept["uniqueItems"]
    if isinstance(multiple := kept.get("multipleOf"), int | float) and multiple > 0:
        multiples.add(abs(int("".join(map(str, Decimal(str(multiple)).as_tuple().digits)))))
    required = kept["required"] if isinstance(kept.get("required"), list) else []
    least = kept.get("minProperties")
    if isinstance(least, int | float) and least > (known := len({*map(str, required)})) + 1:
        raise NotEnforceable(f"{place} has minProperties {least} and {known} required keys: a repeated key would count")
    for name in BOUNDS:
        for value in _values(kept.get(name)):
            if isinstance(value, int | float) and abs(value) > MAX_WHOLE:
                raise NotEnforceable(f"{place}/{name} has the number {value}, and numbers over 2**53 are rounded")
            if isinstance(value, str) and CONTROL.search(value):
                raise NotEnforceable(f"{place}/{name} has a control character, which takes an escape with u")
    if any(isinstance(key, str) and CONTROL.search(key) for key in required):
        raise NotEnforceable(f"{place}/required has a key with a control character, which takes an escape with u")
    if isinstance(kept.get("pattern"), str):
        if CONTROL.search(kept["pattern"].replace("\0", "")):
            raise NotEnforceable(f"{place}/pattern has a control character, which takes an escape with u")
        kept["pattern"] = closed(kept["pattern"], f"{place}/pattern")
    for name, value in kept.items():
        where = f"{place}/{name}"
        if name in NAMED and isinstance(value, dict):
            if any(CONTROL.search(key) for key in value):
                raise NotEnforceable(f"{where} has a key with a control character, which takes an escape with u")
            kept[name] = {
                closed(key, where) if name == "patternProperties" else key: _below(one, f"{where}/{key}", multiples)
                for key, one in value.items()
            }
        elif name not in ("const", "enum"):
            kept[name] = _below(value, where, multiples)
    return kept


def places_of(schema: Mapping[str, Any], problem: str) -> Iterator[str]:
    """Where a schema has what an error of llguidance is about. Nowhere, if the error does not name it."""
    if problem.startswith(("Unimplemented keys", "oneOf", "Pointer", "Resource", "regex parse error")):
        for place, keyword, value in _keywords(schema, "#"):
            if _is_about(problem, keyword, value):
                yield place


def _is_about(problem: str, keyword: str, value: Any) -> bool:
    """Whether an error of llguidance is about a keyword with this value."""
    if problem.startswith("Unimplemented"):
        return f'"{keyword}"' in problem
    if problem.startswith("oneOf"):
        return keyword == "oneOf"  # and the error does not say which of them
    if problem.startswith("regex"):
        return keyword == "pattern" and f" {value}\n" in problem
    document, _, within = str(value).partition("#")
    return keyword == "$ref" and (document in problem if document else f"'{within}'" in problem)


def _keywords(value: Any, place: str) -> Iterator[tuple[str, str, Any]]:
    """The keywords of a value that may be a schema, or have schemas: the place, the keyword and its value."""
    if isinstance(value, list):
        for number, one in enumerate(value):
            yield from _keywords(one, f"{place}/{number}")
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield f"{place}/{name}", name, one
            if name in NAMED and isinstance(one, Mapping):
                for key, below in one.items():
                    yield from _keywords(below, f"{place}/{name}/{key}")
            elif name not in ("const", "enum"):
                yield from _keywords(one, f"{place}/{name}")


def _below(value: Any, place: str, multiples: set[int]) -> Any:
    """A value that may be a schema, or have schemas: references may lead anywhere."""
    if isinstance(value, list):
        return [_below(one, f"{place}/{n}", multiples) for n, one in enumerate(value)]
    return _enforceable(value, place, multiples) if isinstance(value, dict) else value


def _values(value: Any) -> Iterator[Any]:
    """The numbers and texts of a JSON value, its keys too."""
    if isinstance(value, list):
        for one in value:
            yield from _values(one)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield key
            yield from _values(one)
    else:
        yield value


def closed(pattern: str, place: str) -> str:
    r"""A regular expression for strings, which keeps out quotes and backslashes where it excludes them.

    llguidance makes bytes of JSON of it. Where a set of characters has all control characters, it takes ``\"`` and
    ``\\`` in, although the set may exclude them. So NUL, which no string can have, leaves all such sets.

    Raises:
        NotEnforceable: the expression has a set that cannot be repaired so.
    """
    check_flags(pattern, place)
    made: list[str] = []
    at, kind = 0, ""  # of the set that it is in: "[", "[^" or none
    while at < len(pattern):
        two = pattern[at : at + 2]
        if two[0] == "\\":
            if OPEN_CLASS.match(pattern, at) or (kind != "[^" and NUL.match(pattern, at)):
                raise NotEnforceable(f"{place} has {two}, which may let quotes through")
            made.append(two)
            at += 2
        elif kind:
            if two[0] == "[" or two in ("&&", "--", "~~"):
                raise NotEnforceable(f"{place} has a set of characters within another")
            kind = "" if two[0] == "]" else kind
            made.append(two[0])
            at += 1
        elif two[0] == "[":
            kind = "[^" if two == "[^" else "["
            made.append("[^\\x00" if kind == "[^" else "[")
            at += len(kind)
            if pattern[at : at + 1] == "]":
                raise NotEnforceable(f"{place} has {kind}], which means different things in different languages")
            if pattern[at : at + 1] == "-":  # it stands for itself
                made.append("\\-")
                at += 1
        else:
            made.append(two[0])
            at += 1
    if "\0" in pattern:
        raise NotEnforceable(f"{place} has the character NUL")
    return "".join(made)


def check_flags(pattern: str, place: str) -> None:
    """Refuse flags of a regular expression that make another language of it.

    Raises:
        NotEnforceable: there are such flags.
    """
    for found in FLAGS.finditer(pattern):
        if found[1] is not None and not ALLOWED_FLAGS.issuperset(found[1]):
            raise NotEnforceable(f"{place} has the flags {found[1]}: only i, m and s are allowed")
