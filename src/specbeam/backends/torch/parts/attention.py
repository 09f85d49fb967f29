"""Attention of the nodes of trees to their ancestors, and to the output of an encoder."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from specbeam.backends.torch.cache import Kept, KeyValues
from specbeam.backends.torch.modules import Norm, Vector, Weights, cap
from specbeam.backends.torch.parts.part import Batch, PartModule
from specbeam.checkpoints.config import Config
from specbeam.checkpoints.parts import attention as described
from specbeam.core.selection import AttentionProbe


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of x [n, heads, head_dim], halves paired as in GPT-NeoX.

    cos and sin are [n, 1, dim], for the first dim features of a head; the first half of sin carries the minus sign of
    the rotation.
    """
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat([rotate(x[..., :dim], cos, sin), x[..., dim:]], dim=-1)
    left, right = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat([right, left], dim=-1), sin)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the nodes of one tree to its slots.

    The query heads that share a key head (grouped-query attention) become further queries of this head. So keys and
    values are read once and never repeated.

    Args:
        q: [n, heads, head_dim].
        k, v: [kv_heads, slots, head_dim].
        visible: bool [n, slots], true where a node attends; None if everywhere.
        scale: factor of the products of queries and keys.
        sinks: [heads], a further score of each query head; None for none.

    Returns: [n, heads * head_dim].
    """
    n, heads, head_dim = q.shape
    kv_heads = k.shape[0]
    group = heads // kv_heads
    q = q.view(n, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(1, kv_heads, group * n, head_dim)
    mask = None if visible is None else visible.repeat(group, 1)
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(q, k[None], v[None], attn_mask=mask, scale=scale)
    else:
        scores = cap(q @ k[None].transpose(-1, -2) * scale, softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            own = sinks.view(1, kv_heads, group, 1, 1).expand(-1, -1, -1, n, -1).reshape(1, kv_heads, group * n, 1)
            scores = torch.cat([scores, own], dim=-1)
        out = scores.float().softmax(-1)[..., : k.shape[1]].to(v.dtype) @ v[None]
    return out.view(kv_heads, group, n, head_dim).permute(2, 0, 1, 3).reshape(n, heads * head_dim)


class Attention(PartModule):
    """Each node attends to its ancestors and to itself. In an encoder all positions see each other."""

    part: described.Attention
    qkv: Weights
    query_key: Weights
    query: Weights
    output: Weights
    q_norm: Norm
    k_norm: Norm
    sinks: Vector

    def __init__(self, part: described.Attention, config: Config) -> None:
        super().__init__(part, config)
        self.kept = (Kept(part.num_kv_heads, part.head_dim),) * 2 if part.shares_keys_of is None else ()
        self._eps = config.norm_eps

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        part = self.part
        heads, scale, softcap = part.num_heads, part.scale, part.softcap
        sinks = self.sinks.weight if part.sinks else None
        if part.shares_keys_of is not None:
            return self._with_shared_keys(x, batch, sinks)
        qkv = (self.query_key if part.keys_are_values else self.qkv)(x).view(len(x), -1, part.head_dim)
        gate = qkv[:, heads : 2 * heads].flatten(1) if part.output_gate else None
        if part.output_gate:
            qkv = torch.cat([qkv[:, :heads], qkv[:, 2 * heads :]], dim=1)
        qk, v = qkv if part.keys_are_values else qkv[:, : -part.num_kv_heads], qkv[:, -part.num_kv_heads :]
        if part.value_norm:
            v = F.rms_norm(v, (part.head_dim,), eps=self._eps)
        if part.qk_norm in ("head", "all"):
            q, k = qk[:, :heads], qk[:, heads:]
            if part.qk_norm == "head":
                q, k = self.q_norm(q), self.k_norm(k)
            else:
                q, k = self.q_norm(q.flatten(1)).view_as(q), self.k_norm(k.flatten(1)).view_as(k)
            qk = torch.cat([q, k], dim=1)
        if part.rope is not None:
            qk = rotate(qk, *batch.rotations[part.rope])
        q, k = qk[:, :heads], qk[:, heads:]
        if part.qk_norm == "rotated_head":
            q, k = self.q_norm(q), self.k_norm(k)
        q = self._grown(q, batch)
        if not batch.segments:
            k, v = k.transpose(0, 1), v.transpose(0, 1)
            out = attend(q, k, v, None, scale, softcap, sinks)
            return self.output(out if gate is None else out * gate.sigmoid())
        outs = []
        for s in batch.segments:
            keys, values = s.store.store(self.memory, s.slots, k[s.rows], v[s.rows])
            visible = s.visible[part.window]
            outs.append(attend(q[s.rows], keys[:, s.seen], values[:, s.seen], visible, scale, softcap, sinks))
        out = torch.cat(outs) if len(outs) > 1 else outs[0]
        return self.output(out if gate is None else out * gate.sigmoid())

    def _grown(self, q: Tensor, batch: Batch) -> Tensor:
        """Queries [n, heads, head_dim], each times the factor of its position."""
        part = self.part
        if not (part.query_growth and part.query_growth_period) or batch.positions is None:
            return q
        periods = batch.positions // part.query_growth_period
        return q * (1 + part.query_growth * periods.float().log1p()).to(q.dtype)[:, None, None]

    def _with_shared_keys(self, x: Tensor, batch: Batch, sinks: Tensor | None) -> Tensor:
        """The same with keys and values that an earlier layer has stored."""
        part = self.part
        q = self.query(x)
        if part.qk_norm == "all":
            q = self.q_norm(q)
        q = q.view(len(x), -1, part.head_dim)
        if part.qk_norm == "head":
            q = self.q_norm(q)
        if part.rope is not None:
            q = rotate(q, *batch.rotations[part.rope])
        if part.qk_norm == "rotated_head":
            q = self.q_norm(q)
        q = self._grown(q, batch)
        outs = []
        for s in batch.segments:
            keys, values = (kept[:, s.seen] for kept in s.store.tensors(self.memory))
            outs.append(attend(q[s.rows], keys, values, s.visible[part.window], part.scale, part.softcap, sinks))
        return self.output(torch.cat(outs) if len(outs) > 1 else outs[0])


class CrossAttention(PartModule):
    """Each node attends to the encoder's output, whose keys and values lie in slots (:meth:`place`).

    They are in the tensors of the attention before this part.
    """

    part: described.CrossAttention
    query: Weights
    key_value: Weights
    output: Weights

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        q = self.query(x).view(len(x), -1, self.part.head_dim)
        outs = []
        for s in batch.segments:
            keys, values = (kept[:, s.source] for kept in s.store.tensors(self.memory))
            outs.append(attend(q[s.rows], keys, values, None, self.part.scale, self.part.softcap))
            if s.probe is not None:
                self._capture(*s.probe, q[s.rows], keys)
        return self.output(torch.cat(outs) if len(outs) > 1 else outs[0])

    def _capture(self, probe: AttentionProbe, positions: NDArray[np.int64], q: Tensor, keys: Tensor) -> None:
        """Write the scores of this layer's probed heads, from q [n, heads, head_dim], keys [kv_heads, p, head_dim]."""
        for number, (layer, head) in enumerate(probe.heads):
            if layer == self.layer:
                keys_of_head = keys[head * len(keys) // q.shape[1], : probe.scores.shape[2]]
                scores = q[:, head] @ keys_of_head.t() * self.part.scale
                probe.scores[number, positions] = scores.float().cpu().numpy()

    def place(self, states: Tensor, store: KeyValues, slots: slice | Tensor) -> None:
        """Write the keys and values of this part for an encoder's output [n, features] into n slots."""
        store.store(
            self.memory, slots, *self.key_value(states).view(len(states), -1, self.part.head_dim).chunk(2, dim=1)
        )


PARTS = {described.Attention: Attention, described.CrossAttention: CrossAttention}
