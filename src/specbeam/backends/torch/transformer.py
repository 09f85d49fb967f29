"""A transformer in plain PyTorch: a decoder over a batch of tree nodes, and perhaps an encoder.

Activations are [nodes, features]: nodes of all requests lie one after the other, so every matrix product is one product
for the whole batch. Only attention looks at one tree at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from specbeam.backends.torch.cache import KeyValues
from specbeam.checkpoints.config import Config, Rope
from specbeam.checkpoints.parameters import FILTER_FRAMES
from specbeam.core.selection import AttentionProbe

MAX_ROWS_TRANSPOSED = 64
"""Up to this many rows, a product of float32 on a CPU is formed transposed: see :func:`linear`."""
Rotations = dict[Rope, tuple[Tensor, Tensor]]
"""Cosines and sines of a batch's positions, for each rotary embedding."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n, in] times weight [out, in] transposed, plus bias [out].

    For a few rows of float32 on a CPU this forms weight times x transposed, with at least two columns. BLAS libraries
    then stream the weight at the speed of memory. Their matrix-vector product and their products with a short left side
    do not (MKL on AMD EPYC: 35 GB/s against 11 GB/s for one row).
    """
    n = len(x)
    if n > MAX_ROWS_TRANSPOSED or x.dtype != torch.float32 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    rows = x if n > 1 else x.expand(2, -1).contiguous()
    product = torch.mm(weight, rows.t()).t()[:n]
    return product.contiguous() if bias is None else product + bias


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


def cap(x: Tensor, softcap: float | None) -> Tensor:
    """x kept between -softcap and softcap, smoothly (Gemma 2; Bello et al. 2017)."""
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """Attention of the nodes of one tree to its slots.

    The query heads that share a key head (grouped-query attention) become further queries of this head. So keys and
    values are read once and never repeated.

    Args:
        q: [n, heads, head_dim].
        k, v: [kv_heads, slots, head_dim].
        visible: bool [n, slots], true where a node attends; None if everywhere.
        scale: factor of the products of queries and keys.

    Returns: [n, heads * head_dim].
    """
    n, heads, head_dim = q.shape
    kv_heads = k.shape[0]
    group = heads // kv_heads
    q = q.view(n, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(1, kv_heads, group * n, head_dim)
    mask = None if visible is None else visible.repeat(group, 1)
    if softcap is None:
        out = F.scaled_dot_product_attention(q, k[None], v[None], attn_mask=mask, scale=scale)
    else:
        scores = cap(q @ k[None].transpose(-1, -2) * scale, softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        out = scores.float().softmax(-1).to(v.dtype) @ v[None]
    return out.view(kv_heads, group, n, head_dim).permute(2, 0, 1, 3).reshape(n, heads * head_dim)


@dataclass(eq=False)
class TreeSegment:
    """One segment as attention needs it, on the device.

    Attributes:
        store: where the keys and values are.
        rows: where the segment's nodes lie in the batch.
        slots: where their keys and values go: a slice where they lie in a row, else an index.
        seen: the slots that any of the nodes sees, likewise.
        visible: by the window of a layer, which of these slots each node sees, bool [n, c]; None where nodes see all.
        source: the slots of the encoder's output, all of which the nodes see; None without an encoder.
        probe: heads of cross-attention to be captured, and the positions of the nodes, int64 [n]; None for none.
    """

    store: KeyValues
    rows: slice
    slots: slice | Tensor
    seen: slice | Tensor
    visible: dict[int | None, Tensor | None]
    source: slice | Tensor | None = None
    probe: tuple[AttentionProbe, NDArray[np.int64]] | None = None


class Attention(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.layer, self.rope, self.window = layer, config.layers[layer].rope, config.layers[layer].window
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = Weights(rows, config.hidden_size, bias=config.qkv_bias)
        self.output = Weights(config.hidden_size, self.heads * self.head_dim, bias=config.output_bias)
        self.q_norm = Norm(self.head_dim, config) if config.qk_norm else None
        self.k_norm = Norm(self.head_dim, config) if config.qk_norm else None

    def forward(self, x: Tensor, rotations: Rotations, segments: list[TreeSegment]) -> Tensor:
        qkv = self.qkv(x).view(len(x), -1, self.head_dim)
        qk, v = qkv[:, : -self.kv_heads], qkv[:, -self.kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat([self.q_norm(qk[:, : self.heads]), self.k_norm(qk[:, self.heads :])], dim=1)
        if self.rope is not None:
            qk = rotate(qk, *rotations[self.rope])
        q, k = qk[:, : self.heads], qk[:, self.heads :]
        if not segments:  # an encoder's rows are its positions, which all see each other
            k, v = k.transpose(0, 1), v.transpose(0, 1)
            return self.output(attend(q, k, v, None, self.scale, self.softcap))
        outs = []
        for s in segments:
            keys, values = s.store.store(self.layer, s.slots, k[s.rows], v[s.rows], s.seen)
            outs.append(attend(q[s.rows], keys, values, s.visible[self.window], self.scale, self.softcap))
        return self.output(torch.cat(outs) if len(outs) > 1 else outs[0])


class CrossAttention(nn.Module):
    """Attention to an encoder's output, whose keys and values lie in slots (:meth:`place`)."""

    def __init__(self, config: Config, encoder: Config, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        width = config.num_heads * config.head_dim
        self.query = Weights(width, config.hidden_size, bias=config.qkv_bias)
        rows = 2 * config.num_kv_heads * config.head_dim
        self.key_value = Weights(rows, encoder.hidden_size, bias=config.qkv_bias)
        self.output = Weights(config.hidden_size, width, bias=config.output_bias)

    def forward(self, x: Tensor, segments: list[TreeSegment]) -> Tensor:
        q = self.query(x).view(len(x), -1, self.head_dim)
        outs = []
        for s in segments:
            keys, values = (of[:, s.source] for of in s.store.layer(self.layer))
            outs.append(attend(q[s.rows], keys, values, None, self.scale, self.softcap))
            if s.probe is not None:
                self._capture(*s.probe, q[s.rows], keys)
        return self.output(torch.cat(outs) if len(outs) > 1 else outs[0])

    def _capture(self, probe: AttentionProbe, positions: NDArray[np.int64], q: Tensor, keys: Tensor) -> None:
        """Write the scores of this layer's probed heads, from q [n, heads, head_dim], keys [kv_heads, p, head_dim]."""
        for number, (layer, head) in enumerate(probe.heads):
            if layer == self.layer:
                keys_of_head = keys[head * len(keys) // q.shape[1], : probe.scores.shape[2]]
                probe.scores[number, positions] = (q[:, head] @ keys_of_head.t() * self.scale).float().cpu().numpy()

    def place(self, states: Tensor, store: KeyValues, slots: slice | Tensor) -> None:
        """The same for this layer alone as :meth:`Transformer.place`."""
        k, v = self.key_value(states).view(len(states), -1, self.head_dim).chunk(2, dim=1)
        store.store(self.layer, slots, k, v, slots)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.up = Weights(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.down = Weights(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class GatedMLP(nn.Module):
    """One product gates another (Shazeer 2020)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.gate_up = Weights(2 * config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.down = Weights(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


class Block(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.parallel = config.parallel
        self.attention_norm = Norm(config.hidden_size, config)
        self.attention = Attention(config, layer)
        self.post_attention_norm = Norm(config.hidden_size, config) if config.post_norms else None
        self.mlp_norm = Norm(config.hidden_size, config) if config.mlp_norm else None
        self.mlp: GatedMLP | MLP = GatedMLP(config) if config.gated_mlp else MLP(config)
        self.post_mlp_norm = Norm(config.hidden_size, config) if config.post_norms else None

    def forward(self, x: Tensor, rotations: Rotations, segments: list[TreeSegment]) -> Tensor:
        normed = self.attention_norm(x)
        attended = self.attention(normed, rotations, segments)
        if self.post_attention_norm is not None:
            attended = self.post_attention_norm(attended)
        y = x + attended
        if self.mlp_norm is not None:
            normed = self.mlp_norm(x if self.parallel else y)
        out = self.mlp(normed)
        return y + (out if self.post_mlp_norm is None else self.post_mlp_norm(out))


class CrossBlock(Block):
    """A block that attends to an encoder's output, too."""

    def __init__(self, config: Config, encoder: Config, layer: int) -> None:
        super().__init__(config, layer)
        self.cross_attention_norm = Norm(config.hidden_size, config)
        self.cross_attention = CrossAttention(config, encoder, layer)

    def forward(self, x: Tensor, rotations: Rotations, segments: list[TreeSegment]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotations, segments)
        x = x + self.cross_attention(self.cross_attention_norm(x), segments)
        return x + self.mlp(x if self.mlp_norm is None else self.mlp_norm(x))


class Encoder(nn.Module):
    """An encoder of audio: two convolutions, then layers whose positions see each other."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.conv1 = Weights(config.hidden_size, FILTER_FRAMES * (config.bands or 0), bias=True)
        self.conv2 = Weights(config.hidden_size, FILTER_FRAMES * config.hidden_size, bias=True)
        self.positions = Weights(config.context_length, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config)

    def begin(self, features: Tensor) -> Tensor:
        """What the first layer reads, [positions, features], of audio [mel bins, frames]. A position has two frames."""
        x = convolve(convolve(features, self.conv1, 1, self.activation), self.conv2, 2, self.activation)
        return x.t() + self.positions.weight

    def forward(self, x: Tensor, layers: range) -> Tensor:
        """What some layers make of their input [positions, features]: after the last one the encoder's output."""
        for layer in layers:
            x = self.blocks[layer](x, {}, [])
        normed: Tensor = self.norm(x) if layers.stop == len(self.blocks) else x
        return normed


def convolve(x: Tensor, filters: Weights, stride: int, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """A convolution of x [in, frames], with zeros at both ends. The filters are rows, frame by frame."""
    kernel = filters.weight.view(len(filters.weight), FILTER_FRAMES, -1).transpose(1, 2)
    return activation(F.conv1d(x[None], kernel, filters.bias, stride, padding=FILTER_FRAMES // 2)[0])


class Transformer(nn.Module):
    """The model a :class:`Config` describes. Its parameters are uninitialized until a checkpoint fills them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = Weights(config.vocab_size, config.hidden_size)
        self.positions = Weights(config.context_length, config.hidden_size) if config.learned_positions else None
        block = Block if config.encoder is None else partial(CrossBlock, encoder=config.encoder)
        self.blocks = nn.ModuleList(block(config, layer=layer) for layer in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config)
        self.head = self.embedding if config.tied_head else Weights(config.vocab_size, config.hidden_size)
        self.encoder = None if config.encoder is None else Encoder(config.encoder)
        # In float32 whatever the weights are: positions beyond a few hundred are not exact in half precision.
        ropes = {layer.rope for layer in config.layers if layer.rope is not None}
        self.frequencies = {r: torch.tensor(r.frequencies(), dtype=torch.float32, device="cpu") for r in ropes}

    def forward(
        self, tokens: Tensor, positions: Tensor, segments: list[TreeSegment], wanted: Tensor, vocab: int | None = None
    ) -> Tensor:
        """Logits [w, vocab] at the wanted nodes, int64 [w], of a batch with tokens and positions int64 [n].

        Args:
            vocab: how many first tokens get logits; None for all.
        """
        x = F.embedding(tokens, self.embedding.weight)
        if self.positions is not None:
            x = x + F.embedding(positions, self.positions.weight)
        if self.config.embedding_scale != 1.0:  # rounded as the weights are, for the models were trained so
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype)
        rotations = {rope: self._rotation(rope, positions, x.dtype) for rope in self.frequencies}
        for block in self.blocks:
            x = block(x, rotations, segments)
        if not len(wanted):  # a chunk inside a prompt
            return x.new_empty(0, self.config.vocab_size if vocab is None else vocab)
        return cap(self.head(self.norm(x[wanted]), vocab), self.config.logits_softcap)

    def place(self, states: Tensor, store: KeyValues, slots: slice | Tensor) -> None:
        """Write the keys and values of all layers for an encoder's output [n, features] into n slots."""
        for block in self.blocks:
            if isinstance(block, CrossBlock):
                block.cross_attention.place(states, store, slots)

    def _rotation(self, rope: Rope, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions[:, None, None] * self.frequencies[rope]
        cos, sin = angles.cos() * rope.scale, angles.sin() * rope.scale
        return torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)


class Weights(nn.Module):
    """A matrix [out, in] and perhaps a bias [out], without the initialization that nn.Linear would spend time on."""

    def __init__(self, rows: int, columns: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(rows), requires_grad=False) if bias else None

    def forward(self, x: Tensor, rows: int | None = None) -> Tensor:
        """The product [..., out], or its first rows."""
        return linear(x, self.weight[:rows], None if self.bias is None else self.bias[:rows])


class Norm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019), or LayerNorm (Ba et al. 2016), over the last dimension."""

    def __init__(self, size: int, config: Config) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if config.norm == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
