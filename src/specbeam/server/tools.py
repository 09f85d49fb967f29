"""The tools of a request: OpenAI's fields, and how their calls are enforced and read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Discriminator, Field, ModelWrapValidatorHandler, PrivateAttr, Tag, model_validator

from specbeam.errors import SpecbeamError, shown
from specbeam.models.model import LanguageModel
from specbeam.server.errors import Refusal
from specbeam.server.fields import Decoding, Plan
from specbeam.server.formats import MakeOutputSpec, Name, schema_of, with_schema
from specbeam.server.ignored_fields import Fields, with_ignored_fields
from specbeam.server.models import ServedModel
from specbeam.structured import JsonSchema
from specbeam.structured.grammar import MAX_SCHEMA_BYTES
from specbeam.structured.thoughts import ThoughtFormat
from specbeam.structured.tools import ToolFormat
from specbeam.structured.tools.grammar import Tool, ToolGrammar
from specbeam.structured.tools.schema_rules import check

MAX_TOOLS = 128
ANY_ARGUMENTS = {"type": "object"}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function without parameters, as OpenAI documents."""
EXAMPLES: dict[str, Any] = {"string": "", "integer": 0, "number": 0, "boolean": True, "array": []}
EXAMPLE_LEVELS = 4
"""Levels of nested objects in an example."""
REPEATS_CALLS = "the last calls had been made before, with the same results, so this answer is a text"


