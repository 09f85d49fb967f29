"""Numbers of a report, as text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from specbeam.study.statistics import Comparison


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
    low, high = estimate["low"], estimate["high"]
    return "" if low is None or low == high else f"{number(low * scale)}–{number(high * scale)}"


def settled(comparison: Mapping[str, Any]) -> bool:
    """Whether measurements settle which of two quantities is larger (:attr:`Comparison.settled`)."""
    return Comparison(**comparison).settled


def too_few(n: int) -> str:
    """Why there is no interval."""
    return f"n={n}: too few for an interval"


def between_ratios(comparison: Mapping[str, Any]) -> str:
    """The interval of a ratio; "" if it has no interval."""
    return "" if comparison["low"] is None else f"{comparison['low']:.2f}–{comparison['high']:.2f}"


def times(comparison: Mapping[str, Any]) -> str:
    """A speed-up in words, with its interval if it has one."""
    within = between_ratios(comparison)
    return f"{comparison['ratio']:.2f} times" + (f" ({within})" if within else "")


def several(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def short(text: str, most: int = 32) -> str:
    """A text of at most this many characters."""
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"
