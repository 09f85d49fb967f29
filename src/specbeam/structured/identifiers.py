"""Schemas with an ``$id`` within another: their references become pointers from the whole schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urldefrag, urljoin

APPLIES, IGNORED = ("draft/2019-09", "draft/2020-12"), ("draft-04", "draft-06", "draft-07")
"""The drafts, by their ``$schema``, in which an ``$id`` beside a ``$ref`` applies, and in which it does not."""
Place = tuple[dict[str, Any], str, str]
"""A schema, the address that its references are relative to, and the pointer to it."""


def without_inner_identifiers(schema: dict[str, Any], named: tuple[str, ...]) -> dict[str, Any]:
    """A schema whose parts have no ``$id``, but beside a ``$ref`` if no draft is named. It is changed in place.

    Args:
        named: the keywords whose values are schemas by names.
    """
    draft = str(schema.get("$schema"))
    applies = any(name in draft for name in APPLIES)
    places = [*_places(schema, "", "#", named, applies)]
    if not any("$id" in part for part, _, pointer in places if pointer != "#"):
        return schema
    known = {"": "#"}  # pointers by addresses
    for part, base, pointer in places:
        name = part.get("$id") if applies or "$ref" not in part else None
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
        if pointer != "#" and ("$ref" not in part or applies or any(name in draft for name in IGNORED)):
            part.pop("$id", None)
    return schema


def _joined(base: str, reference: str) -> str:
    """A reference as an address. Some kinds of addresses cannot be joined, but all have fragments."""
    return base + reference if reference.startswith("#") else urljoin(base, reference)


def _places(value: Any, base: str, pointer: str, named: tuple[str, ...], applies: bool) -> Iterator[Place]:
    """A schema and the schemas in it, before they are changed.

    Args:
        applies: an ``$id`` beside a ``$ref`` does.
    """
    if isinstance(value, list):
        for number, one in enumerate(value):
            yield from _places(one, base, f"{pointer}/{number}", named, applies)
    elif isinstance(value, dict):
        if isinstance(name := value.get("$id"), str) and (applies or "$ref" not in value):
            base = urldefrag(_joined(base, name)).url
        yield value, base, pointer
        for keyword, one in value.items():
            below = f"{pointer}/{_escaped(keyword)}"
            if keyword in named and isinstance(one, dict):
                for key, some in one.items():
                    yield from _places(some, base, f"{below}/{_escaped(key)}", named, applies)
            elif keyword not in ("const", "enum", "default", "examples"):
                yield from _places(one, base, below, named, applies)


def _escaped(key: str) -> str:
    return quote(key.replace("~", "~0").replace("/", "~1"), safe="~!$&'()*+,;=:@")
