"""Mamba 2 over the paths of trees."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specbeam.backends.torch.cache import Kept
from specbeam.backends.torch.modules import Norm, Vector, Weights
from specbeam.backends.torch.parts.part import Batch, PartModule, TreeSegment
from specbeam.checkpoints.config import Config
from specbeam.checkpoints.parts import mamba2 as described


class Mamba2(PartModule):
    """A state space layer as attention. No state is kept: a node keeps its B, its dt x and its decay.

    So its output is the sum over its path of e^(sum of later decays) (B . C) dt x, plus skip * x.
    """

    part: described.Mamba2
    input: Weights
    filter: Weights
    decay: Vector
    step: Vector
    skip: Vector
    norm: Norm
    output: Weights

    def __init__(self, part: described.Mamba2, config: Config) -> None:
        super().__init__(part, config)
        self.reach = None
        self.kept = (
            Kept(1, part.convolved_size),
            Kept(part.num_groups, part.state_size, exact=True),
            Kept(part.num_heads, part.head_dim, exact=True),
            Kept(part.num_heads, 1, exact=True),
        )

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        part = self.part
        sizes = [part.inner_size, part.inner_size, part.key_size, part.key_size, part.num_heads]
        gate, values, keys, queries, steps = self.input(x).split(sizes, dim=-1)
        mixed = torch.cat([values * part.value_scale, keys * part.key_scale, queries * part.query_scale], dim=-1)
        steps = F.softplus(steps.float() * part.step_scale + self.step.weight.float())
        steps = steps.clamp(part.min_step or 0, part.max_step)
        out = torch.cat([self._attend(s, mixed[s.rows], steps[s.rows]) for s in batch.segments])
        gate = F.silu(gate.float() * part.gate_scale)
        out = self._norm(out) * gate if part.norm_before_gate else self._norm(out * gate)
        return self.output(out.to(x.dtype))

    def _attend(self, s: TreeSegment, mixed: Tensor, steps: Tensor) -> Tensor:
        """The outputs of the nodes of a segment before the gate, float32 [n, inner_size].

        Args:
            mixed: x, B and C before the convolution, [n, convolved_size].
            steps: dt, float32 [n, num_heads].
        """
        part, path = self.part, s.last[None]
        before, keys, us, decays = s.store.tensors(self.memory)
        before[0, s.slots] = mixed
        sizes = [part.inner_size, part.key_size, part.key_size]
        x, k, q = torch.split(self._convolve(before[0], path), sizes, dim=-1)
        x = x.view(len(x), part.num_heads, -1)
        k, q = (one.view(len(x), part.num_groups, -1) for one in (k, q))
        keys[:, s.slots], us[:, s.slots] = k.transpose(0, 1), (steps[:, :, None] * x).transpose(0, 1)
        decays[:, s.slots] = (self.decay.weight.float() * steps).t()[:, :, None]
        on_path, path = path >= 0, path.clamp(min=0)
        out = self.skip.weight.float()[:, None] * x
        for i, nodes in enumerate(path):
            of_path = decays[:, nodes, 0] * on_path[i]
            later = of_path.flip(-1).cumsum(-1).flip(-1) - of_path
            scores = (keys[:, nodes] @ q[i, :, :, None])[:, :, 0]
            scores = scores.repeat_interleave(part.num_heads // part.num_groups, dim=0)
            weights = torch.where(on_path[i], later.exp() * scores, 0)
            out[i] += (weights[:, None] @ us[:, nodes])[:, 0]
        return out.flatten(1)

    def _convolve(self, before: Tensor, path: Tensor) -> Tensor:
        """The convolution up to each node and the SiLU, float32 [n, convolved_size]."""
        last = path[:, -self.part.kernel_size :]
        rows = before[last.clamp(min=0)].masked_fill((last < 0)[:, :, None], 0)
        filters = self.filter.weight[:, -last.shape[1] :].t()
        convolved = (rows.float() * filters.float()).sum(dim=1)
        return F.silu(convolved if self.filter.bias is None else convolved + self.filter.bias.float())

    def _norm(self, x: Tensor) -> Tensor:
        """RMSNorm of each group, if the part has one."""
        if not self.part.group_norm:
            return x
        groups = x.view(len(x), self.part.num_groups, -1)
        return F.rms_norm(groups, groups.shape[2:], None, self.norm.eps).flatten(1) * self.norm.weight.float()


PARTS = {described.Mamba2: Mamba2}
