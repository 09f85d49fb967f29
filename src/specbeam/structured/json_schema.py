"""The part of JSON Schema that is enforced. What llguidance reads otherwise than the standard is refused or repaired.

Each rule has a case in ``tests/structured/test_grammar.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from functools import partial
from itertools import combinations, permutations
from math import lcm, nextafter
from typing import Any
from urllib.parse import unquote

from specbeam.structured.disjoint import are_disjoint, json_type, written
from specbeam.structured.endless import without_endless
from specbeam.structured.identifiers import without_inner_identifiers

MAX_STATES = 10_000
"""``multipleOf`` becomes an automaton with about as many states as the number, without its point: 999983 takes 14 s and
370 MB. Where several numbers meet, it has as many as their least common multiple."""
MAX_FORCED = 10_000
"""Characters without a choice. They are read together, while other requests wait: 10,000 take 30 ms."""
MAX_MEETING = 8
"""Patterns that a text has to match. Whether a text matches all of them takes twice as long with each one."""
MAX_COMBINATIONS = 1000
"""Of the alternatives of parts that hold together: each of them becomes a schema."""
MAX_COUNTED = 10**6
"""Patterns, combinations and characters are counted up to this number."""
MAX_WHOLE, MAX_INTEGER, LAST_INTEGER = 2**53, 2**63 - 1024, 2**63 - 1
"""Larger numbers are rounded. Of larger integers those with 53 significant bits are exact, up to the second number, and
none is written beyond the last one."""
NEXT_IS_LARGE = (("exclusiveMaximum", -MAX_WHOLE), ("exclusiveMinimum", MAX_WHOLE))
MAX_ORDERED, MAX_UNIQUE = 5, 10
"""Values of items that are unique: up to the first number they come in any order, and else in the schema's."""
MAX_REFERENCES = 20
"""From one to the next."""
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
CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that strings can only have as an escape with u, which could also be a second form of a key. And DEL:
llguidance leaves it out of a text."""
WRITTEN = rf"[^{CONTROL.pattern[1:-1]}]"
"""A set of all other characters."""
FLAGS = re.compile(r"\\.|\(\?([a-zA-Z-]+)[:)]", re.DOTALL)
"""Escapes, so that they are passed over, and groups with flags."""
ALLOWED_FLAGS = frozenset("ims")
PIECE = re.compile(
    r"\\(?:[xuUpP]\{[^}]*\}?|x..|u.{4}|U.{8}|[pP].|.)|\[\^?\]?(?:\\.|[^\]\\])*\]?"
    r"|\((?:\?(?:P?<[^>]{0,40}>|[a-zA-Z-]*:?))?|\{(?P<least>\d+)(?:,\d*)?\}|.",
    re.DOTALL,
)
"""Of a regular expression: an escape, a set of characters, the beginning of a group, a repetition, or a character."""
MAY_HAVE_CONTROL = re.compile(r"\[\^|\\[avxuUpP]")
"""A piece that may have control characters, not counting what has an escape of its own in JSON."""
WITHOUT_LOOKAHEAD = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$":
    r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
}  # fmt: skip
"""Patterns with lookahead that many schemas have, and patterns of the same texts without it: zod's for email."""
ONE_OF = "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf"
"""The error of llguidance about a ``oneOf`` whose alternatives may have values in common."""
ONE_OF_ADVICE = (
    "oneOf has alternatives that may have values in common: give them different types, or a required property with "
    "another const in each, or write anyOf"
)
EMPTY_REGEX = "Unsatisfiable schema: Regex is empty"
"""The error of llguidance about a pattern that nothing matches."""


class NotEnforceable(Exception):
    """Says where a schema has what cannot be enforced, and what that is."""


