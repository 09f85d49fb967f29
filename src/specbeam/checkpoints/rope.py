"""Rotary position embedding, and the ways in which it is stretched to longer texts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from specbeam.errors import SpecbeamError

UNROTATED = float(np.float32(1e30))
"""A divisor after which a frequency turns nothing, as GGUF files have it."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021) of the first features of each head.

    Attributes:
        theta: the base of the frequencies.
        dim: how many features of a head are rotated.
        divisors: one for each of the dim / 2 frequencies; None to divide by 1.
        scale: factor of the rotated features (LongRoPE's attention factor; Ding et al. 2024).
    """

    theta: float
    dim: int
    divisors: tuple[float, ...] | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        divisors = self.divisors or (1.0,)
        if not all(math.isfinite(x) and x > 0 for x in (self.theta, self.scale, *divisors)):
            raise SpecbeamError(
                f"the model's configuration has rope_theta {self.theta}, attention factor {self.scale} and rotary "
                f"divisors from {min(divisors)}: all must be over 0"
            )
        if self.dim % 2 or self.dim < 2 or (self.divisors and len(self.divisors) != self.dim // 2):
            raise SpecbeamError(
                f"the model's configuration rotates {self.dim} features of a head with {len(divisors)} divisors: "
                "the first must be even, and the second half of it"
            )

    def frequencies(self) -> list[float]:
        """The dim / 2 frequencies in radians per position."""
        plain = rope_frequencies(self.theta, self.dim)
        return [f / d for f, d in zip(plain, self.divisors or [1.0] * len(plain), strict=True)]


def rope_frequencies(theta: float, dim: int) -> list[float]:
    """Rotary frequencies without scaling (Su et al. 2021, 3.2.2)."""
    return [theta ** (-i / dim) for i in range(0, dim, 2)]


def proportional_divisors(rotated: int, total: int, factor: float = 1.0) -> tuple[float, ...]:
    """Gemma 4's rotation: the first frequencies of the whole head turn, and the others do not.

    Args:
        rotated: how many frequencies turn.
        total: of a head.
        factor: by which these are stretched.
    """
    return (factor,) * rotated + (UNROTATED,) * (total - rotated)


def llama3_divisors(
    theta: float, dim: int, factor: float, low: float, high: float, trained: float
) -> tuple[float, ...]:
    """Llama 3.1's rotary scaling: it stretches long wavelengths by factor, keeps short ones, and blends between.

    Args:
        low, high: wavelengths over trained / low are stretched. Those under trained / high are kept.
        trained: context length before the stretch.
    """
    divisors = []
    for frequency in rope_frequencies(theta, dim):
        turns = trained * frequency / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - kept) / factor + kept))
    return tuple(divisors)


def yarn_divisors(
    theta: float,
    dim: int,
    factor: float,
    trained: float,
    fast: float = 32.0,
    slow: float = 1.0,
    truncate: bool = True,
    mix: float = 1.0,
) -> tuple[float, ...]:
    """YaRN's rotary scaling: it keeps fast frequencies, stretches slow ones by factor, and blends between (Peng 2023).

    Args:
        trained: context length before the stretch.
        fast, slow: frequencies with over fast turns in the trained context are kept. Those under slow are stretched.
        truncate: the blend begins and ends at integers of features.
        mix: how much of the kept part counts (``extrapolation_factor``).
    """
    if not (factor > 0 and trained > 0 and fast > 0 and slow > 0 and theta > 0 and theta != 1):
        raise SpecbeamError(
            f"the model's configuration has YaRN scaling with factor {factor}, original context {trained}, beta_fast "
            f"{fast}, beta_slow {slow} and rope_theta {theta}: all must be over 0"
        )

    def feature(turns: float) -> float:  # whose frequency makes this number of turns in the trained context
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = feature(fast), feature(slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    span = last - first or 0.001
    kept = (mix * (1 - min(max((i - first) / span, 0.0), 1.0)) for i in range(dim // 2))
    return tuple(1 / ((1 - k) / factor + k) for k in kept)


def yarn_scale(factor: float, numerator: float = 1.0, denominator: float = 0.0) -> float:
    """YaRN's attention factor (Peng 2023, 3.4), as a quotient where a model says so (``mscale / mscale_all_dim``)."""
    if factor <= 1:
        return 1.0
    return (0.1 * numerator * math.log(factor) + 1) / (0.1 * denominator * math.log(factor) + 1)


def longrope_scale(factor: float, trained: float) -> float:
    """LongRoPE's attention factor (Ding et al. 2024, 3.2).

    Args:
        factor: the context length now, as a multiple of the trained one.
        trained: context length in the first training.
    """
    return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
