"""Hermes, Qwen2.5, Qwen3 and SmolLM3: a JSON object between ``<tool_call>`` and ``</tool_call>`` for each call.

Qwen2.5-Coder has a template that asks for this, and writes the object in a fenced block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specbeam.structured.tools.tool_format import Message, ToolFormat, has


@dataclass(frozen=True)
class SmolLM3(ToolFormat):
    """The same. Its template has a name of its own for such tools."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[list[Message], dict[str, Any]]:
        return [*messages], {"xml_tools": [*tools]} if tools else {}


def format_of(template: str) -> ToolFormat | None:
    """The format, if a chat template asks for it."""
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
