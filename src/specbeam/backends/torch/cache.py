"""The KV cache of a model that runs in PyTorch, and the part of it that a segment sees."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbeam.backends.contract import TreeBatch
from specbeam.backends.torch.transfer import to_device

MIN_CAPACITY = 64
"""Slots."""


class KeyValues:
    """Keys and values for each layer, [kv_heads, capacity, head_dim]. Capacity grows by quarters."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
        self.capacity = 0
        self._keys = [torch.empty(kv_heads, 0, head_dim, dtype=dtype, device=device) for _ in range(layers)]
        self._values = [torch.empty(kv_heads, 0, head_dim, dtype=dtype, device=device) for _ in range(layers)]

    def reserve(self, slots: int) -> None:
        """Make room for at least this many slots, and keep the stored ones. After a failure it may be tried again."""
        if slots <= self.capacity:
            return
        capacity = max(slots, self.capacity * 5 // 4, MIN_CAPACITY)
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):  # one by one: memory never holds all old and all new tensors
                kv_heads, held, head_dim = old.shape
                if held < capacity:
                    # Zeros: passes of static shapes read empty slots too, and 0 times garbage may be NaN.
                    new = old.new_zeros(kv_heads, capacity, head_dim)
                    new[:, :held] = old
                    tensors[layer] = new
        self.capacity = capacity

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """The keys and the values of a layer. They move when the capacity grows."""
        return self._keys[number], self._values[number]

    def stay(self) -> None:
        """Promise compiled passes that no tensor moves from now on: CUDA graphs write to fixed addresses."""
        for tensor in (*self._keys, *self._values):
            torch._dynamo.mark_static_address(tensor)

    def store(
        self, layer: int, slots: slice | Tensor, k: Tensor, v: Tensor, seen: slice | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values [n, kv_heads, head_dim]; return [kv_heads, c, head_dim] of the slots that are seen.

        Slots in one run are a view, others are gathered.
        """
        keys, values = self._keys[layer], self._values[layer]
        keys[:, slots] = k.transpose(0, 1)
        values[:, slots] = v.transpose(0, 1)
        return keys[:, seen], values[:, seen]


class Seen(NamedTuple):
    """The slots that the nodes of a segment see.

    Attributes:
        slots: int64 [c], each of them once.
        positions: of the nodes that lie there, int64 [c].
        visible: bool [n, c], true where a node sees a slot. None if every node sees every slot.
    """

    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    visible: NDArray[np.bool_] | None

    def near(self, positions: NDArray[np.int64], window: int | None) -> NDArray[np.bool_] | None:
        """``visible`` in a layer whose nodes, at these positions int64 [n], see only the last ``window`` tokens."""
        if window is None or positions.max() - self.positions.min() < window:
            return self.visible
        near = positions[:, None] - self.positions < window
        return near if self.visible is None else near & self.visible


def seen_by(segment: TreeBatch) -> Seen:
    """The slots that the nodes of a segment see."""
    positions = segment.positions
    prefix = segment.prefix[: positions.max() + 1]
    end = len(prefix)
    above = np.flatnonzero(prefix >= 0)  # others lie before the windows of all nodes
    prefix = prefix[above]
    in_prefix = above <= positions[:, None]
    if not segment.suffixes.shape[1]:
        return Seen(prefix, above, None if len(positions) == 1 else in_prefix)
    beyond = np.arange(end, end + segment.suffixes.shape[1])
    row, column = np.nonzero(beyond <= positions[:, None])
    slots, first, at = np.unique(segment.suffixes[row, column], return_index=True, return_inverse=True)
    in_suffixes = np.zeros((len(positions), len(slots)), dtype=bool)
    in_suffixes[row, at] = True
    return Seen(
        np.concatenate([prefix, slots]),
        np.concatenate([above, beyond[column[first]]]),
        None if len(positions) == 1 else np.concatenate([in_prefix, in_suffixes], axis=1),
    )


def index(slots: NDArray[np.int64], device: torch.device | str) -> slice | Tensor:
    """Slots int64 [n] as an index of a tensor: a slice where they lie in one run."""
    first, n = int(slots[0]), len(slots)
    if slots[-1] - first == n - 1 and (np.diff(slots) == 1).all():
        return slice(first, first + n)
    return to_device(slots, device)
