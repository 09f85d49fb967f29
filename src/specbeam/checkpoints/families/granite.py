"""Granite (IBM 2024). It is Llama with four multipliers: of embeddings, scores, outputs of parts, and logits.

Some models have experts in place of MLPs, and some of these an MLP beside them. Granite 4 H has Mamba 2 in most layers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.architecture import Architecture, Metadata, Usual
from specbeam.checkpoints.config import Config, Layer
from specbeam.checkpoints.families import mamba
from specbeam.checkpoints.families.llama import Llama, rows_of_pairs, whole_heads_rotated
from specbeam.checkpoints.parts.part import Part
from specbeam.checkpoints.stems import TokenStem
from specbeam.errors import SpecbeamError


class Granite(Architecture):
    """Granite 3 and 4.1 without experts."""

    name: ClassVar[str] = "granite"
    gguf_name: ClassVar[str | None] = "granite"
    tokenizer_class = "TokenizersBackend"
    keys: ClassVar = Llama.keys | {
        "attention_multiplier": (float | int, 1.0),
        "embedding_multiplier": (float | int, 1.0),
        "logits_scaling": (float | int, 1.0),
        "residual_multiplier": (float | int, 1.0),
    }
    gguf_keys: ClassVar = {
        **dict.fromkeys(("attention.scale", "embedding_scale", "logit_scale", "residual_scale"), ("float32",)),
        "rope.scaling.finetuned": ("bool",),
    }

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        scale = float(keys.residual_multiplier)
        attention = usual.attention(scale=float(keys.attention_multiplier), output_scale=scale)
        return attention, *self._feed_forward(usual, getattr(keys, "shared_intermediate_size", 0), scale)

    def _feed_forward(self, usual: Usual, shared_size: int, scale: float) -> Layer:
        """What follows attention.

        Args:
            shared_size: the width of the MLP beside experts; 0 for none.
        """
        return (usual.mlp(output_scale=scale),)

    def refine_folder_config(self, config: Config, keys: SimpleNamespace) -> Config:
        return scaled(config, float(keys.embedding_multiplier), float(keys.logits_scaling))

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        scale = float(metadata.need("residual_scale", 0.0)) or 1.0
        shared_size = metadata.need("expert_shared_feed_forward_length", 0)
        return self._mixer(usual, metadata, scale), *self._feed_forward(usual, shared_size, scale)

    def _mixer(self, usual: Usual, metadata: Metadata, scale: float) -> Part:
        """The first part of a layer of a GGUF file, whose output has this scale."""
        attention = whole_heads_rotated(usual.attention(output_scale=scale), metadata)
        if of_scores := float(metadata.need("attention.scale", 0.0)):
            attention = replace(attention, scale=of_scores)
        if not metadata.need("rope.scaling.finetuned", True):  # llama.cpp's switch for models without a rotation
            attention = replace(attention, rope=None)
        return attention

    def refine_gguf_config(self, config: Config, metadata: Metadata) -> Config:
        return scaled(config, float(metadata.need("embedding_scale", 0.0)) or 1.0, float(metadata.need("logit_scale")))

    def gguf_rows(self, source: str, part: Part | None) -> NDArray[np.int64] | None:
        return rows_of_pairs(source, part)


def scaled(config: Config, of_embeddings: float, divisor: float) -> Config:
    """A configuration with these multipliers.

    Args:
        divisor: of the logits.
    """
    if not divisor > 0:
        raise SpecbeamError(f"the model's configuration divides logits by {divisor}: that must be over 0")
    return replace(config, stem=TokenStem(scale=of_embeddings), logits_scale=1 / divisor)


class GraniteMoE(Granite):
    """Granite 3 with 1B-A400M and 3B-A800M parameters. The weights of a token's experts are a softmax over these."""

    name: ClassVar[str] = "granitemoe"
    gguf_name: ClassVar[str | None] = "granitemoe"
    keys: ClassVar = Granite.keys | {"num_experts_per_tok": (int | None, 2), "num_local_experts": (int | None, 8)}
    experts: ClassVar = {"normalized": True}
    has_experts = True
    folder_tensors: ClassVar = Granite.folder_tensors | {
        "blocks.N.experts.router": "model.layers.N.block_sparse_moe.router",
        "blocks.N.experts.gate": "model.layers.N.block_sparse_moe.experts.gate_proj",
        "blocks.N.experts.up": "model.layers.N.block_sparse_moe.experts.up_proj",
        "blocks.N.experts.down": "model.layers.N.block_sparse_moe.experts.down_proj",
        "blocks.N.shared_expert.gate_up": "model.layers.N.shared_mlp.input_linear",
        "blocks.N.shared_expert.down": "model.layers.N.shared_mlp.output_linear",
    }
    folder_renamed: ClassVar = {
        "block_sparse_moe.router.layer.": "block_sparse_moe.router.",
        "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    }

    def _feed_forward(self, usual: Usual, shared_size: int, scale: float) -> Layer:
        experts = usual.experts(output_scale=scale)
        if not shared_size:
            return (experts,)
        return experts, usual.shared_expert(intermediate_size=shared_size, output_scale=scale)


class GraniteMoEShared(GraniteMoE):
    """Granite with experts and an MLP beside them. Its GGUF files carry the name of the others."""

    name = "granitemoeshared"
    gguf_name = None
    keys: ClassVar = GraniteMoE.keys | {"shared_intermediate_size": (int, 0)}


class GraniteHybrid(GraniteMoE):
    """Granite 4: most layers have Mamba 2 and the others attention without a rotation. Some models have experts.

    A model without experts or without Mamba 2 has this name, too. Its MLP is called as the one beside experts.
    """

    name = "granitemoehybrid"
    gguf_name = "granitehybrid"
    keys: ClassVar = {
        **GraniteMoE.keys,
        **mamba.KEYS,
        "layer_types": (list[str] | None, None),
        "position_embedding_type": (str | None, None),
        "shared_intermediate_size": (int, 1024),
    }
    layer_kinds = ("full_attention", "linear_attention")
    folder_tensors: ClassVar = {
        **GraniteMoE.folder_tensors,
        **mamba.folder_tensors("model.layers.N.mamba"),
        "blocks.N.mlp.gate_up": "model.layers.N.shared_mlp.input_linear",
        "blocks.N.mlp.down": "model.layers.N.shared_mlp.output_linear",
    }
    gguf_keys: ClassVar = GraniteMoE.gguf_keys | mamba.GGUF_KEYS
    gguf_tensors: ClassVar = GraniteMoE.gguf_tensors | mamba.GGUF_TENSORS

    def derive(self, keys: SimpleNamespace) -> None:
        super().derive(keys)
        if keys.layer_types is None:
            keys.layer_types = ["linear_attention"] * keys.num_hidden_layers

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        scale = float(keys.residual_multiplier)
        if not keys.num_local_experts:
            usual = usual._replace(mlp=partial(usual.mlp, intermediate_size=keys.shared_intermediate_size, bias=False))
        feed_forward = self._feed_forward(usual, keys.shared_intermediate_size, scale)
        if keys.layer_types[number] == "linear_attention":
            inner_size = keys.mamba_expand * keys.hidden_size
            return mamba.mamba2_of_folder(self, keys, inner_size, output_scale=scale), *feed_forward
        attention = usual.attention(scale=float(keys.attention_multiplier), output_scale=scale)
        return attention if keys.position_embedding_type == "rope" else replace(attention, rope=None), *feed_forward

    def _feed_forward(self, usual: Usual, shared_size: int, scale: float) -> Layer:
        has_experts = usual.experts.keywords["num_experts"]
        return super()._feed_forward(usual, shared_size, scale) if has_experts else (usual.mlp(output_scale=scale),)

    def _mixer(self, usual: Usual, metadata: Metadata, scale: float) -> Part:
        if usual.attention.keywords["num_kv_heads"]:
            return super()._mixer(usual, metadata, scale)
        return mamba.mamba2_of_gguf(metadata, output_scale=scale)

    def folder_values(self, source: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
        return mamba.folder_values(source, values)


ARCHITECTURES = (Granite(), GraniteMoE(), GraniteMoEShared(), GraniteHybrid())
