"""How sure one can be of a mean, and of a difference, from the rows that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbeam.errors import SpecbeamError

RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A mean and its confidence interval.

    Attributes:
        n: of so many values.
    """

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Comparison:
    """How many times as large one thing is as another, measured on the same rows.

    Attributes:
        ratio: the geometric mean of the rows' ratios, and its confidence interval from low to high.
        p: how likely ratios so far from 1 are if there is no difference.
        n: of so many rows.
    """

    ratio: float
    low: float
    high: float
    p: float
    n: int


def bootstrap_mean(values: Sequence[float], confidence: float = 0.95, seed: int = 0) -> Estimate | None:
    """The mean and its bias-corrected and accelerated bootstrap interval (BCa; Efron 1987).

    Values that are all the same, such as a single one, have an interval without width; no values have no mean.
    """
    from scipy.stats import bootstrap

    if not len(values):
        return None
    mean = float(np.mean(values))
    if min(values) == max(values):
        return Estimate(mean, mean, mean, len(values))
    found = bootstrap(
        (np.asarray(values, dtype=np.float64),),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=confidence,
        method="BCa",
        rng=np.random.default_rng(seed),
    )
    low, high = map(float, found.confidence_interval)
    return Estimate(mean, low, high, len(values))


def paired_ratio(a: Sequence[float], b: Sequence[float], confidence: float = 0.95, seed: int = 0) -> Comparison | None:
    """How many times b is a: the geometric mean of a / b over pairs, with a bootstrap interval over the pairs.

    The test is Wilcoxon's signed-rank test (1945) of the logarithms of the ratios, two-sided.

    Returns:
        None without pairs.

    Raises:
        SpecbeamError: the values are not as many, or not all positive and finite.
    """
    from scipy.stats import wilcoxon

    if len(a) != len(b):
        raise SpecbeamError(f"{len(a)} values cannot be paired with {len(b)}: give as many of both")
    both = np.array([a, b], dtype=np.float64)
    if not np.all((both > 0) & np.isfinite(both)):
        wrong = float(both[~((both > 0) & np.isfinite(both))][0])
        raise SpecbeamError(f"there is no ratio of {wrong}: give values that are positive and finite")
    logs = np.log(both[0]) - np.log(both[1])
    mean = bootstrap_mean(logs, confidence, seed)
    if mean is None:
        return None
    p = float(wilcoxon(logs).pvalue) if logs.any() else 1.0
    ratio, low, high = (float(np.exp(x)) for x in (mean.mean, mean.low, mean.high))
    return Comparison(ratio, low, high, p, mean.n)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted so that, if nothing differs, the chance that any is below a level is at most that level.

    The smallest of n is multiplied by n, the next by n - 1 and so on, and none is below one before it (Holm 1979).
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, number in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[number]))
        adjusted[number] = largest
    return adjusted
