"""Templates of prompts: a text with names of columns in braces. They can do nothing but take a row's cells."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specbeam.errors import SpecbeamError
from specbeam.options.names import nearest_name

if TYPE_CHECKING:
    from specbeam.jobs.formats import Rows


class Template:
    """The text of a prompt with columns in braces, such as ``{review}``. ``{{`` and ``}}`` stand for braces.

    Args:
        name: of the file, for messages.
        text: of the file. One line end at its end is no part of the prompt: editors put it there.

    Attributes:
        text: without that line end.
        columns: the names in braces, each once.

    Raises:
        SpecbeamError: a brace has no partner, braces hold more than a name, or no column is named.
    """

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text.replace("\r\n", "\n").removesuffix("\n")
        self._parts: list[tuple[str, str | None]] = []  # a text, and the column that follows it
        try:
            for before, column, form, conversion in string.Formatter().parse(self.text):
                self._parts.append((before, column))
                if column == "" or form or conversion:
                    raise ValueError("braces hold the name of a column, and nothing else")
        except ValueError as error:
            raise SpecbeamError(
                f"{name} is no template ({error}): write {{{{ and }}}} for braces in the text"
            ) from error
        self.columns = [*dict.fromkeys(column for _, column in self._parts if column is not None)]
        if not self.columns:
            raise SpecbeamError(f"{name} names no column, so all prompts would be the same: write {{review}} or so")

    def check(self, rows: Rows) -> None:
        """Raise SpecbeamError if the rows lack a column of the template."""
        for name in self.columns:
            if name not in rows.columns:
                near = nearest_name(name, rows.columns)
                hint = f"did you mean {{{near}}}? " if near else ""
                there = ", ".join(rows.columns)
                message = f"{self.name} has {{{name}}}, but {rows.path} has no such column"
                raise SpecbeamError(f"{message}: {hint}there are {there}; {{{{ and }}}} stand for braces")

    def fill(self, cells: Mapping[str, Any]) -> str | SpecbeamError:
        """The prompt of a row, or why it has none. A text stands there as it is, and another value as JSON has it."""
        from specbeam.jobs.formats import json_of

        texts = []
        for before, column in self._parts:
            texts.append(before)
            if column is not None:
                if (value := cells[column]) is None:
                    return SpecbeamError(f"the row has no {column}")
                try:
                    texts.append(value if isinstance(value, str) else json_of(value))
                except (TypeError, ValueError) as error:
                    return SpecbeamError(f"the row's {column} cannot stand in a prompt: {error}")
        return "".join(texts)
