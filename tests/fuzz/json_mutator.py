"""Mutations of JSON documents as data: parsers see valid JSON with surprising values."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

SURPRISES: list[Any] = [
    *(None, True, False, [], [0], [-1], [[]], ["a", 1], {}, {"": ""}, {"a": None}),
    *(0, 1, -1, 2, 3, 7, 255, 259, 1 << 31, (1 << 31) - 1, 1 << 40, 1 << 63, 1 << 64, -(1 << 63), 10**30),
    *(0.0, -0.0, 0.5, 1.5, 1e-320, 1e308, float("inf"), float("nan")),
    *("", "a", "\0", "\ud800", "../x", "/etc/hostname", "é▁" * 40, "9" * 5000),
]
SHARE_OF_BYTE_MUTATIONS = 0.1


def mutate_json(data: bytes, longest: int, seed: int) -> bytes | None:
    """A JSON document with a few values changed. None if bytes are to be changed instead."""
    draw = random.Random(seed)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = None
    if document is None or draw.random() < SHARE_OF_BYTE_MUTATIONS:
        return None
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        document = mutated(document, draw)
    try:
        changed = json.dumps(document, ensure_ascii=draw.random() < 0.5).encode(errors="surrogatepass")
    except ValueError:  # a number of too many digits
        return None
    return changed if len(changed) <= longest else None


def mutated(document: Any, draw: random.Random) -> Any:
    """The document with one change at a random place."""
    places = [*_places(document)]
    if not places:
        return _surprise(draw)
    parent, key = draw.choice(places)
    if draw.random() < 0.3:  # the leaves of a large table would get nearly all of the changes
        parent, key = draw.choice([(parent, key) for parent, key in places if parent is document])
    change: Callable[..., None] = draw.choice((_replace, _replace, _nudge, _remove, _copy, _nest, _add))
    change(parent, key, places, draw)
    return document


def _places(value: Any) -> Any:
    """Every parent and key in a document."""
    stack = [value]
    while stack:
        value = stack.pop()
        keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for key in keys:
            yield value, key
            stack.append(value[key])


def _surprise(draw: random.Random) -> Any:
    return copy.deepcopy(draw.choice(SURPRISES))


def _replace(parent: Any, key: Any, places: list[Any], draw: random.Random) -> None:
    parent[key] = _surprise(draw)


def _nudge(parent: Any, key: Any, places: list[Any], draw: random.Random) -> None:
    value = parent[key]
    if isinstance(value, bool):
        parent[key] = not value
    elif isinstance(value, int | float) and abs(value) < 1e300:
        parent[key] = draw.choice((value + 1, value - 1, -value, value * 2, value / 2, value * 1000003, str(value)))
    elif isinstance(value, str) and value:
        at = draw.randrange(len(value))
        parent[key] = draw.choice((value[:at], value[at:], value * 2, value[:at] + chr(draw.randrange(0x300)), [value]))
    elif isinstance(value, list):
        parent[key] = draw.choice((value[:-1], value[::-1], value + copy.deepcopy(value), value[:1]))
    else:
        parent[key] = _surprise(draw)


def _remove(parent: Any, key: Any, places: list[Any], draw: random.Random) -> None:
    del parent[key]


def _copy(parent: Any, key: Any, places: list[Any], draw: random.Random) -> None:
    other, name = draw.choice(places)
    if not isinstance(other[name], dict | list):  # a copy of a parent in its child would be a loop
        parent[key] = other[name]


def _nest(parent: Any, key: Any, places: list[Any], draw: random.Random) -> None:
    parent[key] = draw.choice(([parent[key]], {"a": parent[key]}))


def _add(parent: Any, key: Any, places: list[Any], draw: random.Random) -> None:
    name, value = draw.choice(places)[1], _surprise(draw)
    if isinstance(parent, list):
        parent.insert(key, value)
    elif isinstance(name, str):
        parent[name] = value
