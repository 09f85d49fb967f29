"""The formats of tool calls: how a model writes calls, and how its chat template gets tools."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specbeam.structured.tools.syntax import GEMMA, JSON, PYTHON, TAGGED, Json, Syntax

Message = dict[str, Any]

OBJECT = r'\{\s*"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
"""A call as a JSON object, up to its arguments."""
MISTRAL_CALLS, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
HARMONY_HEAD = (
    r"(?P<name>[\w.-]+?)(?:<\|channel\|>(?:commentary|analysis))?\s*(?:<\|constrain\|>)?(?:json)?<\|message\|>\s*(?=\{)"
)
"""The channel comes before the function, or behind it."""
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
        syntax: how arguments are written.
        also: another text that begins calls. It is read, and never asked for.
        opening: what comes before an answer without calls.
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
    syntax: Syntax = JSON
    also: str = ""
    opening: str = ""

    @property
    def marks(self) -> str:
        """All texts of the format."""
        parts = (self.first, self.before, self.middle, self.after, self.between or "", self.last, self.opening)
        return " ".join([*parts, self.syntax.marks])

    def written(self, name: str, arguments: Any) -> list[str]:
        """An answer with one call, in each of the ways in which models write it."""
        call = self.call(name, arguments)
        ways = [f"{self.first}{call}{self.last}"]
        if self.bare:
            ways.append(f"```json\n{json.dumps(json.loads(call), ensure_ascii=False, indent=2)}\n```")
        return ways

    def call(self, name: str, arguments: Any) -> str:
        """One call, without what stands around all calls."""
        return f"{self.before}{name}{self.middle}{self.syntax.write(arguments)}{self.after}"

    @property
    def prompt_marks(self) -> bool:
        """Whether the prompt has the marker already. So a call at the beginning of an answer comes without it."""
        return bool(self.marker) and not self.first

    @property
    def may_lack_marker(self) -> bool:
        """Whether a call is known by its own beginning, too."""
        return bool(self.also) and self.before.startswith(self.also)

    @property
    def call_id(self) -> str:
        """A name for a new call."""
        return f"call_{secrets.token_hex(12)}"

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[list[Message], dict[str, Any]]:
        """The messages as the chat template reads them, and the variable by which it gets the tools."""
        made = [*messages] if isinstance(self.syntax, Json) else [*map(_with_objects, messages)]
        return made, {"tools": [*tools]} if tools else {}


def _with_objects(message: Message) -> Message:
    """A message whose calls have arguments as objects. Of a call that was cut they are the whole arguments."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    made = [
        call | {"function": {**call["function"], "arguments": _object(call["function"]["arguments"])}} for call in calls
    ]
    return message | {"tool_calls": made}


def _object(arguments: Any) -> Any:
    """Arguments as an object, from the beginning of its JSON."""
    for end in ("", "}", '"}') if isinstance(arguments, str) else ():
        try:
            found = json.loads(arguments + end)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    return {} if isinstance(arguments, str) else arguments


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
class InContent(ToolFormat):
    """A template that leaves out tool calls. They go into the content of their message, as the model wrote them."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[list[Message], dict[str, Any]]:
        made, variables = super().prompt(messages, tools)
        return [self._with_calls(message) for message in made], variables

    def _with_calls(self, message: Message) -> Message:
        calls = [self._written(call["function"]) for call in message.get("tool_calls", ())]
        if not calls:
            return message
        others = {name: value for name, value in message.items() if name != "tool_calls"}
        return others | {"content": f"{message['content']}{self.first}{', '.join(calls)}{self.last}"}

    def _written(self, function: Any) -> str:
        """A call. Its arguments have none of the texts by which control tokens begin, as far as their syntax can."""
        arguments = function["arguments"]
        if isinstance(arguments, str):  # of a call that was cut
            text = f"{self.before}{function['name']}{self.middle}{arguments}{self.after}"
        else:
            text = self.call(function["name"], arguments)
        return text.replace("<|", "\\u003c|")


@dataclass(frozen=True)
class Phi(InContent):
    """Microsoft's own template. It reads tools as a text of the system message."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[list[Message], dict[str, Any]]:
        made, _ = super().prompt(messages, ())
        if tools:
            if not made or made[0]["role"] != "system":
                made.insert(0, {"role": "system", "content": PHI_SYSTEM})
            listed = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
            made[0] = {**made[0], "tools": listed}
        return made, {}


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


def _granite(template: str) -> ToolFormat | None:
    """Granite 3: a JSON list of all calls behind ``<|tool_call|>``. Granite 4 writes calls as Hermes does."""
    if not has(template, "<|tool_call|> followed by a JSON list"):
        return None
    return InContent("Granite 3", marker="<|tool_call|>", first="<|tool_call|>[", between=", ", last="]")


def _hunyuan(template: str) -> ToolFormat | None:
    """Hunyuan: a JSON list of all calls between ``<tool_calls>`` and ``</tool_calls>``."""
    if not has(template, "<tool_calls>[", '"arguments":'):
        return None
    return ToolFormat("Hunyuan", marker="<tool_calls>", first="<tool_calls>[", between=", ", last="]</tool_calls>")


