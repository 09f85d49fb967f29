"""Gated DeltaNet over the paths of trees."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specbeam.backends.torch.cache import Kept
from specbeam.backends.torch.modules import Norm, Vector, Weights
from specbeam.backends.torch.parts.part import Batch, PartModule, TreeSegment
from specbeam.checkpoints.config import Config
from specbeam.checkpoints.parts import gated_delta_net as described

EPS = 1e-6
"""Added to the squared length of a query or a key."""


class GatedDeltaNet(PartModule):
    """The gated delta rule, node after node. No state is kept: a node keeps its key, its u and its decay g.

    So its parent's state times x is the sum over all ancestors i of e^(sum of later g) (k_i . x) u_i.
    """

    part: described.GatedDeltaNet
    input: Weights
    rates: Weights
    filter: Weights
    decay: Vector
    step: Vector
    norm: Norm
    output: Weights

    def __init__(self, part: described.GatedDeltaNet, config: Config) -> None:
        super().__init__(part, config)
        self.reach = None
        self.kept = (
            Kept(1, part.convolved_size),
            Kept(part.num_key_heads, part.key_dim, exact=True),
            Kept(part.num_value_heads, part.value_dim, exact=True),
            Kept(part.num_value_heads, 1, exact=True),
        )

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        part = self.part
        mixed, gate = self.input(x).split([part.convolved_size, part.value_size], dim=-1)
        b, a = self.rates(x).float().chunk(2, dim=-1)
        decays = self.decay.weight.float() * F.softplus(a + self.step.weight.float())
        outs = [self._recur(s, mixed[s.rows], decays[s.rows], b[s.rows].sigmoid()) for s in batch.segments]
        out = self.norm(torch.cat(outs).to(x.dtype)) * F.silu(gate).view(len(x), -1, part.value_dim)
        return self.output(out.flatten(1))

    def _recur(self, s: TreeSegment, mixed: Tensor, decays: Tensor, betas: Tensor) -> Tensor:
        """The outputs of the nodes of a segment, float32 [n, value heads, value_dim].

        Args:
            mixed: queries, keys and values before the convolution, [n, convolved_size].
            decays, betas: float32 [n, value heads].
        """
        part, path = self.part, s.last[None]
        before, keys, us, kept_decays = s.store.tensors(self.memory)
        before[0, s.slots] = mixed
        q, k, v = self._convolve(before[0], path).split([part.key_size, part.key_size, part.value_size], dim=-1)
        q, k = (_unit(one.view(len(one), -1, part.key_dim)) for one in (q, k))
        q, v = q * part.key_dim**-0.5, v.view(len(v), -1, part.value_dim)
        is_ancestor, ancestors = (path >= 0)[:, :-1], path[:, :-1].clamp(min=0)
        out = torch.empty_like(v)
        for i in (path >= 0).sum(dim=-1).argsort(stable=True).tolist():  # ancestors first
            own = ancestors[i]
            later = kept_decays[:, own, 0] * is_ancestor[i]
            later = later.flip(-1).cumsum(-1).flip(-1) - later + decays[i, :, None]
            weights = torch.where(is_ancestor[i], later.exp(), 0)
            scores = torch.stack([k[i], q[i]], dim=1) @ keys[:, own].transpose(1, 2)  # [key heads, 2, ancestors]
            products = (self._by_value_head(scores) * weights[:, None]) @ us[:, own]
            u = betas[i, :, None] * (v[i] - products[:, 0])
            out[i] = products[:, 1] + self._by_value_head((k[i] * q[i]).sum(dim=-1, keepdim=True)) * u
            slot = path[i, -1]
            keys[:, slot], us[:, slot], kept_decays[:, slot, 0] = k[i], u, decays[i]
        return out

    def _convolve(self, before: Tensor, path: Tensor) -> Tensor:
        """The convolution up to each node and the SiLU, float32 [n, convolved_size]."""
        last = path[:, -self.part.kernel_size :]
        rows = before[last.clamp(min=0)].masked_fill((last < 0)[:, :, None], 0)
        filters = self.filter.weight[:, -last.shape[1] :].t()
        return F.silu((rows.float() * filters.float()).sum(dim=1))

    def _by_value_head(self, of_keys: Tensor) -> Tensor:
        """What belongs to the key heads [key heads, ...], for each value head."""
        group = self.part.num_value_heads // self.part.num_key_heads
        if self.part.tiled:
            return of_keys.repeat(group, *(1,) * (of_keys.ndim - 1))
        return of_keys.repeat_interleave(group, dim=0)


def _unit(x: Tensor) -> Tensor:
    """Vectors of the length 1."""
    return x * (x.square().sum(dim=-1, keepdim=True) + EPS).rsqrt()


PARTS = {described.GatedDeltaNet: GatedDeltaNet}
