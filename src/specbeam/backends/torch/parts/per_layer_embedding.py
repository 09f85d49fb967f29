"""What a layer makes of its own embeddings of tokens (Gemma 3n; Gemma Team 2025)."""

from __future__ import annotations

from torch import Tensor

from specbeam.backends.torch.modules import Weights
from specbeam.backends.torch.parts.mlp import ACTIVATIONS
from specbeam.backends.torch.parts.part import Batch, PartModule
from specbeam.checkpoints.parts import per_layer_embedding as described


class PerLayerEmbedding(PartModule):
    """The activation of one product gates what the stem has made for this layer, and one more product."""

    part: described.PerLayerEmbedding
    gate: Weights
    projection: Weights

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        assert batch.per_layer is not None
        return self.projection(ACTIVATIONS[self.part.activation](self.gate(x)) * batch.per_layer[:, self.layer])


PARTS = {described.PerLayerEmbedding: PerLayerEmbedding}
