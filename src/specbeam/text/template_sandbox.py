"""The language of chat templates: Jinja's sandbox with the functions, filters and tags that transformers gives them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names under which a message has its reasoning. Templates read the first, and some the second."""


def render(template: str, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
    """The text that a template makes of messages.

    Raises:
        Exception: whatever the template's mistakes lead to.
    """
    conversation = [with_reasoning(message) for message in messages]
    return _compiled(template).render(messages=conversation, **{"tools": None, "documents": None} | {**variables})


def with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its reasoning under the names that templates read."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


class Arguments(dict[str, Any]):
    """The arguments of a tool call. A template that writes them without ``tojson`` writes JSON, and not Python."""

    def __str__(self) -> str:
        return _to_json(self)


def with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose tool calls have such arguments."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return message | {"tool_calls": [call | {"function": _readable(call["function"])} for call in calls]}


def _readable(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return function | {"arguments": Arguments(arguments)} if isinstance(arguments, dict) else function


@lru_cache
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(template)


class GenerationTag(Extension):
    """``{% generation %}`` marks what the assistant says. Here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Any) -> Any:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter would escape the characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Dict:
    """``dict`` for templates, without the attributes of the class."""

    def __call__(self, *given: Any, **named: Any) -> dict[Any, Any]:
        return dict(*given, **named)

    def fromkeys(self, *given: Any) -> dict[Any, Any]:
        return dict.fromkeys(*given)


class _Namespace(Namespace):
    """``namespace`` for templates, without names that begin with an underscore."""

    def __init__(*given: Any, **named: Any) -> None:  # so ``self`` may be one of the names
        this, *rest = given
        values = dict(*rest, **named)
        for name in values:
            _Namespace._check(name)
        Namespace.__init__(this, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"templates cannot set {name!r}: names in a namespace may not begin with an underscore")
