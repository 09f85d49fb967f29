"""Granite (IBM 2024). It is Llama with four multipliers: of embeddings, scores, outputs of parts, and logits."""

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

    name = "granite"
    gguf_name = "granite"
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
        return attention, usual.mlp(output_scale=scale)

    def refine_folder_config(self, config: Config, keys: SimpleNamespace) -> Config:
        return scaled(config, float(keys.embedding_multiplier), float(keys.logits_scaling))

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        scale = float(metadata.need("residual_scale", 0.0)) or 1.0
        attention = whole_heads_rotated(usual.attention(output_scale=scale), metadata)
        if of_scores := float(metadata.need("attention.scale", 0.0)):
            attention = replace(attention, scale=of_scores)
        if not metadata.need("rope.scaling.finetuned", True):  # llama.cpp's switch for models without a rotation
            attention = replace(attention, rope=None)
        return attention, usual.mlp(output_scale=scale)

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


ARCHITECTURES = (Granite(),)