def _qwen3_coder(template: str) -> ToolFormat | None:
    """Qwen3-Coder, Qwen3.5 and others: ``<function=NAME>`` with a text between tags for each argument.

    Qwen3-Coder often leaves out the ``<tool_call>`` before it.
    """
    if not has(template, "<tool_call>", "<function=", "<parameter="):
        return None
    return ToolFormat(
        "Qwen3-Coder",
        marker="<tool_call>",
        first="<tool_call>\n",
        before="<function=",
        middle=">\n",
        after="</function>",
        between="\n</tool_call>\n<tool_call>\n",
        last="\n</tool_call>",
        head=r"(?:<function=)?(?P<name>[^>\s]+)>",
        syntax=TAGGED,
        also="<function=",
    )


def _gemma4(template: str) -> ToolFormat | None:
    """Gemma 4: ``call:NAME{...}`` between ``<|tool_call>`` and ``<tool_call|>``, in a notation of its own."""
    if not has(template, "<|tool_call>call:"):
        return None
    return ToolFormat(
        "Gemma 4",
        marker="<|tool_call>",
        first="<|tool_call>",
        before="call:",
        middle="",
        after="",
        between="<tool_call|><|tool_call>",
        last="<tool_call|>",
        head=r"call:(?P<name>[\w.-]+)\s*(?=\{)",
        syntax=GEMMA,
    )


def _lfm2(template: str) -> ToolFormat | None:
    """LFM2 and LFM2.5: a list of calls of Python between ``<|tool_call_start|>`` and ``<|tool_call_end|>``.

    Templates up to LFM2.5-1.2B leave out tool calls.
    """
    if not has(template, "List of tools: [") and not has(template, "<|tool_list_start|>"):
        return None
    kind = ToolFormat if has(template, "tool_calls") else InContent
    return kind(
        "LFM2",
        marker="<|tool_call_start|>",
        first="<|tool_call_start|>[",
        before="",
        middle="(",
        after="",
        between=", ",
        last="]<|tool_call_end|>",
        head=r"(?P<name>[\w.-]+)\(",
        syntax=PYTHON,
    )


@dataclass(frozen=True)
class Harmony(ToolFormat):
    """gpt-oss. Its template refuses content beside thoughts where there are calls: the thoughts come first."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[list[Message], dict[str, Any]]:
        made, variables = super().prompt(messages, tools)
        thinks = [bool(message.get("tool_calls") and message.get("reasoning_content")) for message in made]
        return [
            message | {"content": ""} if it else message for message, it in zip(made, thinks, strict=True)
        ], variables


def _harmony(template: str) -> ToolFormat | None:
    """gpt-oss: a message in the channel "commentary" to the function. It ends the answer, so there is one call."""
    if not has(template, "<|channel|>commentary", "to=", "functions."):
        return None
    return Harmony(
        "gpt-oss",
        marker="<|channel|>commentary to=functions.",
        first="<|channel|>commentary to=functions.",
        before="",
        middle=" <|constrain|>json<|message|>",
        after="",
        head=HARMONY_HEAD,
        also="to=functions.",
        opening="<|channel|>final<|message|>",
    )


@dataclass(frozen=True)
class GLM4(ToolFormat):
    """Its template knows neither calls nor the role of results. A call is a message whose ``metadata`` is a name."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[list[Message], dict[str, Any]]:
        made, variables = super().prompt(messages, tools)
        return [turn for message in made for turn in self._turns(message)], variables

    @staticmethod
    def _turns(message: Message) -> Iterator[Message]:
        """The turns of a message: its content, and each of its calls."""
        calls = message.get("tool_calls", ())
        others = {name: value for name, value in message.items() if name != "tool_calls"}
        if message["role"] == "tool":
            yield {"role": "observation", "content": message["content"]}
        elif message["content"] or not calls:
            yield others
        for function in (call["function"] for call in calls):
            arguments = function["arguments"]
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            yield {"role": message["role"], "metadata": function["name"], "content": text}


def _glm4(template: str) -> ToolFormat | None:
    """GLM-4-0414: the name of a tool behind ``<|assistant|>``, which ends a prompt, and JSON in the next line."""
    if not has(template, "可用工具", "<|observation|>", "metadata"):
        return None
    head = r"(?P<name>[\w.-]+)[ \t]*\r?\n\s*(?=\{)"
    marker = "<|assistant|>"
    return GLM4("GLM-4", marker=marker, first="", before="", middle="\n", after="", between=marker, head=head)


NAMES = "Hermes, Mistral, Llama 3, Phi-4-mini, Granite 3, Hunyuan, Qwen3-Coder, Gemma 4, LFM2, gpt-oss, GLM-4"
"""Of the formats, for people."""
FORMATS = (_mistral, _phi, _llama, _granite, _hunyuan, _qwen3_coder, _gemma4, _lfm2, _harmony, _glm4, _hermes)


def format_of(template: str) -> ToolFormat | None:
    """The format of tool calls that a chat template asks for; None for a template without tools, or with another."""
    return next((found for of in FORMATS if (found := of(template)) is not None), None)


def has(template: str, *texts: str) -> bool:
    """Whether a template has all these texts. Those in its own texts may have escaped quotation marks."""
    template = re.sub(r"\\(.)", r"\1", template)
    return all(text in template for text in texts)
