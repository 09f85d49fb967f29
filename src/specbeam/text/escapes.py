"""Escapes in texts that are typed: on a command line, or in an override of a study. Files hold texts as they are."""

from __future__ import annotations

import re

from specbeam.errors import SpecbeamError

ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
"""The characters that stand for others after a backslash."""
ESCAPE = re.compile(r"\\(.?)", re.DOTALL)


def unescaped(text: str) -> str:
    r"""A typed text, with ``\n``, ``\t``, ``\r`` and ``\\`` read as new line, tab, carriage return and backslash."""

    def read(found: re.Match[str]) -> str:
        if found[1] not in ESCAPES:
            raise SpecbeamError(
                rf"{found[0]} in {text!r} is no escape: write \\ for a backslash; \n, \t and \r are a new line, a tab "
                "and a carriage return"
            )
        return ESCAPES[found[1]]

    return ESCAPE.sub(read, text)


def hint_for_prompt(prompt: str) -> str | None:
    r"""A line about a typed prompt that holds a backslash and an n, and no new line. A prompt is read as it is."""
    if "\\n" not in prompt or "\n" in prompt:
        return None
    return (
        r"the prompt has a backslash and an n, as typed; for a new line write $'first line\nsecond line' in the shell"
    )
