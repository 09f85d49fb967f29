"""Qwen. Version 2 has biases for query, key and value; version 3 has a norm for each query and key head instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

from specbeam.checkpoints.architecture import Architecture, windows_above


class Qwen(Architecture):
    """The keys of the configuration that both versions have."""

    sizes = (151936, 4096, 32, 32)
    keys: ClassVar = {
        "hidden_act": (str, "silu"),
        "intermediate_size": (int, 22016),
        "layer_types": (list[str] | None, None),
        "max_position_embeddings": (int, 32768),
        "max_window_layers": (int, 28),
        "num_key_value_heads": (int | None, 32),
        "rms_norm_eps": (float, 1e-6),
        "sliding_window": (int | None, 4096),
        "use_sliding_window": (bool, False),
    }

    def derive(self, keys: SimpleNamespace) -> None:
        super().derive(keys)
        windows_above(keys)


class Qwen2(Qwen):
    """Qwen 2 and 2.5 (Yang et al. 2024)."""

    name = "qwen2"
    gguf_name = "qwen2"
    tokenizer_class = "Qwen2Tokenizer"
    attention: ClassVar = {"qkv_bias": True}


class Qwen3(Qwen):
    """Qwen 3 without experts (Yang et al. 2025)."""

    name = "qwen3"
    gguf_name = "qwen3"
    tokenizer_class = "Qwen2Tokenizer"
    keys: ClassVar = Qwen.keys | {"attention_bias": (bool, False), "head_dim": (int, 128)}
    attention: ClassVar = {"qk_norm": "head"}


ARCHITECTURES = (Qwen2(), Qwen3())
