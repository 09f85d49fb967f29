"""Phi-4-mini: a JSON list of all calls behind ``<|tool_call|>``, or behind ``functools`` as vLLM's template asks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specbeam.structured.tools.tool_format import Message, ToolFormat, has

SYSTEM = "You are a helpful assistant with some tools."
"""The system message of Microsoft's example, for conversations without one."""


@dataclass(frozen=True)
class Phi(ToolFormat):
    """Microsoft's own template. It reads tools as a text of the system message, and leaves out tool calls."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[list[Message], dict[str, Any]]:
        made = [self._with_calls(message) for message in messages]
        if tools:
            if not made or made[0]["role"] != "system":
                made.insert(0, {"role": "system", "content": SYSTEM})
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


def format_of(template: str) -> ToolFormat | None:
    """The format, if a chat template asks for it."""
    if has(template, "functools["):
        return ToolFormat("Phi-4-mini", marker="functools[", first="functools[", between=", ", last="]")
    if has(template, "message['tools']", "<|tool|>"):
        return Phi("Phi-4-mini", marker="<|tool_call|>", first="<|tool_call|>[", between=", ", last="]<|/tool_call|>")
    return None
