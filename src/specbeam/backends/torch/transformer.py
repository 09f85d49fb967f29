"""A transformer in plain PyTorch: a decoder over a batch of tree nodes, and perhaps an encoder.

Activations are [nodes, features]: nodes of all requests lie one after the other, so every matrix product is one product
for the whole batch. Only the parts that look at other nodes look at one tree at a time (:mod:`.parts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbeam.backends.torch.cache import KeyValues
from specbeam.backends.torch.modules import Norm, Scale, Weights, add_modules, cap
from specbeam.backends.torch.parts import MODULES
from specbeam.backends.torch.parts.attention import Attention, CrossAttention
from specbeam.backends.torch.parts.part import Batch, PartModule, TreeSegment
from specbeam.checkpoints.config import Config, Layer
from specbeam.checkpoints.parts import attention as described
from specbeam.checkpoints.rope import Rope
from specbeam.checkpoints.stems import FILTER_FRAMES, TokenStem


class Step(NamedTuple):
    """A part of a layer with the norms around it."""

    module: PartModule
    norm: Norm | None
    output_norm: Norm | None
    joint_norm: Norm | None
    sum_norm: Norm | None
    sum_scale: Scale | None


class Block(nn.Module):
    """A layer. What each of its parts makes of the hidden states is added to them.

    Attributes:
        steps: its parts in their order.
    """

    def __init__(self, layer: Layer, config: Config) -> None:
        super().__init__()
        self.steps: list[Step] = []
        for part in layer:
            step = Step(
                MODULES[type(part)](part, config),
                norm=Norm(config.hidden_size, config) if part.norm else None,
                output_norm=Norm(config.hidden_size, config) if part.output_norm else None,
                joint_norm=Norm(config.hidden_size, config) if part.joint_norm else None,
                sum_norm=Norm(config.hidden_size, config) if part.sum_norm else None,
                sum_scale=Scale() if part.sum_scale else None,
            )
            self.steps.append(step)
            self.add_module(f"{part.name}_norm", step.norm)
            self.add_module(part.name, step.module)
            self.add_module(f"post_{part.name}_norm", step.output_norm)
            self.add_module(f"{part.name}_joint_norm", step.joint_norm)
            self.add_module(f"{part.name}_sum_norm", step.sum_norm)
            self.add_module(f"{part.name}_sum_scale", step.sum_scale)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        before = normed = unchanged = x
        added: Tensor | None = None
        for module, norm, output_norm, joint_norm, sum_norm, sum_scale in self.steps:
            if not module.part.parallel:
                before = normed = x
            if norm is not None:
                normed = norm(before)
            made = module(normed, batch)
            if output_norm is not None:
                made = output_norm(made)
            if module.part.output_scale != 1.0:
                made = made * module.part.output_scale
            if joint_norm is None:
                unchanged, added = x, made
            else:
                added = joint_norm(added + made)
            x = unchanged + added
            if sum_norm is not None:
                x = sum_norm(x)
            if sum_scale is not None:
                x = sum_scale(x)
        return x


class Stack(nn.Module):
    """What decoders and encoders have in common: a stem, blocks and a norm after them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        add_modules(self, config.stem.parameters(config), config)
        self.blocks = nn.ModuleList(Block(layer, config) for layer in config.layers)
        self.norm = Norm(config.hidden_size, config) if config.final_norm else nn.Identity()

    @property
    def steps(self) -> Iterator[Step]:
        """The steps of all blocks, in their order."""
        return (step for block in self.blocks for step in cast("Block", block).steps)

    @property
    def parts(self) -> Iterator[PartModule]:
        """The parts of all blocks, in their order."""
        return (step.module for step in self.steps)


class Encoder(Stack):
    """An encoder of audio: two convolutions, then layers whose positions see each other."""

    conv1: Weights
    conv2: Weights
    positions: Weights

    def begin(self, features: Tensor) -> Tensor:
        """What the first layer reads, [positions, features], of audio [mel bins, frames]. A position has two frames."""
        x = convolve(convolve(features, self.conv1, 1), self.conv2, 2)
        return x.t() + self.positions.weight

    def forward(self, x: Tensor, layers: range) -> Tensor:
        """What some layers make of their input [positions, features]: after the last one the encoder's output."""
        for layer in layers:
            x = self.blocks[layer](x, Batch())
        normed: Tensor = self.norm(x) if layers.stop == len(self.blocks) else x
        return normed


