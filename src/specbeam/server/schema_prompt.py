"""The JSON schema of an answer, written into the prompt: a constraint does not tell the model what is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

INSTRUCTION = "Answer in JSON. Here is the JSON schema that you must adhere to:\n<schema>\n{schema}\n</schema>"
"""The words of Hermes' JSON mode."""
HINT = (
    "the prompt does not name %r of the answer's JSON schema, and the model does not see the schema: name the keys in "
    'the prompt, or give "schema_in_prompt": true, or --schema-in-prompt for all requests (%s; said once)'
)
MAX_NAMES = 100
"""Of a schema, which are looked for in a prompt."""


def with_schema(messages: Sequence[dict[str, Any]], schema: Any) -> list[dict[str, Any]]:
    """The messages with the schema behind the system message, or before the user's first where there is none.

    Not every template has a system message, and in some it takes the place of their own.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    said = INSTRUCTION.format(schema=text)
    place = next((i for i, message in enumerate(messages) if message["role"] in ("system", "user")), 0)
    first = messages[place]
    in_parts = isinstance(first["content"], list)
    parts = [first["content"], [{"type": "text", "text": said}] if in_parts else said]
    before, behind = parts if first["role"] == "system" else parts[::-1]
    content = [*before, *behind] if in_parts else f"{before}\n\n{behind}"
    return [*messages[:place], {**first, "content": content}, *messages[place + 1 :]]


def unnamed(messages: Sequence[dict[str, Any]], schema: Any) -> str | None:
    """A property of the schema that no message names; None if there is none."""
    if isinstance(schema, str):
        with suppress(ValueError, RecursionError):
            schema = json.loads(schema)
    text = "\n".join(str(message["content"]) for message in messages)
    return next((name for name in islice(_names(schema), MAX_NAMES) if name not in text), None)


def _names(schema: Any) -> Iterator[str]:
    """The properties of a schema, at all levels."""
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            properties = one.get("properties")
            yield from properties if isinstance(properties, dict) else ()
            left += one.values()
        elif isinstance(one, list):
            left += one
