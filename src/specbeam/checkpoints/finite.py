"""Weights that are NaN or infinite: a model with one of them has no probabilities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specbeam.errors import SpecbeamError


def are_finite(weights: NDArray[np.float32]) -> bool:
    """Whether all of some weights are finite numbers. ``isfinite`` of each would make an array of the same length."""
    with np.errstate(invalid="ignore"):
        return not weights.size or bool(np.isfinite((weights.min(), weights.max())).all())


def not_finite(place: str | Path, tensor: str) -> SpecbeamError:
    """The error for a tensor with weights that are not finite.

    Args:
        place: the file or the model that has the tensor.
    """
    return SpecbeamError(
        f"{place}: tensor {tensor} has weights that are not finite numbers (NaN or infinite): fetch it again, or ask "
        "who made it for a sound one"
    )
