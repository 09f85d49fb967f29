"""A mixture of experts. The nodes of a batch are grouped by expert."""

from __future__ import annotations

import torch
from torch import Tensor

from specbeam.backends.torch.modules import ExpertWeights, Norm, Vector, Weights
from specbeam.backends.torch.parts.mlp import ACTIVATIONS
from specbeam.backends.torch.parts.part import Batch, PartModule
from specbeam.checkpoints.parts import experts as described


class Experts(PartModule):
    """A router gives each node a few of many gated MLPs, whose outputs are added in the order of the experts."""

    part: described.Experts
    router_norm: Norm
    input_norm: Norm
    router: Weights
    selection_bias: Vector
    expert_scale: Vector
    gate: ExpertWeights
    up: ExpertWeights
    down: ExpertWeights

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        weights = self._weights(self.router_norm(x) if self.part.own_norms else x)
        x = self.input_norm(x) if self.part.own_norms else x
        out = torch.zeros_like(x)
        for expert in weights.any(dim=0).nonzero()[:, 0].tolist():
            nodes = weights[:, expert].nonzero()[:, 0]
            own = x[nodes]
            made = self.down(self._activated(self.gate(own, expert), self.up(own, expert)), expert)
            out[nodes] += made * weights[nodes, expert, None].to(x.dtype)
        return out

    def _weights(self, x: Tensor) -> Tensor:
        """The weights [n, experts] of each node's experts; 0 for the others."""
        part = self.part
        logits = self.router(x).float() * part.router_scale
        shares = logits.sigmoid() if part.scoring == "sigmoid" else logits.softmax(-1)
        ranks = shares if part.scoring == "sigmoid" else logits
        if part.selection_bias:
            ranks = ranks + self.selection_bias.weight.float()
        # A stable sort: of equal scores, the lower experts are first.
        chosen = ranks.sort(dim=-1, descending=True, stable=True).indices[:, : part.experts_per_token]
        weights = shares.gather(1, chosen)
        if part.normalized:
            total = weights.sum(dim=-1, keepdim=True)
            weights = weights / (total + part.sum_epsilon if part.scoring == "sigmoid" else total)
        weights = weights * part.weight_scale
        if part.expert_scale:
            weights = weights * self.expert_scale.weight.float()[chosen]
        return torch.zeros_like(shares).scatter(1, chosen, weights)

    def _activated(self, gate: Tensor, values: Tensor) -> Tensor:
        if (limit := self.part.swiglu_limit) is None:
            return ACTIVATIONS[self.part.activation](gate) * values
        gate, values = gate.clamp(max=limit), values.clamp(-limit, limit)
        return (values + 1) * gate * torch.sigmoid(self.part.swiglu_alpha * gate)


PARTS = {described.Experts: Experts}
