"""The highest scores among many."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128


def top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest scores [..., k] of [..., n], the highest first, and where they are, int64 [..., k].

    What ``Tensor.topk`` finds. That takes longer on a CPU than anything else in a step of beam search, so long rows are
    looked at in blocks first: the k highest scores are in the k blocks with the highest maxima. Among equal scores the
    choice is ``topk``'s own, since transformers' beams depend on it.
    """
    n = scores.shape[-1]
    if scores.device.type != "cpu" or n < 16 * BLOCK * k:
        found = scores.topk(k)
        return found.values, found.indices
    whole = n // BLOCK * BLOCK
    blocks = scores[..., :whole].reshape(*scores.shape[:-1], -1, BLOCK).amax(-1).topk(k + 1).indices
    inside = (blocks[..., None] * BLOCK + torch.arange(BLOCK)).flatten(-2)
    rest = torch.arange(whole, n).expand(*inside.shape[:-1], n - whole)
    places = torch.cat([inside, rest], dim=-1)
    found = scores.gather(-1, places).topk(k + 1)
    if (found.values[..., 1:] == found.values[..., :-1]).any():
        found = scores.topk(k)
        return found.values, found.indices
    return found.values[..., :k], places.gather(-1, found.indices[..., :k])
