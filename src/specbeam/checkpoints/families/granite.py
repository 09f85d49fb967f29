"""Granite (IBM 2024). It is Llama with four multipliers: of embeddings, scores, outputs of parts, and logits.

Some models have experts in place of MLPs, and some of these an MLP beside them.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.architecture import Architecture, Metadata, Usual
from specbeam.checkpoints.config import Config, Layer
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
        attention = whole_heads_rotated(usual.attention(output_scale=scale), metadata)
        if of_scores := float(metadata.need("attention.scale", 0.0)):
            attention = replace(attention, scale=of_scores)
        if not metadata.need("rope.scaling.finetuned", True):  # llama.cpp's switch for models without a rotation
            attention = replace(attention, rope=None)
        return attention, *self._feed_forward(usual, metadata.need("expert_shared_feed_forward_length", 0), scale)

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
    keys: ClassVar = {
        **{key: kind for key, kind in Granite.keys.items() if key not in ("head_dim", "mlp_bias")},
        "num_experts_per_tok": (int | None, 2),
        "num_local_experts": (int | None, 8),
    }
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


ARCHITECTURES = (Granite(), GraniteMoE(), GraniteMoEShared())
