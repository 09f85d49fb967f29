"""Mistral: ``[TOOL_CALLS]`` and a JSON list of all calls, or since late 2024 one name and its arguments each."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass

from specbeam.structured.tools.tool_format import ToolFormat, has

MARKER, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
ID_LENGTH = 9
"""Characters of a call's id. The templates refuse other lengths."""


@dataclass(frozen=True)
class Mistral(ToolFormat):
    @property
    def call_id(self) -> str:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(ID_LENGTH))


def format_of(template: str) -> ToolFormat | None:
    """The format, if a chat template asks for it."""
    if not has(template, MARKER):
        return None
    if has(template, ARGUMENTS):
        return Mistral(
            "Mistral",
            marker=MARKER,
            first=MARKER,
            before="",
            middle=ARGUMENTS,
            after="",
            between=MARKER,
            head=r"(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)",
        )
    space = " " if has(template, f"{MARKER} [") else ""
    return Mistral("Mistral", marker=MARKER, first=f"{MARKER}{space}[", between=", ", last="]")
