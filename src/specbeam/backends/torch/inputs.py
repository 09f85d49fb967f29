"""The numbers of a pass as the kernels for GPUs read them: nodes, and the slots of their ancestors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specbeam.backends.contract import TreeBatch
from specbeam.backends.torch.kernels import TILE_POSITIONS, Ancestors


@dataclass(frozen=True)
class Sizes:
    """The sizes of a pass.

    Attributes:
        nodes, blocks: of the arrays. Passes that are captured have padding.
        tiles, branch, queries: see :class:`Ancestors`.
    """

    nodes: int
    blocks: int
    tiles: int | None
    branch: bool
    queries: int

    def views(self, numbers: Tensor) -> tuple[Tensor, Ancestors]:
        """What lies in one array of numbers: the nodes, [4, nodes], and their ancestors."""
        ends = 4 * self.nodes, 4 * (self.nodes + self.blocks)
        nodes, blocks = numbers[: ends[0]].view(4, -1), numbers[ends[0] : ends[1]].view(-1, 4)
        slots = numbers[ends[1] :]
        return nodes, Ancestors(nodes[1], blocks, nodes[3], slots, self.tiles, self.branch, self.queries)


@dataclass(frozen=True, eq=False)
class Inputs:
    """The numbers of a pass, int32.

    Attributes:
        nodes: tokens, positions, slots, and where the suffixes begin in ``slots``, [4, n].
        blocks, slots: see :class:`Ancestors`.
        suffixes: the shape of the suffixes of each segment's nodes, and where they begin in ``slots``; None if nothing
            follows its prefix.
        tiles: how many tiles of positions the longest sequence has.
    """

    nodes: NDArray[np.int32]
    blocks: NDArray[np.int32]
    slots: NDArray[np.int32]
    suffixes: list[tuple[tuple[int, int], int] | None]
    tiles: int

    def numbers(self, sizes: Sizes) -> NDArray[np.int32]:
        """One array that :meth:`Sizes.views` takes apart. Padding has the position -1 and no slot."""
        nodes = np.zeros((4, sizes.nodes), np.int32)
        nodes[1:3] = -1
        nodes[:, : self.nodes.shape[1]] = self.nodes
        blocks = np.zeros((sizes.blocks, 4), np.int32)
        blocks[: len(self.blocks)] = self.blocks
        return np.concatenate([nodes.ravel(), blocks.ravel(), self.slots])


def make_inputs(segments: Sequence[TreeBatch], per_block: int, more: int = 0) -> Inputs:
    """The numbers of a pass.

    Args:
        per_block: how many nodes of a segment read keys together at most.
        more: for how many later passes the segments have slots.
    """
    starts, slots = list[NDArray[np.int64]](), list[NDArray[np.int64]]()
    blocks, suffixes = list[tuple[int, int, int, int]](), list[tuple[tuple[int, int], int] | None]()
    first = place = longest = 0
    for s in segments:
        n, columns = s.suffixes.shape
        length = int(s.positions.max()) + 1
        longest = max(longest, length + more)
        begin = place
        if columns:
            shared, room = len(s.prefix), columns + more
            own = np.zeros((n, room), np.int64)
            own[:, :columns] = s.suffixes
            slots += [s.prefix, own.ravel()]
            place += shared + own.size
            suffixes.append(((n, room), begin + shared))
            starts.append(begin + shared + room * np.arange(n))
        else:
            prefix = np.concatenate([s.prefix[:length], s.ahead])
            shared = -(-len(prefix) // TILE_POSITIONS) * TILE_POSITIONS
            slots.append(prefix)
            place += len(prefix)
            suffixes.append(None)
            starts.append(np.zeros(n, np.int64))
        blocks += [(first + i, min(per_block, n - i), begin, shared) for i in range(0, n, per_block)]
        first += n
    nodes = [np.concatenate([getattr(s, name) for s in segments]) for name in ("tokens", "positions", "slots")]
    return Inputs(
        np.stack([*nodes, np.concatenate(starts)]).astype(np.int32),
        np.array(blocks, np.int32),
        np.concatenate(slots).astype(np.int32),
        suffixes,
        -(-longest // TILE_POSITIONS),
    )
