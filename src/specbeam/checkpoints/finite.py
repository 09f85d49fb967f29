"""Weights that are NaN or infinite: a model with one of them has no probabilities."""

from __future__ import annotations

import math
from pathlib import Path

from torch import Tensor

from specbeam.errors import SpecbeamError


def are_finite(weights: Tensor) -> bool:
    """Whether all of some weights are finite numbers. They are read once: ``isfinite`` would make tensors as large."""
    if not weights.numel():
        return True
    if weights.element_size() == 1:  # PyTorch does not compare numbers of 8 bits
        weights = weights.float()
    return all(math.isfinite(extreme) for extreme in weights.aminmax())


def not_finite(place: str | Path, tensor: str) -> SpecbeamError:
    """The error for a tensor with weights that are not finite.

    Args:
        place: the file or the model that has the tensor.
    """
    return SpecbeamError(
        f"{place}: tensor {tensor} has weights that are not finite numbers (NaN or infinite): fetch it again, or ask "
        "who made it for a sound one"
    )
