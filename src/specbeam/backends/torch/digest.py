"""A digest of the weights of a part of a model."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def digest_of(module: nn.Module, about: str) -> str:
    """SHA-256 over a text and a module's weights: names, shapes, number types and bytes, in the order of the module."""
    digest = hashlib.sha256(about.encode())
    for name, weights in module.state_dict().items():
        digest.update(f"{name} {weights.dtype} {[*weights.shape]}\n".encode())
        digest.update(weights.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
