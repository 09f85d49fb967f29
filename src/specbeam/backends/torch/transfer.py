"""Copies between the host and the device of the logits. The host waits only for the copy of the selections."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Values = list[Any]
"""The arrays or tensors of a selection, in the order of its attributes."""


def to_device(array: NDArray[Any], device: torch.device | str) -> Tensor:
    """An array as a tensor on a device. The host does not wait until a GPU is idle.

    CUDA has read pageable memory once its call returns. Other devices may read it later, so there the host waits.
    """
    return torch.from_numpy(array).to(device, non_blocking=torch.device(device).type == "cuda")


def to_cpu(selections: list[Values]) -> list[Values]:
    """The values as arrays, all in one copy: float64 holds each of them exactly."""
    tensors = [value for values in selections for value in values if value is not None]
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [[None if value is None else value.numpy() for value in values] for values in selections]
    together = torch.cat([tensor.flatten().double() for tensor in tensors]).cpu().numpy()
    arrays = []
    for tensor, flat in zip(tensors, np.split(together, np.cumsum([t.numel() for t in tensors])[:-1]), strict=True):
        kind: Any = {torch.int64: np.int64, torch.float32: np.float32, torch.float64: np.float64}[tensor.dtype]
        arrays.append(flat.reshape(tensor.shape).astype(kind))
    rest = iter(arrays)
    return [[None if value is None else next(rest) for value in values] for values in selections]
