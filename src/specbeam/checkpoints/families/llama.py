"""Llama and its closest relatives. Mistral adds a sliding window, Mixtral experts. SmolLM3 lacks some rotations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.architecture import Architecture, Metadata, Usual, require_whole_heads
from specbeam.checkpoints.config import Layer
from specbeam.checkpoints.parts.attention import Attention
from specbeam.checkpoints.parts.part import Part

STACKED = ".attn_qkv."
"""In the name of a tensor of a GGUF file that stacks query, key and value."""


class Llama(Architecture):
    """Llama 1 to 3 (Touvron et al. 2023): RMSNorm, rotary positions, a gated MLP, grouped queries."""

    name = "llama"
    gguf_name = "llama"
    sizes = (32000, 4096, 32, 32)
    has_experts = True
    keys: ClassVar = {
        "attention_bias": (bool, False),
        "head_dim": (int | None, None),
        "hidden_act": (str, "silu"),
        "intermediate_size": (int, 11008),
        "mlp_bias": (bool, False),
        "num_key_value_heads": (int | None, None),
        "rms_norm_eps": (float, 1e-6),
    }

    def derive(self, keys: SimpleNamespace) -> None:
        super().derive(keys)
        require_whole_heads(keys)

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        feed_forward = usual.experts(normalized=True) if metadata.need("expert_count", 0) else usual.mlp()
        return whole_heads_rotated(usual.attention(), metadata), feed_forward

    def gguf_rows(self, source: str, part: Part | None) -> NDArray[np.int64] | None:
        return rows_of_pairs(source, part)


class Mistral(Architecture):
    """Mistral 7B (Jiang et al. 2023). Its GGUF files carry Llama's name."""

    name = "mistral"
    gguf_name = None
    tokenizer_class = "TokenizersBackend"
    sizes = (32000, 4096, 32, 32)
    keys: ClassVar = {
        "head_dim": (int | None, None),
        "hidden_act": (str, "silu"),
        "intermediate_size": (int, 14336),
        "max_position_embeddings": (int, 131072),
        "num_key_value_heads": (int, 8),
        "rms_norm_eps": (float, 1e-6),
        "sliding_window": (int | None, 4096),
    }


class Mixtral(Architecture):
    """Mixtral (Jiang et al. 2024). Its GGUF files carry Llama's name."""

    name = "mixtral"
    gguf_name = None
    tokenizer_class = "TokenizersBackend"
    rope_theta = 1_000_000.0
    keys: ClassVar = {
        "head_dim": (int | None, None),
        "hidden_act": (str, "silu"),
        "intermediate_size": (int, 14336),
        "max_position_embeddings": (int, 131072),
        "num_experts": (int, None),
        "num_experts_per_tok": (int, 2),
        "num_key_value_heads": (int, 8),
        "num_local_experts": (int, 8),
        "rms_norm_eps": (float, 1e-5),
        "sliding_window": (int | None, None),
    }
    experts: ClassVar = {"normalized": True}
    folder_tensors: ClassVar = Architecture.folder_tensors | {
        "blocks.N.experts.router": "model.layers.N.block_sparse_moe.gate",
        "blocks.N.experts.gate": "model.layers.N.block_sparse_moe.experts.*.w1",
        "blocks.N.experts.up": "model.layers.N.block_sparse_moe.experts.*.w3",
        "blocks.N.experts.down": "model.layers.N.block_sparse_moe.experts.*.w2",
    }
    folder_renamed: ClassVar = {".mlp.": ".block_sparse_moe."}

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        return usual.attention(), usual.experts()


class SmolLM3(Architecture):
    """SmolLM3. Every fourth layer does not rotate queries and keys (NoPE, Yang et al. 2025)."""

    name = "smollm3"
    gguf_name = "smollm3"
    rope_theta = 2_000_000.0
    keys: ClassVar = {
        "attention_bias": (bool, False),
        "hidden_act": (str, "silu"),
        "intermediate_size": (int, 11008),
        "layer_types": (list[str] | None, None),
        "max_position_embeddings": (int, 32768),
        "mlp_bias": (bool, False),
        "no_rope_layer_interval": (int, 4),
        "no_rope_layers": (list[int] | None, None),
        "num_key_value_heads": (int | None, 4),
        "rms_norm_eps": (float, 1e-6),
        "sliding_window": (int | None, None),
        "tie_word_embeddings": (bool, True),
        "use_sliding_window": (bool, False),
    }

    def derive(self, keys: SimpleNamespace) -> None:
        super().derive(keys)
        layers = range(keys.num_hidden_layers)
        if keys.no_rope_layers is None:  # despite the name, 1 where there is a rotation
            keys.no_rope_layers = [int((i + 1) % keys.no_rope_layer_interval != 0) for i in layers]
        if keys.layer_types is None:
            slides = keys.use_sliding_window and keys.sliding_window is not None
            kinds = ("full_attention", "sliding_attention")
            keys.layer_types = [kinds[bool(slides and not keys.no_rope_layers[i])] for i in layers]

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        attention = usual.attention() if keys.no_rope_layers[number] else usual.attention(rope=None)
        return attention, usual.mlp()

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        rotated = whole_heads_rotated(usual.attention(), metadata)
        attention = rotated if number % 4 != 3 else usual.attention(rope=None)  # the files do not list the layers
        return attention, usual.mlp()

    def gguf_rows(self, source: str, part: Part | None) -> NDArray[np.int64] | None:
        return rows_of_pairs(source, part)


def rows_of_pairs(
    source: str, part: Part | None, queries: str = ".attn_q.", keys: str = ".attn_k."
) -> NDArray[np.int64] | None:
    """The rows of queries and keys in a file that interleaves the two halves of the rotated features of each head.

    Args:
        source: the name of a tensor.
        queries, keys: what the names of these tensors have in them. The defaults are GGUF's.
    """
    if not isinstance(part, Attention) or not any(name in source for name in (queries, keys, STACKED)):
        return None
    count = part.key_size if keys in source else part.query_size
    count += part.key_size if STACKED in source else 0
    rows = np.arange(count).reshape(-1, part.head_dim)
    rotated = part.head_dim if part.rope is None else part.rope.dim
    paired = np.concatenate([rows[:, 0:rotated:2], rows[:, 1:rotated:2], rows[:, rotated:]], axis=1).ravel()
    return np.concatenate([paired, np.arange(count, count + part.key_size)]) if STACKED in source else paired


def whole_heads_rotated(attention: Attention, metadata: Metadata) -> Attention:
    """The attention, if a file rotates all features of its heads. Only then are its rows pairs of halves."""
    metadata.require("rope.dimension_count", attention.head_dim)
    return attention


ARCHITECTURES = (Llama(), Mistral(), Mixtral(), SmolLM3())
