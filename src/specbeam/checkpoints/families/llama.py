"""Llama and its closest relatives. Mistral adds a sliding window, SmolLM3 leaves some layers without rotation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specbeam.checkpoints.architecture import Architecture, Metadata
from specbeam.checkpoints.config import Config


class Llama(Architecture):
    """Llama 1 to 3 (Touvron et al. 2023): RMSNorm, rotary positions, a gated MLP, grouped queries."""

    name = "llama"
    gguf_name = "llama"
    gguf_interleaves_rope = True


class Mistral(Architecture):
    """Mistral 7B (Jiang et al. 2023). Its GGUF files carry Llama's name."""

    name = "mistral"
    gguf_name = None


class SmolLM3(Architecture):
    """SmolLM3. Every fourth layer does not rotate queries and keys (NoPE, Yang et al. 2025)."""

    name = "smollm3"
    gguf_name = "smollm3"
    gguf_interleaves_rope = True

    def refine_folder_config(self, config: Config, given: Any) -> Config:
        rotated = given.no_rope_layers  # despite the name, 1 where there is a rotation
        return config if rotated is None else _rotate_only(config, lambda layer: bool(rotated[layer]))

    def refine_gguf_config(self, config: Config, metadata: Metadata) -> Config:
        return _rotate_only(config, lambda layer: layer % 4 != 3)  # the files do not list the layers


def _rotate_only(config: Config, rotated: Callable[[int], bool]) -> Config:
    layers = (layer if rotated(i) else replace(layer, rope=None) for i, layer in enumerate(config.layers))
    return replace(config, layers=tuple(layers))


ARCHITECTURES = (Llama(), Mistral(), SmolLM3())
