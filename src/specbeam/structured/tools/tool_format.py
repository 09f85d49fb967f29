"""What the formats of tool calls have in common: how a model writes calls, and how its template gets tools."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

OBJECT = r'\{\s*"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
"""A call as a JSON object, up to its arguments."""


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


def has(template: str, *texts: str) -> bool:
    """Whether a template has all these texts. Those in its own texts may have escaped quotation marks."""
    template = re.sub(r"\\(.)", r"\1", template)
    return all(text in template for text in texts)
