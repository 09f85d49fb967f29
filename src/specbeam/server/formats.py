"""The forms that an answer may have to take: OpenAI's ``response_format`` and vLLM's ``structured_outputs``.

A constraint does not tell the model what is asked for, so the schema may also be written into the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import Field

from specbeam.server.errors import Refusal
from specbeam.server.ignored_fields import Fields
from specbeam.structured import Choice, Grammar, JsonSchema, Regex
from specbeam.structured.grammar import OutputSpec

MAX_CHOICES = 1000
MakeOutputSpec = Callable[[Any, Any], OutputSpec]
"""Makes the output spec for a prompt, from the model and the token ids. It may take long, so it is not called in the
event loop.
"""
ANY_OBJECT = {"type": "object"}
INSTRUCTION = "Answer in JSON. Here is the JSON schema that you must adhere to:\n<schema>\n{schema}\n</schema>"
"""As in Hermes' JSON mode."""
HINT = (
    "the prompt does not name %r of the answer's JSON schema, and the model does not see the schema: name the keys in "
    'the prompt, or give "schema_in_prompt": true, or --schema-in-prompt for all requests (%s; said once)'
)
MAX_NAMES = 100
"""This many properties of a schema are looked for in a prompt."""
Schema = dict[str, Any] | bool
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class TextFormat(Fields):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(Fields):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Fields):
    """A JSON Schema. It is enforced whether it is strict or not. The name and the description have no effect."""

    name: Name
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class SchemaFormat(Fields):
    """JSON that is valid by a schema, as chat and text completions have it."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class FlatSchemaFormat(NamedSchema):
    """JSON that is valid by a schema, as responses have it."""

    type: Literal["json_schema"]


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]
FlatFormat = Annotated[TextFormat | ObjectFormat | FlatSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Fields):
    """The form of an answer, in vLLM's words. Exactly one of the fields is given."""

    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)] | None = (
        None
    )
    json_: Schema | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts that an answer may be, each once; empty if something else is asked for."""
        return tuple(dict.fromkeys(self.choice or ()))

    def output_spec(self) -> MakeOutputSpec:
        fields = {
            name: value for name, value in self if value not in (None, False) or (name == "json_" and value is False)
        }
        if len(fields) != 1:
            raise Refusal(
                "structured_outputs needs one of choice, json, json_object, regex and grammar: give "
                '{"choice": [texts]}, for example',
                "structured_outputs",
            )
        make_spec: Callable[[], OutputSpec] = partial(JsonSchema, ANY_OBJECT if self.json_object else self.json_)
        if self.choice is not None:
            make_spec = partial(Choice, self.choices)
        if self.regex is not None:
            make_spec = partial(Regex, self.regex)
        if self.grammar is not None:
            make_spec = partial(Grammar, self.grammar)
        return lambda *_: make_spec()


def schema_of(form: Any) -> Schema | str | None:
    """The schema of a format; None if it has none, or an empty one."""
    if isinstance(form, StructuredOutputs):
        return form.json_ or None
    schema = form.json_schema if isinstance(form, SchemaFormat) else form
    return schema.schema_ or None if isinstance(schema, NamedSchema) else None


def output_spec_of(form: Any) -> MakeOutputSpec | None:
    """The maker of a format's output spec; None for any text."""
    if isinstance(form, ObjectFormat):
        return lambda *_: JsonSchema(ANY_OBJECT)
    schema = form.json_schema if isinstance(form, SchemaFormat) else form
    if not isinstance(schema, NamedSchema):
        return None
    return lambda *_: JsonSchema({} if schema.schema_ is None else schema.schema_)


def with_schema(messages: Sequence[dict[str, Any]], schema: Any) -> list[dict[str, Any]]:
    """The messages with the schema behind the system message, or before the user's first where there is none.

    No system message is added: some templates have none, and in others it replaces the template's own.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    instruction = INSTRUCTION.format(schema=text)
    index = next((i for i, message in enumerate(messages) if message["role"] in ("system", "user")), 0)
    first = messages[index]
    in_parts = isinstance(first["content"], list)
    parts = [first["content"], [{"type": "text", "text": instruction}] if in_parts else instruction]
    before, behind = parts if first["role"] == "system" else parts[::-1]
    content = [*before, *behind] if in_parts else f"{before}\n\n{behind}"
    return [*messages[:index], {**first, "content": content}, *messages[index + 1 :]]


def unnamed_property(messages: Sequence[dict[str, Any]], schema: Any) -> str | None:
    """A property of the schema that no message names."""
    if isinstance(schema, str):
        with suppress(ValueError, RecursionError):
            schema = json.loads(schema)
    text = "\n".join(str(message["content"]) for message in messages)
    return next((name for name in islice(_properties(schema), MAX_NAMES) if name not in text), None)


def _properties(schema: Any) -> Iterator[str]:
    """The properties of a schema, at all levels."""
    stack = [schema]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            properties = value.get("properties")
            yield from properties if isinstance(properties, dict) else ()
            stack += value.values()
        elif isinstance(value, list):
            stack += value
