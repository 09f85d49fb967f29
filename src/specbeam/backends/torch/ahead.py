"""Passes ahead on a device: what is chosen there goes on without a look at it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbeam.backends.contract import Segment
from specbeam.backends.torch.selecting import highest
from specbeam.backends.torch.transfer import to_device
from specbeam.selection import MASKED, Beams, Selection

PASSES_IN_FLIGHT = 2
"""Passes whose flags the host has not seen, beside the one that it launches. So a GPU does not wait for the host."""


class Passes(Protocol):
    """Passes that are over what the ones before have chosen."""

    def run(self, number: int) -> Tensor:
        """Launch the next pass. Returns whether each segment may go on without a look, bool or int8 [segments]."""

    def selections(self, count: int) -> list[Selection]:
        """What was selected for each segment in the first passes."""


def go_ahead(going: Passes, passes: int, flags: Flags, halt: NDArray[np.int32]) -> list[Selection]:
    """Run passes until one segment may not go on. See :meth:`AheadBackend.forward_ahead`.

    The host learns of that a few passes later. What these passes have done is left out.
    """
    for number in range(passes):
        flags.add(going.run(number))
        if halt[0] or number + 1 == passes or not flags.up_to(number - PASSES_IN_FLIGHT):
            break
    return going.selections(flags.passes)


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


class Continuation:
    """One sequence, or the beams of one search.

    Args:
        segment: its nodes in the first pass.
        beams: how they go on as beams; None for one sequence.
        nodes: tokens, positions and slots of the nodes, int32 [3, n]. They are changed in place.
        suffixes: the slots of the nodes' own suffixes, int32 [n, room]; None if nothing follows the prefix. Likewise.
        ends: token ids, int64.
    """

    def __init__(
        self, segment: Segment, beams: Beams | None, nodes: Tensor, suffixes: Tensor | None, ends: Tensor
    ) -> None:
        self._beams, self._nodes, self._suffixes, self._ends = beams, nodes, suffixes, ends
        self._later = to_device(segment.ahead.reshape(-1, len(segment.tokens)).astype(np.int32), nodes.device)
        self._place = segment.suffixes.shape[1]
        self._scores = None if beams is None else to_device(beams.scores, nodes.device)
        self._parents: Tensor | None = None
        self._tokens = nodes[0]

    def choose(self, tokens: Tensor, scores: Tensor, normalizers: Tensor) -> Tensor:
        """Choose the next nodes by a selection, [n, top] twice and [n].

        Returns: bool, whether they may be evaluated without a look at them.
        """
        is_fine = normalizers.isfinite().all()
        if self._beams is None or self._scores is None:
            self._tokens = tokens[:, 0]
            is_fine &= (scores[:, 0] > MASKED).all()
        else:
            sums = (scores + self._scores[:, None]).flatten()
            order = highest(sums[None], len(self._scores))[0]
            self._parents, self._tokens = order // tokens.shape[1], tokens.flatten()[order]
            self._scores = sums[order]
            best, worst = self._scores[0].double(), self._scores[-1].double()
            is_fine &= ~sums.isnan().any() & (best > self._beams.best_above) & (worst > self._beams.all_above)
        return is_fine & ~torch.isin(self._tokens, self._ends).any()

    def grow(self) -> None:
        """Go on to the nodes that were chosen."""
        slots, self._later = self._later[0], self._later[1:]
        self._nodes[0] = self._tokens
        self._nodes[1] += 1
        self._nodes[2] = slots
        if self._suffixes is not None:
            if self._parents is not None:
                self._suffixes.copy_(self._suffixes[self._parents])
            self._suffixes[:, self._place] = slots
            self._place += 1
