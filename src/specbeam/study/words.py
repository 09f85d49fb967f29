"""Numbers of a report, as text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def number(value: float | None) -> str:
    """A number with three significant digits, and all digits before the point."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    digits = max(0, min(4, 2 - math.floor(math.log10(abs(value)))))
    return f"{value:,.{digits}f}"


def between(estimate: Mapping[str, Any], scale: float = 1.0) -> str:
    """The interval of an estimate; "" if there is none, or it has no width."""
    low, high = estimate.get("low"), estimate.get("high")
    if low is None or high is None or low == high:
        return ""
    return f"{number(low * scale)}–{number(high * scale)}"


def settled(comparison: Mapping[str, Any]) -> bool:
    """Whether measurements settle which of two quantities is larger: their ratio's interval excludes 1."""
    ends = [end for end in (comparison.get("low"), comparison.get("high")) if end is not None and math.isfinite(end)]
    return len(ends) == 2 and not ends[0] <= 1 <= ends[1]


def too_few(n: int | None) -> str:
    """Why there is no interval."""
    return f"n={n}: too few for an interval"


def between_ratios(comparison: Mapping[str, Any]) -> str:
    """The interval of a ratio; "" if it has no interval."""
    return "" if comparison.get("low") is None else f"{comparison['low']:.2f}–{comparison['high']:.2f}"


def times(comparison: Mapping[str, Any]) -> str:
    """A speed-up in words."""
    within = between_ratios(comparison) or (too_few(comparison["n"]) if "n" in comparison else "")
    return f"{comparison['ratio']:.2f} times" + (f" ({within})" if within else "")


def several(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def first_line(text: Any, most: int = 300) -> str:
    line = next(iter(str(text).strip().splitlines()), "")
    return line if len(line) <= most else line[: most - 1] + "…"
