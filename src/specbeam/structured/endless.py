"""Parts of a JSON Schema that only endless values satisfy, such as a list whose nodes all need a next one.

llguidance does not know them. A text that begins such a part would go on until it is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

MAX_ROUNDS = 20
"""Over the whole schema. What a part needs is found to end a round before it. Parts that take more stay as they are."""
Target = Callable[[str], Any]
"""The part of the schema that a reference is to; None if there is none."""


def without_endless(schema: dict[str, Any], target: Target, named: tuple[str, ...]) -> dict[str, Any] | None:
    """The schema with ``False`` for each part that nothing finite satisfies; None if it is one itself.

    Args:
        named: the keywords whose values are schemas by names.
    """
    parts, ends = [*_parts(schema, named)], set[int]()
    if not any("$ref" in part for part in parts):
        return schema
    for _ in range(MAX_ROUNDS):
        before, asked = len(ends), set[int]()
        for part in parts:
            _ends(part, target, ends, asked)
        if len(ends) == before:
            made = _replaced(schema, {id(part) for part in parts} - ends, named)
            return made if isinstance(made, dict) else None
    return schema


def _parts(value: Any, named: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """A value and what is in it, as far as these may be schemas."""
    if isinstance(value, list):
        for one in value:
            yield from _parts(one, named)
    elif isinstance(value, dict):
        yield value
        for name, one in value.items():
            if name in named and isinstance(one, dict):
                for below in one.values():
                    yield from _parts(below, named)
            elif name not in ("const", "enum"):
                yield from _parts(one, named)


def _replaced(value: Any, endless: set[int], named: tuple[str, ...]) -> Any:
    if isinstance(value, list):
        return [_replaced(one, endless, named) for one in value]
    if not isinstance(value, dict):
        return value
    if id(value) in endless:
        return False
    made = dict(value)
    for name, one in value.items():
        if name in named and isinstance(one, dict):
            made[name] = {key: _replaced(below, endless, named) for key, below in one.items()}
        elif name not in ("const", "enum"):
            made[name] = _replaced(one, endless, named)
    return made


def _ends(schema: Any, target: Target, ends: set[int], asked: set[int]) -> bool:
    """Whether a finite value may satisfy a schema, as far as that is known.

    Args:
        ends: the schemas that are known to have one.
        asked: the schemas of this round, which are not asked again.
    """
    if not isinstance(schema, dict):
        return schema is not False
    if id(schema) in ends or id(schema) in asked:
        return id(schema) in ends
    asked.add(id(schema))

    def end(some: Any) -> Iterator[bool]:
        return (_ends(one, target, ends, asked) for one in some)

    wholes, choices = [_list(schema, "allOf")], [some for name in ("anyOf", "oneOf") if (some := _list(schema, name))]
    if isinstance(reference := schema.get("$ref"), str):
        wholes.append([target(reference)])
    found = all(all(end(some)) for some in wholes) and all(any(end(some)) for some in choices)
    if found and "const" not in schema and "enum" not in schema:
        needs = {"object": _of_object, "array": _of_array}
        kinds: list[Any] = _list(schema, "type") or [schema.get("type")]
        found = any(kind not in [*needs] or all(end(needs[kind](schema))) for kind in kinds)
    if found:
        ends.add(id(schema))
    return found


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    """The list that a keyword has. What is no list is refused by others."""
    given = schema.get(name)
    return given if isinstance(given, list) else []


def _of_object(schema: dict[str, Any]) -> list[Any]:
    """The schemas of the values that an object needs."""
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    if not known and schema.get("minProperties"):
        return [schema.get("additionalProperties", True)]
    return [known[key] for key in _list(schema, "required") if isinstance(key, str) and key in known]


def _of_array(schema: dict[str, Any]) -> list[Any]:
    """The schemas of the items that an array needs."""
    minimum, first = schema.get("minItems"), _list(schema, "prefixItems") or _list(schema, "items")
    if not isinstance(minimum, int) or minimum <= len(first) or isinstance(schema.get("items"), list):
        return first[: minimum if isinstance(minimum, int) else 0]
    return [*first, schema.get("items", True)]
