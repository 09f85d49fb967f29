"""Gumbel noise that depends only on the seed, the sequence, the position and the token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbeam.backends.torch.transfer import to_device

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
WORD = 0xFFFFFFFF


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> list[Tensor]:
    """Four random words for each counter: Philox4x32-10 (Salmon et al. 2011, "Parallel Random Numbers", 3.3).

    Args:
        counter: four words, int64 of one shape, each below 2**32.
        key: two such words.
    """
    c, k = list(counter), list(key)
    for _ in range(ROUNDS):
        low = [word * multiplier for word, multiplier in zip(c[::2], MULTIPLIERS, strict=True)]
        high = [product >> 32 & WORD for product in low]  # products wrap around, and their bits are right
        c = [high[1] ^ c[1] ^ k[0], low[1] & WORD, high[0] ^ c[3] ^ k[1], low[0] & WORD]
        k = [word + step & WORD for word, step in zip(k, KEY_STEPS, strict=True)]
    return c


def gumbel(
    seeds: NDArray[np.uint64],
    streams: NDArray[np.uint32],
    positions: NDArray[np.uint32],
    vocab: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Draws from the standard Gumbel distribution for the first tokens, float64 [n, vocab].

    The key is the seed, and the counter is (token // 4, position, stream, 0). The word's number is token % 4.

    Args:
        seeds, streams, positions: of each row, [n].
    """
    bits = seeds.astype(np.int64)  # torch.compile has no bit operations of uint64
    columns = (bits & WORD, bits >> 32 & WORD, positions, streams)
    low, high, position, stream = to_device(np.stack([c.astype(np.int64) for c in columns])[..., None], device)
    quarter = torch.arange(-(-vocab // 4), device=device)[None]
    words = torch.stack(philox([quarter, position, stream, torch.zeros_like(quarter)], [low, high]), dim=-1)
    uniform = (words.flatten(1)[:, :vocab].double() + 0.5) * 2.0**-32
    return -(-uniform.log()).log()