class AsSent(Fields):
    """An object that the chat template reads as it was sent: models were trained on keys in this order."""

    _sent: dict[str, Any] = PrivateAttr()

    @model_validator(mode="wrap")
    @classmethod
    def _with_sent(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        parsed = handler(values)
        parsed._sent = values
        return parsed

    def in_sent_order(self, **values: Any) -> dict[str, Any]:
        """Values in the order of their fields in the request. Values of no field of it come last."""
        return {name: values[name] for name in self._sent if name in values} | values


class Function(AsSent):
    """A function that a model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="The JSON Schema of its arguments.")
    strict: bool | None = Field(None, description="Refuse a schema that cannot be enforced.")
    return_: dict[str, Any] | None = Field(
        None, alias="return", description="For the chat template, as in transformers."
    )

    @property
    def definition(self) -> dict[str, Any]:
        """The function as it was sent, always with parameters, since some templates read them."""
        names = [field.alias or name for name, field in Function.model_fields.items()]
        sent = {name: value for name, value in self._sent.items() if name in names}
        return sent if self.parameters is not None else sent | {"parameters": NO_ARGUMENTS}


@with_ignored_fields
class FunctionTool(AsSent):
    """A tool of chat completions."""

    type: Literal["function"]
    function: Function

    @property
    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        return self.in_sent_order(type=self.type, function=self.function.definition)


class FlatFunctionTool(Function):
    """A tool of responses."""

    type: Literal["function"]

    @property
    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        return {"type": self.type, "function": self.definition}


class FunctionName(Fields):
    name: str


class NamedTool(Fields):
    """The tool to call, in chat completions."""

    type: Literal["function"]
    function: FunctionName


class FlatNamedTool(FunctionName):
    """The tool to call, in responses."""

    type: Literal["function"]


class AllowedTools(Fields):
    """Some of the tools, which alone may be called. The model reads all of them."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedToolsChoice(Fields):
    """The tools that may be called, in chat completions."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class FlatAllowedTools(AllowedTools):
    """The tools that may be called, in responses."""

    type: Literal["allowed_tools"]
    tools: Annotated[list[FlatNamedTool], Field(min_length=1)]  # type: ignore[assignment]


def _form(choice: Any) -> str:
    if isinstance(choice, str):
        return "Word"
    kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", None)
    return "Allowed" if kind == "allowed_tools" else "Named"


OpenAIToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("Word")]
    | Annotated[NamedTool, Tag("Named")]
    | Annotated[AllowedToolsChoice, Tag("Allowed")],
    Discriminator(_form),
]
FlatToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("Word")]
    | Annotated[FlatNamedTool, Tag("Named")]
    | Annotated[FlatAllowedTools, Tag("Allowed")],
    Discriminator(_form),
]
"""The values of ``tool_choice``. A mistake is looked for in the form that the type names."""


@with_ignored_fields
class CalledFunction(AsSent):
    """A function and its arguments, as the model wrote them."""

    name: Name
    arguments: str

    @property
    def called(self) -> dict[str, Any]:
        """The function as chat templates read it. A call that was cut has arguments that are no object, but a text."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        is_object = isinstance(arguments, dict)
        return self.in_sent_order(name=self.name, arguments=arguments if is_object else self.arguments)


class ToolCall(AsSent):
    """A call in an answer that is given back."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description="In a stream, whose pieces clients join. It has no effect.")

    @property
    def for_template(self) -> dict[str, Any]:
        """The call as chat templates read it."""
        return self.in_sent_order(id=self.id, type=self.type, function=self.function.called)


class ToolFields(Decoding):
    """The fields of tools that chat completions and responses share."""

    tools: Any = None
    tool_choice: Any = None
    schema_in_prompt: bool | None = Field(
        None, description="Write the JSON schema of the answer into the prompt. The server's default if it is left out."
    )
    parallel_tool_calls: bool | None = Field(None, description="Whether an answer may have several calls. It may.")

    @property
    def offered(self) -> list[FunctionTool | FlatFunctionTool]:
        """The tools that a model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    def with_schema(self, model: ServedModel, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages, with the schema of the answer if it goes into the prompt."""
        schema = schema_of(self.structured_outputs or self.format)
        if schema in (None, True):
            if self.schema_in_prompt:
                says = f"schema_in_prompt: there is no JSON schema. Give one in {self.format_field}"
                raise Refusal(says, "schema_in_prompt")
            return messages
        if model.schema_in_prompt if self.schema_in_prompt is None else self.schema_in_prompt:
            return with_schema(messages, schema)
        if self.schema_in_prompt is None:
            model.hint_at_schema(messages, schema)
        return messages

    def tool_use(self, model: ServedModel, max_calls: int, messages: Sequence[dict[str, Any]]) -> ToolUse | None:
        """How the tools are enforced and read; None without tools."""
        choice = self.tool_choice
        if not self.tools and choice not in (None, "none", "auto"):
            raise Refusal("tool_choice asks for a call, and there are no tools: give tools", "tool_choice")
        functions = [tool.function if isinstance(tool, FunctionTool) else tool for tool in self.offered]
        if not functions:
            return None
        names = [function.name for function in functions]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise Refusal(f"two tools have the name {doubled[0]}: rename one", "tools")
        choice = getattr(choice, "allowed_tools", choice)
        is_named = not isinstance(choice, AllowedTools | str | None)
        is_required = is_named or getattr(choice, "mode", choice) == "required"
        allowed = [_name(tool) for tool in ([choice] if is_named else getattr(choice, "tools", ()))]
        if unknown := [name for name in allowed if name not in names]:
            raise Refusal(f"tool_choice names {shown(unknown[0])}, and no tool has this name", "tool_choice")
        if repeats_calls(messages) and not is_required:
            max_calls = 0
        use = ToolUse(
            model.tool_format("tools"),
            functions,
            allowed=allowed or names,
            is_required=is_required,
            has_form=getattr(self.format, "type", "text") != "text" and not is_required,
            max_calls=1 if is_named or (max_calls and self.parallel_tool_calls is False) else max_calls,
        )
        if self.structured_outputs is not None:
            raise Refusal("structured_outputs and tools both give the form: leave one out", "structured_outputs")
        if self.ignore_eos:
            raise Refusal("ignore_eos contradicts tools, which say where a text ends", "ignore_eos")
        return use


@dataclass(eq=False)
class ToolUse:
    """How the tools of a request are enforced and read.

    Attributes:
        functions: the tools.
        allowed: the names of functions that may be called.
        is_required: the answer is a call.
        has_form: an answer without calls has to take a form.
        max_calls: in one answer. 0: the conversation repeats its calls, so the model does not see the tools.
        unenforced: why a schema cannot be enforced, by tool. Its arguments may be any object.
    """

    tool_format: ToolFormat
    functions: Sequence[Function]
    allowed: Sequence[str]
    is_required: bool
    has_form: bool
    max_calls: int
    unenforced: dict[str, str] = field(default_factory=dict)

    @property
    def details(self) -> dict[str, Any]:
        """Values of an answer that are about the tools."""
        details: dict[str, Any] = {"unenforced_tools": self.unenforced} if self.unenforced else {}
        return details if self.max_calls else details | {"withheld_tools": REPEATS_CALLS}

    def plan(self, plan: Plan, thought_format: ThoughtFormat | None) -> Plan:
        """How to decode with the tools. The form in the plan is then for an answer without calls."""
        output_spec = partial(self._grammar, content=None if self.is_required else plan.output_spec)
        plan = replace(plan, output_spec=output_spec, names=plan.names | {"constraint": "tools"})
        return plan.after_thoughts(thought_format, opens=True, remarks=not self.has_form)

    def _grammar(self, lm: LanguageModel, ids: Sequence[int], content: MakeOutputSpec | None) -> ToolGrammar:
        """The grammar of answers to a prompt."""
        added = {i: token for i, token in lm.tokenizer.added_tokens_decoder.items() if i < lm.backend.vocab_size}
        try:
            size = len(json.dumps([function.parameters for function in self.functions]))
        except RecursionError:
            raise SpecbeamError("the tools are nested too deeply: use fewer levels") from None
        if size > MAX_SCHEMA_BYTES:
            raise SpecbeamError(f"the tools have {size:,} characters, and {MAX_SCHEMA_BYTES:,} are allowed")
        called = [function for function in self.functions if function.name in self.allowed]
        return ToolGrammar(
            self.tool_format,
            [Tool(function.name, self._schema(function)) for function in called],
            is_required=self.is_required,
            max_calls=self.max_calls,
            added={token.content: number for number, token in added.items() if token.content},
            shown=[number for number, token in added.items() if not token.special and number not in lm.eos_token_ids],
            content=None if content is None else cast(JsonSchema, content(lm, ids)),
        )

    def examples(self, lm: LanguageModel) -> list[int]:
        """Token ids of calls as models write them, from which lookups draft names, keys and spaces."""
        texts = [
            text
            for function in self.functions
            if function.name in self.allowed
            for text in self.tool_format.written(function.name, _example(function.parameters))
        ]
        return lm.tokenizer("\n".join(texts), add_special_tokens=False).input_ids

    @property
    def schemas(self) -> dict[str, Any]:
        """The schemas of arguments by the names of the tools that may be called."""
        return {one.name: one.parameters or NO_ARGUMENTS for one in self.functions if one.name in self.allowed}

    def _schema(self, function: Function) -> JsonSchema:
        """The schema of a function's arguments."""
        schema = NO_ARGUMENTS if function.parameters is None else function.parameters
        try:
            kind = schema.get("type", "object")
            if kind != "object" and not (isinstance(kind, list) and "object" in kind):
                raise SpecbeamError(f"arguments are an object, and no {shown(kind)}")
            made = JsonSchema({**schema, "type": "object"})
            check(self.tool_format.syntax, made)
            return made
        except SpecbeamError as error:
            if function.strict or self.is_required:
                raise SpecbeamError(f"the tool {function.name}: {error}") from error
            self.unenforced[function.name] = str(error)
            return JsonSchema(ANY_ARGUMENTS)


def _example(schema: Any, levels: int = EXAMPLE_LEVELS) -> Any:
    """A value that resembles what a schema allows. It need not be valid."""
    schema = schema if isinstance(schema, dict) and levels else {}
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict):
        keys = required if isinstance(required, list) and required else [*properties]
        return {key: _example(value, levels - 1) for key, value in properties.items() if key in keys}
    values = schema.get("enum")
    return values[0] if isinstance(values, list) and values else EXAMPLES.get(str(schema.get("type")), {})


def _name(choice: Any) -> str:
    return str(getattr(choice, "function", choice).name)


def repeats_calls(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether all calls at the end of a conversation repeat calls since the user's message, with the same results."""
    calls: dict[str, Any] = {}
    earlier, last = list[Any](), list[Any]()
    for message in messages:
        if message["role"] == "tool":
            last.append((calls.get(message.get("tool_call_id", "")), message["content"]))
        else:
            earlier, last = [] if message["role"] == "user" else [*earlier, *last], []
            calls |= {call["id"]: call["function"] for call in message.get("tool_calls", ())}
    return bool(last) and all(result in earlier for result in last)


def conversation(
    model: ServedModel, messages: list[dict[str, Any]], tools: Sequence[FunctionTool | FlatFunctionTool], field: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages as the chat template reads them, and the variable by which it gets the tools.

    As OpenAI does, this refuses a result of no call before it.

    Args:
        field: the field of the request that has the messages.
    """
    if messages and messages[-1].get("tool_calls"):
        raise Refusal(f"{field} end with tool calls: give their results, too", field)
    calls: set[str] = set()  # their ids
    for message in messages:
        calls |= {call["id"] for call in message.get("tool_calls", ())}
        answered = message.get("tool_call_id")
        if answered is None and message["role"] == "tool":
            raise Refusal(f"{field}: a message of the role tool has no tool_call_id: give the id of its call", field)
        if answered is not None and answered not in calls:
            raise Refusal(f"{field}: a result is of the call {shown(answered)}, and nothing before has it", field)
    if not tools and not calls:
        return messages, {}
    tool_format = model.tool_format("tools" if tools else field)
    return tool_format.prompt(messages, [tool.for_template for tool in tools])
