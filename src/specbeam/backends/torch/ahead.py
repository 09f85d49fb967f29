"""Passes ahead on a device: what is chosen there goes on without a look at it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbeam.backends.contract import TreeBatch
from specbeam.backends.torch.tensors import to_device
from specbeam.core.selection import MASKED, NextBeams, Selection

PASSES_IN_FLIGHT = 2
"""Passes whose flags the host has not seen, beside the one that it launches. So a GPU does not wait for the host."""


class Passes(Protocol):
    """Passes that are over what the ones before have chosen."""

    def run(self, number: int) -> Tensor:
        """Launch the next pass. Returns whether each segment may go on without a look, bool or int8 [segments]."""

    def selections(self, count: int) -> list[Selection]:
        """What was selected for each segment in the first passes."""


def go_ahead(runs: Passes, passes: int, flags: Flags, halt: NDArray[np.int32]) -> list[Selection]:
    """Run passes until one segment may not go on. See :meth:`AheadBackend.forward_ahead`.

    The host learns of that a few passes later. What these passes have done is left out.
    """
    for number in range(passes):
        flags.add(runs.run(number))
        if halt[0] or number + 1 == passes or not flags.up_to(number - PASSES_IN_FLIGHT):
            break
    return runs.selections(flags.passes)


class Flags:
    """Whether segments may go on after each pass. The flags come from the device while later passes run.

    Args:
        passes, segments: there are at most this many passes.
    """

    def __init__(self, passes: int, segments: int, device: str) -> None:
        self._on_gpu = torch.device(device).type == "cuda"
        self._flags = torch.zeros(passes, segments, dtype=torch.bool, pin_memory=self._on_gpu)
        self._copied: list[Any] = []

    def add(self, flags: Tensor) -> None:
        """Copy the flags of the next pass. The host does not wait."""
        self._flags[len(self._copied)].copy_(flags, non_blocking=True)
        self._copied.append(torch.cuda.current_stream().record_event() if self._on_gpu else None)

    def up_to(self, number: int) -> bool:
        """Whether all segments may go on after all passes up to this one, which the host waits for."""
        if number < 0:
            return True
        if self._on_gpu:
            self._copied[number].synchronize()
        return bool(self._flags[: number + 1].all())

    @property
    def passes(self) -> int:
        """The number of passes, up to the first after which a segment may not go on."""
        count = len(self._copied)
        self.up_to(count - 1)
        return next((number + 1 for number in range(count) if not self._flags[number].all()), count)


class Group:
    """Sequences, or searches with as many beams each, that go on together.

    Args:
        rows: their indices among the rows of a selection, int64 [g, n]; n is 1 for sequences.
        nodes: their indices among the nodes of a pass, likewise.
        beams: how each search goes on; None for sequences.
        ends: token ids, int64.
    """

    def __init__(
        self, rows: NDArray[np.int64], nodes: NDArray[np.int64], beams: Sequence[NextBeams] | None, ends: Tensor
    ) -> None:
        self._rows, self.nodes = to_device(rows, ends.device), to_device(nodes, ends.device)
        self._ends, self._scores = ends, None
        if beams is not None:
            limits = np.array([[one.best_above, one.all_above] for one in beams])
            self._best_above, self._all_above = to_device(limits, ends.device).unbind(1)
            self._scores = to_device(np.stack([one.scores for one in beams]), ends.device)

    def choose(
        self, tokens: Tensor, scores: Tensor, normalizers: Tensor, highest: Callable[[Tensor, int], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose the next nodes by a selection, [rows, top] twice and [rows].

        Returns:
            Their tokens, [g, n], the indices of their parents among the nodes of the pass, likewise, and whether each
            sequence or search may evaluate them without a look at them, bool [g].
        """
        tokens, scores = tokens[self._rows], scores[self._rows]
        is_fine = normalizers[self._rows].isfinite().all(-1)
        if self._scores is None:
            tokens, parents = tokens[..., 0], self.nodes
            is_fine &= scores[..., 0, 0] > MASKED
        else:
            sums = (scores + self._scores[..., None]).flatten(1)
            order = highest(sums, self._scores.shape[1])
            parents = self.nodes.gather(1, order // tokens.shape[2])
            tokens, self._scores = tokens.flatten(1).gather(1, order), sums.gather(1, order)
            best, worst = self._scores[:, 0].double(), self._scores[:, -1].double()
            is_fine &= ~sums.isnan().any(-1) & (best > self._best_above) & (worst > self._all_above)
        return tokens, parents, is_fine & ~torch.isin(tokens, self._ends).any(-1)


class Suffixes:
    """The slots of the nodes' own suffixes, which grow by one with each pass.

    Args:
        shapes: see :class:`Inputs`.
    """

    def __init__(
        self, segments: Sequence[TreeBatch], shapes: Sequence[tuple[tuple[int, int], int] | None], device: str
    ) -> None:
        capacity = max(shape[0][1] for shape in shapes if shape is not None)
        indices, ends = list[NDArray[np.int64]](), list[NDArray[np.int64]]()
        for s, shape in zip(segments, shapes, strict=True):
            n = len(s.tokens)
            if shape is None:
                indices.append(np.full((n, capacity), -1))
                ends.append(np.full(n, -1))
                continue
            (_, width), start = shape
            first = start + width * np.arange(n)
            indices.append(first[:, None] + np.minimum(np.arange(capacity), width - 1))
            ends.append(first + s.suffixes.shape[1])
        index, at = np.concatenate(indices), np.concatenate(ends)
        nodes = np.flatnonzero(at >= 0)
        self._indices, self._nodes, self._ends = (to_device(a, device) for a in (index, nodes, at[nodes]))

    def grow(self, slots: Tensor, parents: Tensor, new: Tensor) -> None:
        """Go on to the next nodes.

        Args:
            slots: of prefixes and suffixes, int32. It is changed in place.
            parents: of each node, among the nodes of the pass, int64 [n].
            new: the slot of each node, int32 [n].
        """
        slots[self._indices[self._nodes]] = slots[self._indices[parents[self._nodes]]]
        slots[self._ends] = new[self._nodes]
        self._ends += 1
