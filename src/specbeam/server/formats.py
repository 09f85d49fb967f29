"""The forms that an answer may have to take: OpenAI's ``response_format`` and vLLM's ``structured_outputs``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from specbeam.server.errors import Refusal
from specbeam.server.neutral import Fields
from specbeam.structured import Choice, Grammar, JsonSchema, Regex
from specbeam.structured.grammar import OutputSpec

MAX_CHOICES = 1000
Describe = Callable[[Any, Any], OutputSpec]
"""Describes what may follow a prompt, from the model and the prompt's token ids. It may take long, so it is not called
in the event loop.
"""
ANY_OBJECT = {"type": "object"}
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

    def describe(self) -> Describe:
        given = {
            name: value for name, value in self if value not in (None, False) or (name == "json_" and value is False)
        }
        if len(given) != 1:
            raise Refusal(
                "structured_outputs needs one of choice, json, json_object, regex and grammar: give "
                '{"choice": [texts]}, for example',
                "structured_outputs",
            )
        described: Callable[[], OutputSpec] = partial(JsonSchema, ANY_OBJECT if self.json_object else self.json_)
        if self.choice is not None:
            described = partial(Choice, self.choices)
        if self.regex is not None:
            described = partial(Regex, self.regex)
        if self.grammar is not None:
            described = partial(Grammar, self.grammar)
        return lambda *_: described()


def schema_of(given: Any) -> Schema | str | None:
    """The schema of a format; None if it has none, or one that says nothing."""
    if isinstance(given, StructuredOutputs):
        return given.json_ or None
    schema = given.json_schema if isinstance(given, SchemaFormat) else given
    return schema.schema_ or None if isinstance(schema, NamedSchema) else None


def describe_of(given: Any) -> Describe | None:
    """What describes a format; None for any text."""
    if isinstance(given, ObjectFormat):
        return lambda *_: JsonSchema(ANY_OBJECT)
    schema = given.json_schema if isinstance(given, SchemaFormat) else given
    if not isinstance(schema, NamedSchema):
        return None
    return lambda *_: JsonSchema({} if schema.schema_ is None else schema.schema_)