def convolve(x: Tensor, filters: Weights, stride: int) -> Tensor:
    """A convolution of x [in, frames], with zeros at both ends. The filters are rows, frame by frame."""
    kernel = filters.weight.view(len(filters.weight), FILTER_FRAMES, -1).transpose(1, 2)
    return F.gelu(F.conv1d(x[None], kernel, filters.bias, stride, padding=FILTER_FRAMES // 2)[0])


class Transformer(Stack):
    """The model a :class:`Config` describes. Its parameters are uninitialized until a checkpoint fills them.

    Attributes:
        windows, reaches: what the segments of a batch need in ``visible`` and ``last``.
    """

    embedding: Weights
    positions: Weights
    per_layer_projection: Weights
    per_layer_norm: Norm

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.head = self.embedding if config.tied_head else Weights(config.vocab_size, config.hidden_size)
        self.encoder = None if config.encoder is None else Encoder(config.encoder)
        attentions = [part for part in config.parts if isinstance(part, described.Attention)]
        self.windows = {part.window for part in attentions}
        self.reaches = {module.reach for module in self.parts if module.reach != 0}
        # In float32 whatever the weights are: positions beyond a few hundred are not exact in half precision.
        ropes = {part.rope for part in attentions if part.rope is not None}
        self.frequencies = {r: torch.tensor(r.frequencies(), dtype=torch.float32, device="cpu") for r in ropes}
        self._number_parts()

    def _number_parts(self) -> None:
        memory, attentions = -1, dict[int, Attention]()
        for layer, block in enumerate(self.blocks):
            for step in cast("Block", block).steps:
                memory += bool(step.module.kept)
                step.module.layer, step.module.memory = layer, memory
                if isinstance(step.module, Attention) and step.module.part.shares_keys_of is not None:
                    step.module.memory = attentions[step.module.part.shares_keys_of].memory
                if isinstance(step.module, Attention):
                    attentions[layer] = step.module

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: list[TreeSegment],
        wanted: Tensor,
        vocab: int | None = None,
        looked_up: Tensor | None = None,
    ) -> Tensor:
        """Logits [w, vocab] at the wanted nodes, int64 [w], of a batch with tokens and positions int64 [n].

        Args:
            vocab: how many first tokens get logits; None for all.
            looked_up: the embeddings that the tokens have for all layers, [n, layers * per_layer_size].
        """
        x = self.begin(tokens, positions)
        rotations = {rope: self._rotation(rope, positions, x.dtype) for rope in self.frequencies}
        per_layer = None if looked_up is None else self._per_layer_inputs(x, looked_up)
        batch = Batch(rotations, segments, positions, per_layer)
        for block in self.blocks:
            x = block(x, batch)
        if not len(wanted):  # a chunk inside a prompt
            return x.new_empty(0, self.config.vocab_size if vocab is None else vocab)
        return self.scaled(self.head(self.norm(x[wanted]), vocab))

    def scaled(self, logits: Tensor) -> Tensor:
        """Logits of the products of the head."""
        if self.config.logits_scale != 1.0:
            logits = logits * self.config.logits_scale
        return cap(logits, self.config.logits_softcap)

    def begin(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """What the first block reads, [n, hidden_size], of tokens and their positions, integers [n]."""
        stem = self.config.stem
        assert isinstance(stem, TokenStem)
        x = F.embedding(tokens, self.embedding.weight)
        if stem.learned_positions:
            x = x + F.embedding(positions, self.positions.weight)
        if stem.scale != 1.0:  # rounded as the weights are, for the models were trained so
            x = x * torch.tensor(stem.scale, dtype=x.dtype)
        return x

    def _per_layer_inputs(self, x: Tensor, looked_up: Tensor) -> Tensor:
        """What each layer reads beside the hidden states, [n, layers, per_layer_size]."""
        size = self.config.per_layer_size
        assert size is not None
        projected = self.per_layer_projection(x) * self.config.hidden_size**-0.5
        own = looked_up * torch.tensor(size**0.5, dtype=x.dtype)  # rounded as the weights are, as in :meth:`begin`
        return (self.per_layer_norm(projected.view(len(x), -1, size)) + own.view(len(x), -1, size)) * 0.5**0.5

    def place(self, states: Tensor, store: KeyValues, slots: slice | Tensor) -> None:
        """Write the keys and values of all layers for an encoder's output [n, features] into n slots."""
        for part in self.parts:
            if isinstance(part, CrossAttention):
                part.place(states, store, slots)

    def _rotation(self, rope: Rope, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions[:, None, None] * self.frequencies[rope]
        cos, sin = angles.cos() * rope.scale, angles.sin() * rope.scale
        return torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)
