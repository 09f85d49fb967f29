"""Seed-OSS (ByteDance 2025). It is Llama with biases for queries, keys and values, and another name for a norm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

from specbeam.checkpoints.architecture import Architecture, Usual
from specbeam.checkpoints.config import Layer


class SeedOSS(Architecture):
    """Seed-OSS 36B."""

    name = "seed_oss"
    gguf_name = "seed_oss"
    keys: ClassVar = {
        "attention_bias": (bool, True),
        "attention_out_bias": (bool, False),
        "head_dim": (int | None, 128),
        "hidden_act": (str, "silu"),
        "intermediate_size": (int, 27648),
        "max_position_embeddings": (int, 524288),
        "mlp_bias": (bool, False),
        "num_key_value_heads": (int | None, 8),
        "rms_norm_eps": (float, 1e-6),
    }
    gguf_tensors: ClassVar = Architecture.gguf_tensors | {"blocks.N.mlp_norm": "blk.N.post_attention_norm"}

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        return usual.attention(output_bias=keys.attention_out_bias), usual.mlp()


ARCHITECTURES = (SeedOSS(),)
