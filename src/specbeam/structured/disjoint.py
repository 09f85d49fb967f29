"""Whether no value satisfies two schemas, by their types, their constants, and the properties that tell objects apart.

Then ``oneOf`` is ``anyOf``. llguidance knows this of schemas without references.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

Target = Callable[[str], Any]
"""The part of the schema that a reference is to; None if there is none."""
TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
MAX_LEVELS = 3
"""Of properties and alternatives within each other that are looked at."""
MAX_STEPS = 100_000
"""Schemas, values and required keys that are looked at."""


def are_disjoint(alternatives: list[Any], target: Target) -> bool:
    """Whether no value satisfies two of some schemas, as far as that is known."""
    compared = _Pairs(target)
    return all(compared.are_disjoint(a, b, MAX_LEVELS) for a, b in combinations(alternatives, 2))


class _Pairs:
    """Compares schemas, up to a number of steps."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._left = MAX_STEPS

    def are_disjoint(self, a: Any, b: Any, levels: int) -> bool:
        self._left -= 1
        if self._left < 0 or levels < 0:
            return False
        parts, others = [*self._parts(a)], [*self._parts(b)]
        common = TYPES.intersection(*map(_types, parts + others))
        if not common:
            return True
        values, other_values = _values(parts), _values(others)
        if values is not None and other_values is not None and values.isdisjoint(other_values):
            return True
        if common == {"object"}:
            for key in _required(parts) | _required(others):
                if self.are_disjoint({"allOf": _of(parts, key)}, {"allOf": _of(others, key)}, levels - 1):
                    return True
        return self._leaves_none(parts, b, levels) or self._leaves_none(others, a, levels)

    def _leaves_none(self, parts: list[Any], other: Any, levels: int) -> bool:
        """Whether no alternative of some schemas has a value that satisfies another schema."""
        lists = [part[name] for part in parts if isinstance(part, dict) for name in ("anyOf", "oneOf") if name in part]
        return any(
            isinstance(some, list) and all(self.are_disjoint(one, other, levels - 1) for one in some) for some in lists
        )

    def _parts(self, schema: Any) -> Iterator[Any]:
        """The schemas that all have to hold where a schema does."""
        waiting, seen = [schema], set[int]()
        while waiting and self._left > 0:
            part = waiting.pop()
            if id(part) in seen:
                continue
            seen.add(id(part))
            yield part
            if isinstance(part, dict):
                lists = (part.get("enum"), part.get("required"))
                self._left -= 1 + sum(len(some) for some in lists if isinstance(some, list))
                if isinstance(part.get("allOf"), list):
                    waiting += part["allOf"]
                if isinstance(part.get("$ref"), str):
                    waiting.append(self._target(part["$ref"]))


def _types(schema: Any) -> frozenset[str]:
    """The types that a schema alone allows."""
    if not isinstance(schema, dict):
        return frozenset() if schema is False else TYPES
    given = schema.get("type")
    names = given if isinstance(given, list) else [given] if isinstance(given, str) else TYPES
    found = frozenset("number" if name == "integer" else name for name in names if isinstance(name, str))
    values = _constants(schema)
    return found if values is None else found & {json_type(value) for value in values}


def _constants(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _values(parts: list[Any]) -> set[str] | None:
    """The values that satisfy some schemas, if one of these lists them."""
    lists = [values for part in parts if isinstance(part, dict) and (values := _constants(part)) is not None]
    return set.intersection(*({*map(written, values)} for values in lists)) if lists else None


def _required(parts: list[Any]) -> set[str]:
    lists = [part["required"] for part in parts if isinstance(part, dict) and isinstance(part.get("required"), list)]
    return {key for some in lists for key in some if isinstance(key, str)}


def _of(parts: list[Any], key: str) -> list[Any]:
    """The schemas of a property."""
    found = []
    for part in parts:
        if isinstance(part, dict):
            known = part.get("properties")
            if isinstance(known, dict) and key in known:
                found.append(known[key])
            elif part.get("additionalProperties") is False and "patternProperties" not in part:
                found.append(False)
    return found


def json_type(value: Any) -> str:
    """The name of a value's type."""
    kinds: list[tuple[Any, str]] = [(bool, "boolean"), (int | float, "number"), (str, "string"), (list, "array")]
    return next((name for kind, name in kinds if isinstance(value, kind)), "null" if value is None else "object")


def written(value: Any) -> str:
    """A value of JSON as a text, the same for equal values: 1 and 1.0 are equal."""
    return json.dumps(_normal(value), sort_keys=True)


def _normal(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _normal(one) for key, one in value.items()}
    if isinstance(value, list):
        return [*map(_normal, value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value
