"""Keys and values of one token tree."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbeam.backends.contract import Segment


class TreeCache:
    """Keys and values for each layer, [kv_heads, capacity, head_dim]. Capacity grows by quarters, up to ``most``."""

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, most: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.capacity = 0
        self._positions = np.zeros(0, dtype=np.int64)  # in the text, of the node of each slot
        self.most = most
        self._keys = [torch.empty(kv_heads, 0, head_dim, dtype=dtype, device=device) for _ in range(layers)]
        self._values = [torch.empty(kv_heads, 0, head_dim, dtype=dtype, device=device) for _ in range(layers)]

    def reserve(self, slots: int) -> None:
        """Make room for at least this many slots, and keep the stored ones. After a failure it may be tried again."""
        if slots <= self.capacity:
            return
        capacity = max(slots, min(max(self.capacity * 5 // 4, 64), self.most))
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):  # one by one: memory never holds all old and all new tensors
                kv_heads, held, head_dim = old.shape
                if held < capacity:
                    # Zeros: passes of static shapes read empty slots too, and 0 times garbage may be NaN.
                    new = old.new_zeros(kv_heads, capacity, head_dim)
                    new[:, :held] = old
                    tensors[layer] = new
        self._positions.resize(capacity, refcheck=False)
        self.capacity = capacity

    def stay(self) -> None:
        """Promise compiled passes that no tensor moves from now on: CUDA graphs write to fixed addresses."""
        for tensor in (*self._keys, *self._values):
            torch._dynamo.mark_static_address(tensor)

    def note_positions(self, segment: Segment[TreeCache]) -> NDArray[np.int64]:
        """Note the positions of a segment's nodes; return the positions of all slots below length, int64 [length]."""
        self._positions[segment.slots] = segment.positions
        return self._positions[: segment.length]

    def store(self, layer: int, slots: slice | Tensor, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Store keys and values [n, kv_heads, head_dim]; return [kv_heads, length, head_dim] of all slots."""
        keys, values = self._keys[layer], self._values[layer]
        keys[:, slots] = k.transpose(0, 1)
        values[:, slots] = v.transpose(0, 1)
        return keys[:, :length], values[:, :length]
