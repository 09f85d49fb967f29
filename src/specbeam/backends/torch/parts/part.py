"""What every part of a layer is in PyTorch, and what it gets of a batch beside the hidden states."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from specbeam.backends.torch.cache import Kept, KeyValues
from specbeam.backends.torch.modules import add_modules
from specbeam.checkpoints.config import Config
from specbeam.checkpoints.parts.part import Part
from specbeam.checkpoints.rope import Rope
from specbeam.core.selection import AttentionProbe

Rotations = dict[Rope, tuple[Tensor, Tensor]]
"""Cosines and sines of a batch's positions, for each rotary embedding."""


@dataclass(eq=False)
class TreeSegment:
    """One segment as the parts need it, on the device.

    Attributes:
        store: where the parts keep their tensors.
        rows: where the segment's nodes lie in the batch.
        slots: of the nodes: a slice where they lie in a row, else an index.
        seen: the slots that any of the nodes sees, likewise.
        visible: by the window of an attention, which of these slots each node sees, bool [n, c]; None where nodes see
            all.
        last: by the reach of a part, the slots of the last nodes up to each node, int64 [n, reach]. The node is
            the last of its row. Before the start of the sequence they are negative. For the reach None, they are the
            whole path of each node.
        source: the slots of the encoder's output, all of which the nodes see; None without an encoder.
        probe: heads of cross-attention to be captured, and the positions of the nodes, int64 [n]; None for none.
    """

    store: KeyValues
    rows: slice
    slots: slice | Tensor
    seen: slice | Tensor
    visible: dict[int | None, Tensor | None]
    last: dict[int | None, Tensor] = field(default_factory=dict)
    source: slice | Tensor | None = None
    probe: tuple[AttentionProbe, NDArray[np.int64]] | None = None


@dataclass(eq=False)
class Batch:
    """The nodes of a pass, as the parts need them. An encoder has no segments: all of its positions see each other.

    Attributes:
        positions: of the nodes, integers [n]; None for an encoder.
        per_layer: what the stem has made of the tokens for each layer, [n, layers, per_layer_size]; None for nothing.
    """

    rotations: Rotations = field(default_factory=dict)
    segments: list[TreeSegment] = field(default_factory=list)
    positions: Tensor | None = None
    per_layer: Tensor | None = None


class PartModule(nn.Module):
    """A part of a layer, with the weights that its description says.

    Attributes:
        part: the description, with all numbers.
        reach: of how many last nodes of each path it reads what they keep; 0 for none, None for all. Attention reads
            what it sees.
        kept: the tensors that it keeps in the KV cache.
        layer: the number of its layer.
        memory: the number of its tensors in the KV cache. A part that keeps nothing has that of the part before it.
    """

    part: Part
    reach: int | None = 0
    kept: tuple[Kept, ...] = ()
    layer: int
    memory: int

    def __init__(self, part: Part, config: Config) -> None:
        super().__init__()
        self.part = part
        add_modules(self, part.weights(config), config)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """What the part adds to the hidden states, of their normed values x. Both are [n, hidden_size]."""
        raise NotImplementedError
