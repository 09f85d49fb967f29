"""The feed-forward network of a layer, and one that stands beside experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from specbeam.backends.torch.modules import Weights
from specbeam.backends.torch.parts.part import Batch, PartModule
from specbeam.checkpoints.parts import mlp as described

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


class MLP(PartModule):
    """Two products with an activation between them. Where it is gated, the first product has a gate and its values."""

    part: described.MLP
    gate_up: Weights
    up: Weights
    down: Weights

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        activation = ACTIVATIONS[self.part.activation]
        if not self.part.gated:
            return self.down(activation(self.up(x) * self.part.gate_scale))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(activation(gate * self.part.gate_scale) * up)


class SharedExpert(MLP):
    """The same beside experts. A product of one row may gate its output."""

    part: described.SharedExpert
    output_gate: Weights

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        made = super().forward(x, batch)
        return made * self.output_gate(x).sigmoid() if self.part.output_gate else made


PARTS = {described.MLP: MLP, described.SharedExpert: SharedExpert}
