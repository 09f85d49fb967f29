"""Keys and values of one token tree."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbeam.backends.contract import Segment


class TreeCache:
    """Keys and values a layer, [kv_heads, capacity, head_dim] each. Capacity doubles as needed, up to the most."""

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, most: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.capacity = 0
        self._positions = np.zeros(0, dtype=np.int64)  # in the text, of the node of each slot
        self._most = most
        self._keys = [torch.empty(kv_heads, 0, head_dim, dtype=dtype, device=device) for _ in range(layers)]
        self._values = [torch.empty(kv_heads, 0, head_dim, dtype=dtype, device=device) for _ in range(layers)]

    def reserve(self, slots: int) -> None:
        """Make room for at least so many slots; what is stored stays. May be tried again after it failed."""
        if slots <= self.capacity:
            return
        capacity = max(slots, min(max(2 * self.capacity, 64), self._most))
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):  # a layer at a time: the old and the new never stand there whole
                kv_heads, held, head_dim = old.shape
                if held < capacity:
                    # Zeros, for passes of static shapes read slots that hold nothing yet: 0 times garbage may be NaN.
                    new = old.new_zeros(kv_heads, capacity, head_dim)
                    new[:, :held] = old
                    tensors[layer] = new
        self._positions.resize(capacity, refcheck=False)
        self.capacity = capacity

    def stay(self) -> None:
        """Promise compiled passes that nothing moves from here on: CUDA graphs write to where things lie."""
        for tensor in (*self._keys, *self._values):
            torch._dynamo.mark_static_address(tensor)

    def note_positions(self, segment: Segment[TreeCache]) -> NDArray[np.int64]:
        """Note where in the text a segment's nodes are; return it for all slots below its length, int64 [length]."""
        self._positions[segment.slots] = segment.positions
        return self._positions[: segment.length]

    def store(self, layer: int, slots: slice | Tensor, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Store keys and values [n, kv_heads, head_dim]; return those of the slots below length, slot by slot."""
        keys, values = self._keys[layer], self._values[layer]
        keys[:, slots] = k.transpose(0, 1)
        values[:, slots] = v.transpose(0, 1)
        return keys[:, :length], values[:, :length]
