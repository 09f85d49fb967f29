"""The gated short convolution of LFM2 over the paths of trees."""

from __future__ import annotations

import torch
from torch import Tensor

from specbeam.backends.torch.cache import Kept
from specbeam.backends.torch.modules import Weights
from specbeam.backends.torch.parts.part import Batch, PartModule
from specbeam.checkpoints.config import Config
from specbeam.checkpoints.parts import short_convolution as described


class ShortConvolution(PartModule):
    """A convolution over the last nodes of each path, between two gates. Before the start of a sequence are zeros."""

    part: described.ShortConvolution
    input: Weights
    filter: Weights
    output: Weights

    def __init__(self, part: described.ShortConvolution, config: Config) -> None:
        super().__init__(part, config)
        self.reach, self.kept = part.kernel_size, (Kept(1, config.hidden_size),)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        before, after, values = self.input(x).chunk(3, dim=-1)
        gated = before * values
        outs = []
        for s in batch.segments:
            (kept,) = s.store.store(self.memory, s.slots, gated[s.rows, None])
            last = s.last[self.reach]
            rows = kept[0, last.clamp(min=0)].masked_fill((last < 0)[:, :, None], 0)  # [n, kernel_size, hidden_size]
            outs.append((rows.float() * self.filter.weight.t().float()).sum(dim=1).to(x.dtype))
        return self.output(after * (torch.cat(outs) if len(outs) > 1 else outs[0]))


PARTS = {described.ShortConvolution: ShortConvolution}
