"""Qwen. Version 2 has biases for query, key and value; version 3 has a norm for each query and key head instead."""

from __future__ import annotations

from typing import ClassVar

from specbeam.checkpoints.architecture import Architecture


class Qwen2(Architecture):
    """Qwen 2 and 2.5 (Yang et al. 2024)."""

    name = "qwen2"
    gguf_name = "qwen2"
    features: ClassVar = {"qkv_bias": True}


class Qwen3(Architecture):
    """Qwen 3 without experts (Yang et al. 2025)."""

    name = "qwen3"
    gguf_name = "qwen3"
    features: ClassVar = {"qk_norm": True}


ARCHITECTURES = (Qwen2(), Qwen3())
