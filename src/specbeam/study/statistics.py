"""Means and ratios of measurements, with confidence intervals and tests, and how a report writes them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbeam.errors import SpecbeamError

BOOTSTRAP_RESAMPLES = 2000
MIN_VALUES_FOR_INTERVAL = 5
"""Fewer values give no interval: resamples of 3 values are 10 different sets, and their interval is far too narrow."""


@dataclass(frozen=True)
class Estimate:
    """A mean and its confidence interval.

    Attributes:
        low, high: the ends of the interval; None with fewer than MIN_VALUES_FOR_INTERVAL values.
        n: the number of values.
    """

    mean: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True)
class Comparison:
    """The ratio of two quantities that were measured on the same rows.

    Attributes:
        ratio: the geometric mean of the rows' ratios.
        low, high: the ends of its confidence interval; None with fewer than MIN_VALUES_FOR_INTERVAL rows.
        p: the probability of ratios at least this far from 1 if there is no difference.
        n: the number of rows.
    """

    ratio: float
    low: float | None
    high: float | None
    p: float
    n: int

    @property
    def settled(self) -> bool:
        """Whether the measurements settle which quantity is larger: there is an interval, and it excludes 1."""
        ends = [end for end in (self.low, self.high) if end is not None and math.isfinite(end)]
        return len(ends) == 2 and not ends[0] <= 1 <= ends[1]


def bootstrap_mean(values: Sequence[float], confidence: float = 0.95, seed: int = 0) -> Estimate | None:
    """The mean and its bias-corrected and accelerated bootstrap interval (BCa; Efron 1987).

    Equal values have an interval without width, and so have values that differ by their rounding only. Without values
    there is no mean: None.
    """
    from scipy.stats import DegenerateDataWarning, bootstrap

    if not len(values):
        return None
    mean = float(np.mean(values))
    if len(values) < MIN_VALUES_FOR_INTERVAL:
        return Estimate(mean, None, None, len(values))
    if min(values) == max(values):
        return Estimate(mean, mean, mean, len(values))
    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        warnings.simplefilter("ignore", DegenerateDataWarning)  # BCa divides by 0: see below
        result = bootstrap(
            (np.asarray(values, dtype=np.float64),),
            np.mean,
            n_resamples=BOOTSTRAP_RESAMPLES,
            confidence_level=confidence,
            method="BCa",
            rng=np.random.default_rng(seed),
        )
    low, high = map(float, result.confidence_interval)
    if not (math.isfinite(low) and math.isfinite(high)):
        low = high = mean
    return Estimate(mean, low, high, len(values))


def share_interval(part: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval (1927) of a share, which holds for few counts and for shares of 0 and 1."""
    from scipy.stats import binomtest

    interval = binomtest(part, total).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


def paired_ratio(a: Sequence[float], b: Sequence[float], confidence: float = 0.95, seed: int = 0) -> Comparison | None:
    """The geometric mean of a / b over pairs, with a bootstrap interval over the pairs.

    The test is Wilcoxon's signed-rank test (1945) of the logarithms of the ratios, two-sided.

    Returns:
        None without pairs.
    """
    from scipy.stats import wilcoxon

    if len(a) != len(b):
        raise SpecbeamError(f"{len(a)} values cannot be paired with {len(b)}: give as many of both")
    both = np.array([a, b], dtype=np.float64)
    allowed = (both > 0) & np.isfinite(both)
    if not allowed.all():
        raise SpecbeamError(f"there is no ratio of {both[~allowed][0]}: give values that are positive and finite")
    logs = np.log(both[0]) - np.log(both[1])
    mean = bootstrap_mean(logs, confidence, seed)
    if mean is None:
        return None
    p = float(wilcoxon(logs).pvalue) if logs.any() else 1.0
    low, high = (None if end is None else float(np.exp(end)) for end in (mean.low, mean.high))
    return Comparison(float(np.exp(mean.mean)), low, high, p, mean.n)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values (Holm 1979): if nothing differs, the probability of any below a level is at most that level.

    The smallest of n is multiplied by n, the next by n - 1, and so on. None is below the one before it.
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


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
