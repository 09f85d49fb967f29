"""The formats of tool calls: how a model writes calls, and how its chat template gets tools."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

OBJECT = r'\{\s*"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
"""A call as a JSON object, up to its arguments."""
MISTRAL_CALLS, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
MISTRAL_ID_LENGTH = 9
"""Characters of a call's id. The templates refuse other lengths."""
PHI_SYSTEM = "You are a helpful assistant with some tools."
"""The system message of Microsoft's example, for conversations without one."""


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes tool calls. ``first``, calls with ``between`` between them, and ``last`` make an answer.

    Attributes:
        name: of the format.
        marker: the text, or the special token, that begins calls. Empty if nothing does.
        first: what comes before the first call, with the marker.
        before, middle, after: what stands around the name of a call and its arguments.
        between: what stands between two calls; None if an answer has one call.
        last: what comes after the last call.
        head: a regular expression for the beginning of a call behind the marker, up to its arguments.
        bare: objects without the marker are calls, too, alone or in a fenced block.
        key: a regular expression for the key of the arguments in such an object.
    """

    name: str
    marker: str
    first: str
    before: str = '{"name": "'
    middle: str = '", "arguments": '
    after: str = "}"
    between: str | None = None
    last: str = ""
    head: str = OBJECT
    bare: bool = False
    key: str = "arguments"

    @property
    def marks(self) -> str:
        """All texts of the format."""
        return f"{self.first} {self.middle} {self.between or ''} {self.last}"

    def written(self, name: str, arguments: Any) -> list[str]:
        """An answer with one call, in each of the ways in which models write it."""
        call = f"{self.before}{name}{self.middle}{json.dumps(arguments, ensure_ascii=False)}{self.after}"
        ways = [f"{self.first}{call}{self.last}"]
        if self.bare:
            ways.append(f"```json\n{json.dumps(json.loads(call), ensure_ascii=False, indent=2)}\n```")
        return ways

    @property
    def call_id(self) -> str:
        """A name for a new call."""
        return f"call_{secrets.token_hex(12)}"

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[list[Message], dict[str, Any]]:
        """The messages as the chat template reads them, and the variable by which it gets the tools."""
        return [*messages], {"tools": [*tools]} if tools else {}


@dataclass(frozen=True)
class Mistral(ToolFormat):
    @property
    def call_id(self) -> str:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(MISTRAL_ID_LENGTH))


def _mistral(template: str) -> ToolFormat | None:
    """Mistral: ``[TOOL_CALLS]`` and a JSON list of all calls, or since late 2024 one name and its arguments each."""
    if not has(template, MISTRAL_CALLS):
        return None
    if has(template, MISTRAL_ARGUMENTS):
        return Mistral(
            "Mistral",
            marker=MISTRAL_CALLS,
            first=MISTRAL_CALLS,
            before="",
            middle=MISTRAL_ARGUMENTS,
            after="",
            between=MISTRAL_CALLS,
            head=r"(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)",
        )
    space = " " if has(template, f"{MISTRAL_CALLS} [") else ""
    return Mistral("Mistral", marker=MISTRAL_CALLS, first=f"{MISTRAL_CALLS}{space}[", between=", ", last="]")


@dataclass(frozen=True)
class Phi(ToolFormat):
    """Microsoft's own template. It reads tools as a text of the system message, and leaves out tool calls."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[list[Message], dict[str, Any]]:
        made = [self._with_calls(message) for message in messages]
        if tools:
            if not made or made[0]["role"] != "system":
                made.insert(0, {"role": "system", "content": PHI_SYSTEM})
            listed = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
            made[0] = {**made[0], "tools": listed}
        return made, {}

    def _with_calls(self, message: Message) -> Message:
        calls = [
            f"{self.before}{call['function']['name']}{self.middle}{_written(call['function']['arguments'])}{self.after}"
            for call in message.get("tool_calls", ())
        ]
        if not calls:
            return message
        text = f"{message['content']}{self.first}{', '.join(calls)}{self.last}"
        return {"role": message["role"], "content": text}


def _written(arguments: dict[str, Any] | str) -> str:
    """Arguments as JSON. They have none of the texts by which control tokens begin."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return text.replace("<|", "\\u003c|")


def _phi(template: str) -> ToolFormat | None:
    """Phi-4-mini: a JSON list of all calls behind ``<|tool_call|>``, or behind ``functools`` by vLLM's template."""
    if has(template, "functools["):
        return ToolFormat("Phi-4-mini", marker="functools[", first="functools[", between=", ", last="]")
    if has(template, "message['tools']", "<|tool|>"):
        return Phi("Phi-4-mini", marker="<|tool_call|>", first="<|tool_call|>[", between=", ", last="]<|/tool_call|>")
    return None


def _llama(template: str) -> ToolFormat | None:
    """Llama 3.1 and 3.2: one JSON object with "name" and "parameters". Some answers have "arguments" instead."""
    if not has(template, '"parameters": dictionary of argument name'):
        return None
    return ToolFormat(
        "Llama 3", marker="", first="", middle='", "parameters": ', bare=True, key="(?:parameters|arguments)"
    )


@dataclass(frozen=True)
class SmolLM3(ToolFormat):
    """The same. Its template has a name of its own for such tools."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[list[Message], dict[str, Any]]:
        return [*messages], {"xml_tools": [*tools]} if tools else {}


def _hermes(template: str) -> ToolFormat | None:
    """Hermes, Qwen2.5, Qwen3 and SmolLM3: a JSON object between ``<tool_call>`` and ``</tool_call>`` for each call.

    Qwen2.5-Coder has a template that asks for this, and writes the object in a fenced block.
    """
    if not has(template, "<tool_call>", '"arguments":') or has(template, "<function="):
        return None
    kind = SmolLM3 if has(template, "xml_tools") else ToolFormat
    return kind(
        "Hermes",
        marker="<tool_call>",
        first="<tool_call>\n",
        between="\n</tool_call>\n<tool_call>\n",
        last="\n</tool_call>",
        bare=True,
    )


def format_of(template: str) -> ToolFormat | None:
    """The format of tool calls that a chat template asks for; None for a template without tools, or with another."""
    return next((found for of in (_mistral, _phi, _llama, _hermes) if (found := of(template)) is not None), None)


def has(template: str, *texts: str) -> bool:
    """Whether a template has all these texts. Those in its own texts may have escaped quotation marks."""
    template = re.sub(r"\\(.)", r"\1", template)
    return all(text in template for text in texts)
