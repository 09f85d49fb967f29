"""Command R7B and Tiny Aya (Cohere 2024). Attention and MLP are parallel, and only layers with a window rotate.

Its LayerNorms have no biases, which are zeros here. Neighbouring features of queries and keys are rotated.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.architecture import Architecture, Metadata, Usual
from specbeam.checkpoints.config import Config, Layer
from specbeam.checkpoints.families.llama import rows_of_pairs
from specbeam.checkpoints.parts.part import Part, size

PERIOD = 4
"""Every how many layers one sees the whole text."""


class Cohere2(Architecture):
    """Command R7B, Command A and Tiny Aya."""

    name = "cohere2"
    gguf_name = "cohere2"
    tokenizer_class = "CohereTokenizer"
    features: ClassVar = {"norm": "layer"}
    mlp: ClassVar = {"norm": False, "parallel": True}
    keys: ClassVar = {
        "attention_bias": (bool, False),
        "head_dim": (int | None, None),
        "hidden_act": (str, "silu"),
        "intermediate_size": (int, 22528),
        "layer_norm_eps": (float, 1e-5),
        "layer_types": (list[str] | None, None),
        "logit_scale": (float, 0.0625),
        "max_position_embeddings": (int, 8192),
        "num_key_value_heads": (int | None, None),
        "sliding_window": (int | None, 4096),
        "sliding_window_pattern": (int, PERIOD),
        "tie_word_embeddings": (bool, True),
    }
    folder_zeros = ("layernorm.bias", "model.norm.bias")
    gguf_zeros = ("_norm.bias",)
    gguf_keys: ClassVar = {"logit_scale": ("float32",)}

    def derive(self, keys: SimpleNamespace) -> None:
        super().derive(keys)
        if keys.layer_types is None:
            period = size("sliding_window_pattern", keys.sliding_window_pattern)
            kinds = ("full_attention", "sliding_attention")
            keys.layer_types = [kinds[(i + 1) % period != 0] for i in range(keys.num_hidden_layers)]

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        attention = usual.attention()
        return attention if attention.window else replace(attention, rope=None), usual.mlp()

    def refine_folder_config(self, config: Config, keys: SimpleNamespace) -> Config:
        return replace(config, logits_scale=keys.logit_scale)

    def folder_rows(self, source: str, part: Part | None) -> NDArray[np.int64] | None:
        return rows_of_pairs(source, part, ".q_proj.", ".k_proj.")

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        attention = usual.attention(window=metadata.need("attention.sliding_window"))
        if not metadata.slides(number, PERIOD):
            attention = replace(attention, rope=None, window=None)
        return attention, usual.mlp()

    def refine_gguf_config(self, config: Config, metadata: Metadata) -> Config:
        return replace(config, logits_scale=float(metadata.need("logit_scale")) or 1.0)

    def gguf_rows(self, source: str, part: Part | None) -> NDArray[np.int64] | None:
        return rows_of_pairs(source, part)


ARCHITECTURES = (Cohere2(),)
