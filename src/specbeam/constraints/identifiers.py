"""Schemas with an ``$id`` within another: their references become pointers from the whole schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urldefrag, urljoin

Place = tuple[dict[str, Any], str, str]
"""A schema, the address that its references are relative to, and the pointer to it."""


def without_inner_identifiers(schema: dict[str, Any], named: tuple[str, ...]) -> dict[str, Any]:
    """A schema whose parts have no ``$id``. It is changed in place.

    Args:
        named: the keywords whose values are schemas by names.
    """
    places = [*_places(schema, "", "#", named)]
    if not any("$id" in part for part, _, pointer in places if pointer != "#"):
        return schema
    known = {"": "#"}  # pointers by addresses
    for part, base, pointer in places:
        name = part.get("$id")
        if isinstance(name, str) and (pointer == "#" or not name.startswith("#")):
            known[base] = pointer
        for anchor in (part.get("$anchor"), part.get("$dynamicAnchor"), str(name).partition("#")[2]):
            if isinstance(anchor, str) and anchor:
                known[f"{base}#{anchor}"] = pointer
    for part, base, pointer in places:
        if isinstance(reference := part.get("$ref"), str):
            address, fragment = urldefrag(_joined(base, reference))
            if not fragment or fragment.startswith("/"):
                found = known.get(address)
                part["$ref"] = reference if found is None else found + fragment
            else:
                part["$ref"] = known.get(f"{address}#{fragment}", reference)
        if pointer != "#":
            part.pop("$id", None)
    return schema


def _joined(base: str, reference: str) -> str:
    """A reference as an address. Some kinds of addresses cannot be joined, but all have fragments."""
    return base + reference if reference.startswith("#") else urljoin(base, reference)


def _places(value: Any, base: str, pointer: str, named: tuple[str, ...]) -> Iterator[Place]:
    """A schema and those in it, before they are changed."""
    if isinstance(value, list):
        for number, one in enumerate(value):
            yield from _places(one, base, f"{pointer}/{number}", named)
    elif isinstance(value, dict):
        if isinstance(name := value.get("$id"), str):
            base = urldefrag(_joined(base, name)).url
        yield value, base, pointer
        for keyword, one in value.items():
            below = f"{pointer}/{_escaped(keyword)}"
            if keyword in named and isinstance(one, dict):
                for key, some in one.items():
                    yield from _places(some, base, f"{below}/{_escaped(key)}", named)
            elif keyword not in ("const", "enum", "default", "examples"):
                yield from _places(one, base, below, named)


def _escaped(key: str) -> str:
    return quote(key.replace("~", "~0").replace("/", "~1"), safe="~!$&'()*+,;=:@")
