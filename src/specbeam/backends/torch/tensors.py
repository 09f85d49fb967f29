"""Tensors of PyTorch and the host: copies between them, whether weights are finite, and a digest of weights."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

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


def are_finite(weights: Tensor) -> bool:
    """Whether all of some weights are finite numbers. They are read once: ``isfinite`` would make tensors as large."""
    if not weights.numel():
        return True
    if weights.element_size() == 1:  # PyTorch does not compare numbers of 8 bits
        weights = weights.float()
    return all(math.isfinite(extreme) for extreme in weights.aminmax())


def digest_of(module: nn.Module, about: str) -> str:
    """SHA-256 over a text and a module's weights: names, shapes, dtypes and bytes, in the order of the module."""
    digest = hashlib.sha256(about.encode())
    for name, weights in module.state_dict().items():
        digest.update(f"{name} {weights.dtype} {[*weights.shape]}\n".encode())
        digest.update(weights.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
