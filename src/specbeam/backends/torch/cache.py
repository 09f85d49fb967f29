"""The KV cache of a model that runs in PyTorch, and the slots of it that a segment sees."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbeam.backends.contract import TreeBatch
from specbeam.backends.torch.tensors import to_device

MIN_CAPACITY = 64
"""Slots."""


class Kept(NamedTuple):
    """A tensor [heads, capacity, features] in which a part keeps numbers of each slot.

    Attributes:
        exact: it is in float32, whatever the weights are.
    """

    heads: int
    features: int
    exact: bool = False


class KeyValues:
    """What the parts of a model keep in slots, such as keys and values. Capacity grows by quarters.

    Args:
        kept: for each part that keeps something, its tensors.
        dtype: of those that are not exact.
    """

    def __init__(self, kept: Iterable[Iterable[Kept]], dtype: torch.dtype, device: str) -> None:
        self.capacity = 0
        self._tensors = [
            [
                torch.empty(one.heads, 0, one.features, dtype=torch.float32 if one.exact else dtype, device=device)
                for one in part
            ]
            for part in kept
        ]

    @property
    def slot_bytes(self) -> int:
        """What all parts keep of a token, in bytes."""
        return sum(one.shape[0] * one.shape[2] * one.itemsize for one in chain.from_iterable(self._tensors))

    def reserve(self, slots: int) -> None:
        """Make room for at least this many slots, and keep the stored ones. After a failure it may be tried again."""
        if slots <= self.capacity:
            return
        capacity = max(slots, self.capacity * 5 // 4, MIN_CAPACITY)
        for tensors in self._tensors:
            for number, old in enumerate(tensors):  # one by one: memory never holds all old and all new tensors
                heads, held, features = old.shape
                if held < capacity:
                    # Zeros: passes of static shapes read empty slots too, and 0 times garbage may be NaN.
                    new = old.new_zeros(heads, capacity, features)
                    new[:, :held] = old
                    tensors[number] = new
        self.capacity = capacity

    def tensors(self, part: int) -> list[Tensor]:
        """The tensors of a part. They move when the capacity grows."""
        return self._tensors[part]

    def stay(self) -> None:
        """Promise compiled passes that no tensor moves from now on: CUDA graphs write to fixed addresses."""
        for tensor in chain.from_iterable(self._tensors):
            torch._dynamo.mark_static_address(tensor)

    def store(self, part: int, slots: slice | Tensor, *new: Tensor) -> list[Tensor]:
        """Store what a part keeps of nodes, [n, heads, features] each. Returns its tensors with all slots."""
        tensors = self._tensors[part]
        for tensor, rows in zip(tensors, new, strict=True):
            tensor[:, slots] = rows.transpose(0, 1)
        return tensors


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


def last_slots(segment: TreeBatch, reach: int | None) -> NDArray[np.int64]:
    """The slots of the last nodes up to each node of a segment, int64 [n, reach], its own last. -1 before the start.

    Args:
        reach: None for the whole paths of all nodes.
    """
    reach = int(segment.positions.max()) + 1 if reach is None else reach
    positions = segment.positions[:, None] + np.arange(1 - reach, 1)
    end = len(segment.prefix)
    slots = np.full(positions.shape, -1)
    in_prefix = (positions >= 0) & (positions < end)
    slots[in_prefix] = segment.prefix[positions[in_prefix]]
    row, column = np.nonzero(positions >= end)
    slots[row, column] = segment.suffixes[row, positions[row, column] - end]
    return slots


def index(slots: NDArray[np.int64], device: torch.device | str) -> slice | Tensor:
    """Slots int64 [n] as an index of a tensor: a slice where they lie in one run."""
    first, n = int(slots[0]), len(slots)
    if slots[-1] - first == n - 1 and (np.diff(slots) == 1).all():
        return slice(first, first + n)
    return to_device(slots, device)
