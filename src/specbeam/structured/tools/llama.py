"""Llama 3.1 and 3.2: one JSON object with "name" and "parameters". Some answers have "arguments" instead."""

from __future__ import annotations

from specbeam.structured.tools.tool_format import ToolFormat, has


def format_of(template: str) -> ToolFormat | None:
    """The format, if a chat template asks for it."""
    if not has(template, '"parameters": dictionary of argument name'):
        return None
    return ToolFormat(
        "Llama 3", marker="", first="", middle='", "parameters": ', bare=True, key="(?:parameters|arguments)"
    )
