"""Tensors with weights that are NaN or infinite."""

from __future__ import annotations

import math

from torch import Tensor


def are_finite(weights: Tensor) -> bool:
    """Whether all of some weights are finite numbers. They are read once: ``isfinite`` would make tensors as large."""
    if not weights.numel():
        return True
    if weights.element_size() == 1:  # PyTorch does not compare numbers of 8 bits
        weights = weights.float()
    return all(math.isfinite(extreme) for extreme in weights.aminmax())