def enforceable(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without annotations, and with patterns that llguidance reads as the standard does."""
    multiples: set[int] = set()
    schema = without_inner_identifiers(schema, NAMED)
    made = _enforceable(schema, "#", schema, multiples)
    meeting, combinations = _together(made, made, {})
    if meeting > MAX_MEETING:
        raise NotEnforceable(f"its parts ask for {meeting:,} patterns together, and {MAX_MEETING} are allowed")
    if combinations > MAX_COMBINATIONS:
        raise NotEnforceable(
            f"its parts have {combinations:,} combinations of alternatives, and {MAX_COMBINATIONS:,} are allowed"
        )
    if lcm(*multiples) > MAX_STATES:
        raise NotEnforceable(f"multipleOf has numbers whose least common multiple is over {MAX_STATES:,}")
    if (finite := without_endless(made, partial(target_of, made), NAMED)) is None:
        raise NotEnforceable("no text satisfies it that has an end")
    return finite


def _enforceable(schema: Mapping[str, Any], place: str, root: Any, multiples: set[int]) -> dict[str, Any]:
    kept = {name: value for name, value in schema.items() if name not in ANNOTATIONS or isinstance(value, dict)}
    if "x-guidance" in kept:
        raise NotEnforceable(f"{place} has x-guidance, which may switch enforcement off")
    if place != "#" and "$id" in kept:
        raise NotEnforceable(f"{place} has an $id beside a $ref, which drafts read in two ways: give the $schema")
    if "prefixItems" in kept and isinstance(kept.get("items"), list):
        raise NotEnforceable(f"{place} has prefixItems, and a list of items beside them")
    if isinstance(kept.get("format"), str) and kept["format"] not in FORMATS:
        del kept["format"]
    if "uniqueItems" in kept:
        kept = _with_unique_items(kept, place, root)
    if isinstance(some := kept.get("oneOf"), list) and are_disjoint(some, partial(target_of, root)):
        if "anyOf" in kept:
            others = kept.get("allOf")
            kept["allOf"] = [*(others if isinstance(others, list) else ()), {"anyOf": some}]
            del kept["oneOf"]
        else:
            kept = {"anyOf" if name == "oneOf" else name: value for name, value in kept.items()}
    kept |= _narrowed(kept)
    if "propertyNames" in kept:
        kept = _without_names(kept, root)
    if isinstance(multiple := kept.get("multipleOf"), int | float) and multiple > 0:
        multiples.add(abs(int("".join(map(str, Decimal(str(multiple)).as_tuple().digits)))))
    required = kept["required"] if isinstance(kept.get("required"), list) else []
    minimum = kept.get("minProperties")
    if isinstance(minimum, int | float) and minimum > (known := len({*map(str, required)})) + 1:
        raise NotEnforceable(
            f"{place} has minProperties {minimum} and {known} required keys: a repeated key would count"
        )
    for name, values in (("const", [kept.get("const")]), ("enum", kept.get("enum"))):
        for value in values if isinstance(values, list) else ():
            if (length := len(json.dumps(value, ensure_ascii=False))) > MAX_FORCED:
                raise NotEnforceable(f"{place}/{name} has a value of {length:,} characters: {MAX_FORCED:,} are allowed")
    for name in BOUNDS:
        for value in _values(kept.get(name)):
            is_large = isinstance(value, int | float) and (abs(value) > MAX_WHOLE or (name, value) in NEXT_IS_LARGE)
            if is_large and not _is_exact(name, value, kept):
                raise NotEnforceable(f"{place}/{name} has the number {value}, and numbers over 2**53 are rounded")
            if isinstance(value, str) and CONTROL.search(value):
                raise NotEnforceable(f"{place}/{name} has a control character, which cannot be enforced")
    if any(isinstance(key, str) and CONTROL.search(key) for key in required):
        raise NotEnforceable(f"{place}/required has a key with a control character, which cannot be enforced")
    if isinstance(kept.get("pattern"), str):
        if CONTROL.search(kept["pattern"]):
            raise NotEnforceable(f"{place}/pattern has a control character, which cannot be enforced")
        check_length(kept["pattern"], f"{place}/pattern")
        pattern = WITHOUT_LOOKAHEAD.get(kept["pattern"], kept["pattern"])
        kept["pattern"] = closed(pattern, f"{place}/pattern")
    for name, value in kept.items():
        where = f"{place}/{name}"
        if name in NAMED and isinstance(value, dict):
            if any(CONTROL.search(key) for key in value):
                raise NotEnforceable(f"{where} has a key with a control character, which cannot be enforced")
            kept[name] = {
                closed(key, where) if name == "patternProperties" else key: _below(
                    one, f"{where}/{key}", root, multiples
                )
                for key, one in value.items()
            }
        elif name not in ("const", "enum"):
            kept[name] = _below(value, where, root, multiples)
    return kept


def _narrowed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Bounds beyond the numbers that are exact, as the last ones that are. So fewer numbers are written."""
    made = dict[str, Any]()
    for name, sign in (("maximum", 1), ("minimum", -1), ("exclusiveMaximum", 1), ("exclusiveMinimum", -1)):
        bound, exclusive = schema.get(name), f"exclusive{name.capitalize()}"
        if isinstance(bound, bool) or not isinstance(bound, int | float) or sign * bound <= MAX_WHOLE:
            continue
        if schema.get("type") != "integer" or name.startswith("exclusive") or schema.get(exclusive) is True:
            made[name] = sign * MAX_WHOLE
        elif bound >= LAST_INTEGER:
            made[name] = LAST_INTEGER + 1  # which stands for it
        else:
            last = min(sign * int(bound), MAX_INTEGER)
            made[name] = sign * (int(rounded) if (rounded := float(last)) <= last else int(nextafter(rounded, 0)))
    return made


def _is_exact(name: str, value: float, schema: Mapping[str, Any]) -> bool:
    """Whether an integer beyond 2**53 keeps its value."""
    if name == "maximum" and value == LAST_INTEGER + 1:
        return True
    if name.startswith("exclusive") or (name not in ("const", "enum") and schema.get("type") != "integer"):
        return False
    return isinstance(value, int) and abs(value) <= MAX_INTEGER and int(float(value)) == value


def _with_unique_items(schema: dict[str, Any], place: str, root: Any) -> dict[str, Any]:
    """A schema without ``uniqueItems``, as a list of all arrays if its items have few values."""
    others = {name: value for name, value in schema.items() if name != "uniqueItems"}
    minimum, maximum = schema.get("minItems", 0), schema.get("maxItems", MAX_UNIQUE)
    if schema["uniqueItems"] is False or maximum in (0, 1):
        return others
    values = _listed(schema.get("items"), root)
    rest = {*others} - {"type", "items", "minItems", "maxItems", "$defs", "definitions"} - {*ANNOTATIONS}
    is_plain = schema["uniqueItems"] is True and schema.get("type") == "array" and not rest
    if not is_plain or values is None or len(values) > MAX_UNIQUE or not {type(minimum), type(maximum)} <= {int, float}:
        raise NotEnforceable(
            f"{place} has uniqueItems, which is enforced for items with an enum of at most {MAX_UNIQUE} values, and "
            "with maxItems 1: list the values, or leave uniqueItems out and remove what is repeated yourself"
        )
    choose = permutations if len(values) <= MAX_ORDERED else combinations
    lengths = [n for n in range(len(values) + 1) if minimum <= n <= maximum]
    kept = {name: value for name, value in others.items() if name in ("$defs", "definitions")}
    return kept | {"enum": [[*some] for n in lengths for some in choose(values, n)]}


def _listed(schema: Any, root: Any) -> list[Any] | None:
    """The values of a schema that lists them."""
    for _ in range(MAX_REFERENCES):
        if isinstance(schema, dict) and "$ref" in schema and schema.keys() - ANNOTATIONS <= {"$ref"}:
            schema = target_of(root, str(schema["$ref"]))
    if not isinstance(schema, dict) or schema.keys() - ANNOTATIONS - {"type", "enum", "const"}:
        return None
    kind = schema.get("type")
    values = [schema["const"]] if "const" in schema else schema.get("enum", {"boolean": [False, True]}.get(str(kind)))
    if not isinstance(values, list) or ("const" in schema and "enum" in schema):
        return None
    if kind == "integer" and all(isinstance(value, int) for value in values):
        kind = "number"
    if kind is not None and any(json_type(value) != kind for value in values):
        return None
    return [*{written(value): value for value in values}.values()]


def _together(value: Any, root: Any, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """How many patterns may have to hold for one text, and how many combinations its alternatives have, at most.

    Both count up to a million: references that fan out make numbers of any length.

    Args:
        value: a schema, or what has schemas.
        known: by schemas. One that is still counted has none, since references may go in circles.
    """
    if not isinstance(value, dict | list):
        return 0, 1
    if id(value) in known:
        return known[id(value)]
    known[id(value)] = 0, 1
    parts, within = list[tuple[int, int]](), [(0, 1)]
    for name, one in value.items() if isinstance(value, dict) else enumerate(value):
        if name == "allOf" and isinstance(one, list):
            parts += [_together(part, root, known) for part in one]
        elif name in ("anyOf", "oneOf") and isinstance(one, list):
            some = [_together(part, root, known) for part in one] or [(0, 1)]
            each = [ways for _, ways in some]  # alternatives alone are no combinations
            parts.append((max(patterns for patterns, _ in some), max(max(each), min(sum(each), MAX_COMBINATIONS))))
        elif name == "patternProperties" and isinstance(one, dict):
            parts += [_together(part, root, known) for part in one.values()]
        elif name == "$ref" and isinstance(one, str):
            parts.append(_together(target_of(root, one), root, known))
        elif name == "pattern" and isinstance(one, str):
            parts.append((1, 1))
        elif name not in ("const", "enum"):
            within.append(_together(one, root, known))
    patterns, ways = 0, 1
    for more, choices in parts:
        patterns, ways = min(patterns + more, MAX_COUNTED), min(ways * max(1, choices), MAX_COUNTED)
    known[id(value)] = max(patterns, *(one for one, _ in within)), max(ways, *(one for _, one in within))
    return known[id(value)]


def target_of(root: Any, pointer: str) -> Any:
    """The part of a schema that a reference is to; None if there is none."""
    if pointer != "#" and not pointer.startswith("#/"):
        return None
    for part in unquote(pointer).removeprefix("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and part.isdigit() and int(part) < len(root):
            root = root[int(part)]
        else:
            root = root.get(part) if isinstance(root, dict) else None
    return root


def places_of(schema: Mapping[str, Any], problem: str) -> Iterator[str]:
    """Where a schema has what an error of llguidance is about. Nowhere, if the error does not name it."""
    if problem.startswith(("Unimplemented keys", "oneOf", "Pointer", "Resource", "regex parse error", EMPTY_REGEX)):
        for place, keyword, value in _keywords(schema, "#"):
            if _is_about(problem, keyword, value):
                yield place


def _is_about(problem: str, keyword: str, value: Any) -> bool:
    """Whether an error of llguidance is about a keyword with this value."""
    if problem.startswith("Unimplemented"):
        return f'"{keyword}"' in problem
    if problem.startswith("oneOf"):
        return keyword == "oneOf"  # and the error does not say which of them
    if problem.startswith(("regex", EMPTY_REGEX)):
        return keyword == "pattern" and (f" {value}\n" in problem or f"/{value}/" in problem)
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


def _below(value: Any, place: str, root: Any, multiples: set[int]) -> Any:
    """A value that may be a schema, or have schemas: references may lead anywhere."""
    if isinstance(value, list):
        return [_below(one, f"{place}/{n}", root, multiples) for n, one in enumerate(value)]
    if not isinstance(value, dict):
        return value
    return False if value.get("not") in ({}, True) else _enforceable(value, place, root, multiples)


def _without_names(schema: dict[str, Any], root: Any) -> dict[str, Any]:
    """A schema without ``propertyNames``, where these allow any keys, or are a list of all properties.

    Records are written so: by zod, or by pydantic for a dictionary whose keys are an enumeration.
    """
    names = schema["propertyNames"]
    if isinstance(names, dict) and names.keys() == {"$ref"}:
        names = target_of(root, str(names["$ref"]))
    names = {} if names is True else names
    others = {name: value for name, value in schema.items() if name != "propertyNames"}
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return schema
    kept = {name: value for name, value in names.items() if name not in (*ANNOTATIONS, "type")}
    if not kept:
        return others
    listed = kept["enum"] if kept.keys() == {"enum"} else [kept["const"]] if kept.keys() == {"const"} else None
    if not isinstance(listed, list) or "properties" in schema or "patternProperties" in schema:
        return schema
    rest = schema.get("additionalProperties", {})
    return others | {"properties": {one: rest for one in listed if isinstance(one, str)}, "additionalProperties": False}


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
    r"""A regular expression for strings, without the control characters that no string can have.

    llguidance makes bytes of JSON of it. Without this it takes "ab" for a match of ``a\x01b``. And where a set has all
    control characters, it takes ``\"`` and ``\\`` in, although the set may exclude them.
    """
    check_flags(pattern, place)
    made: list[str] = []
    for found in PIECE.finditer(pattern):
        piece = found[0]
        if piece[0] == "[":
            if piece.startswith(("[]", "[^]")):
                raise NotEnforceable(f"{place} has {piece[:3]}, which means different things in different languages")
            plain = re.sub(r"\\.", " ", piece[1:], flags=re.DOTALL)
            if any(one in plain for one in ("[", "&&", "--", "~~")):
                raise NotEnforceable(f"{place} has a set of characters within another")
        made.append(f"[{piece}&&{WRITTEN}]" if MAY_HAVE_CONTROL.search(piece) else piece)
    return "".join(made)


def check_flags(pattern: str, place: str) -> None:
    """Refuse flags of a regular expression that make another language of it."""
    for found in FLAGS.finditer(pattern):
        if found[1] is not None and not ALLOWED_FLAGS.issuperset(found[1]):
            raise NotEnforceable(f"{place} has the flags {found[1]}: only i, m and s are allowed")


def check_length(pattern: str, place: str) -> None:
    """Refuse a regular expression that asks for too many characters, in any of its alternatives."""
    groups = [[0, 0, 0]]  # around a place: characters of the longest alternative, of this one, and of its last part
    for piece in PIECE.finditer(pattern):
        longest, here, last = groups[-1]
        if piece["least"] is not None:
            groups[-1][2] = min(last * max(1, int(piece["least"][:9])), MAX_COUNTED)
        elif piece[0] == "|":
            groups[-1] = [max(longest, here + last), 0, 0]
        elif piece[0][0] == "(":
            groups[-1] = [longest, here + last, 0]
            groups.append([0, 0, 0])
        elif piece[0] == ")" and len(groups) > 1:
            groups.pop()
            groups[-1][2] = max(longest, here + last)
        elif piece[0] not in "*+?":
            groups[-1] = [longest, here + last, 1]
    length = max(max(longest, here + last) for longest, here, last in groups)
    if length > MAX_FORCED:
        raise NotEnforceable(f"{place} asks for {length:,} characters, and {MAX_FORCED:,} are allowed")
