"""The highest scores among many."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_SIZE = 128


def top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest scores [..., k] of [..., n], the highest first, and their indices, int64 [..., k].

    The result is the result of ``Tensor.topk``. On a CPU ``topk`` would take longer than the rest of a step of beam
    search. So long rows are searched in blocks: the k highest scores are in the k blocks with the highest maxima. Among
    equal scores ``topk`` itself chooses, since transformers' beams depend on its choice.

    Raises:
        RuntimeError: k is more than n.
    """
    n = scores.shape[-1]
    if scores.device.type != "cpu" or n < 16 * BLOCK_SIZE * max(1, k):
        found = scores.topk(k)
        return found.values, found.indices
    whole = n // BLOCK_SIZE * BLOCK_SIZE
    blocks = scores[..., :whole].reshape(*scores.shape[:-1], -1, BLOCK_SIZE).amax(-1).topk(k + 1).indices
    inside = (blocks[..., None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten(-2)
    rest = torch.arange(whole, n).expand(*inside.shape[:-1], n - whole)
    places = torch.cat([inside, rest], dim=-1)
    found = scores.gather(-1, places).topk(k + 1)
    if (found.values[..., 1:] == found.values[..., :-1]).any():
        found = scores.topk(k)
        return found.values, found.indices
    return found.values[..., :k], places.gather(-1, found.indices[..., :k])
