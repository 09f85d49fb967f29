"""Numbers of a report, as text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def number(value: float | None) -> str:
    """Three significant digits, and all that are before the point."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    digits = max(0, min(4, 2 - math.floor(math.log10(abs(value)))))
    return f"{value:,.{digits}f}"


def between(told: Mapping[str, Any], scale: float = 1.0) -> str:
    """An interval, or nothing if there is none, or it has no width."""
    low, high = told.get("low"), told.get("high")
    if low is None or high is None or low == high:
        return ""
    return f"{number(low * scale)}–{number(high * scale)}"


def between_ratios(told: Mapping[str, Any]) -> str:
    return "" if told.get("low") is None else f"{told['low']:.2f}–{told['high']:.2f}"


def times(told: Mapping[str, Any]) -> str:
    """A speed-up in words."""
    within = between_ratios(told)
    return f"{told['ratio']:.2f} times" + (f" ({within})" if within else "")


def several(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def first_line(text: Any, most: int = 300) -> str:
    line = next(iter(str(text).strip().splitlines()), "")
    return line if len(line) <= most else line[: most - 1] + "…"
