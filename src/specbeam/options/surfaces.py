"""What other surfaces than the command line and HTTP say of the options: the page, type checkers and documentation."""

from __future__ import annotations

import json
import re
from typing import Any

from specbeam.options.declared import OPTIONS, Kind, Option

FIELD_KINDS = {Kind.INTEGER: "number", Kind.NUMBER: "number", Kind.SIZE: "auto", Kind.TEXTS: "text"}
LARGEST_IN_PAGE = 2**31 - 1
KEYWORDS = re.compile(r'(class OptionKeywords\(.*?""".*?"""\n\n).*?(?=\n\n\n)', re.DOTALL)
HEAD = "| Option | Values | Default | Has an effect with | HTTP |\n| --- | --- | --- | --- | --- |"


def page_script() -> str:
    """The script of the page that declares its fields for options."""
    fields = [_field(option) for option in OPTIONS.values() if option.page is not None]
    unset = {name: option.unset for name, option in OPTIONS.items()}
    return f"export const OPTIONS = {json.dumps(fields)};\nexport const UNSET = {json.dumps(unset)};\n"


def _field(option: Option) -> dict[str, Any]:
    page, numbers = option.page, option.range
    assert page is not None
    field: dict[str, Any] = {
        "name": option.http_name,
        "label": page.label,
        "kind": FIELD_KINDS[option.kind],
        "step": page.step,
        "help": option.sentence,
        "more": page.more,
        "needs": sorted(option.needs),
    }
    if numbers is not None:  # browsers count steps from the least value
        starts_late = not numbers.or_zero and (numbers.exclusive or 0 < numbers.low < page.step)
        field["least"] = page.step if starts_late else 0 if numbers.or_zero else numbers.low
        field["most"] = min(numbers.high, LARGEST_IN_PAGE)
    if page.start is not None:
        field["start"] = page.start
    if page.in_chat:
        start = "" if page.start_in_chat is None else page.start_in_chat
        field["chat"] = {"start": start, "more": page.more_in_chat, "isServers": page.of_server}
    return field


def with_keywords(module: str) -> str:
    """A module, whose class ``OptionKeywords`` gets the types of the options that callers may give."""
    fields = "\n".join(f"    {name}: {option.accepts or option.annotation}" for name, option in OPTIONS.items())
    return KEYWORDS.sub(lambda found: found[1] + fields, module)


def table() -> str:
    """The options in a table of Markdown, and then what each does."""
    rows = "\n".join(_row(option) for option in OPTIONS.values())
    details = "\n".join(f"- **`{name}`**: {option.description}" for name, option in OPTIONS.items())
    return f"{HEAD}\n{rows}\n\n{details}"


def _row(option: Option) -> str:
    needs = " and ".join(sorted(option.needs))
    values = option.range.words if option.range is not None else f"`{option.accepts or option.annotation}`"
    http = "" if option.http_name is None else f"`{option.http_name}`"
    cells = (f"`{option.name}`", values.replace("|", r"\|"), f"`{option.unset}`", needs, http)
    return f"| {' | '.join(cells)} |"
