"""Tool calls: models' formats for them, the grammars that enforce these formats, and their readers."""

from __future__ import annotations

from specbeam.structured.tools import hermes, llama, mistral, phi
from specbeam.structured.tools.tool_format import ToolFormat as ToolFormat

FORMATS = (mistral, phi, llama, hermes)


def format_of(template: str) -> ToolFormat | None:
    """The format of tool calls that a chat template asks for; None for a template without tools, or with another."""
    return next((found for one in FORMATS if (found := one.format_of(template)) is not None), None)
