"""Llama and its closest relatives. Mistral adds a sliding window, SmolLM3 leaves some layers without rotation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

from specbeam.checkpoints.architecture import Architecture, Metadata, require_whole_heads
from specbeam.checkpoints.config import Config


class Llama(Architecture):
    """Llama 1 to 3 (Touvron et al. 2023): RMSNorm, rotary positions, a gated MLP, grouped queries."""

    name = "llama"
    gguf_name = "llama"
    gguf_interleaves_rope = True
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


class Mistral(Architecture):
    """Mistral 7B (Jiang et al. 2023). Its GGUF files carry Llama's name."""

    name = "mistral"
    gguf_name = None
    keys: ClassVar = {
        "head_dim": (int | None, None),
        "hidden_act": (str, "silu"),
        "intermediate_size": (int, 14336),
        "max_position_embeddings": (int, 131072),
        "num_key_value_heads": (int, 8),
        "rms_norm_eps": (float, 1e-6),
        "sliding_window": (int | None, 4096),
    }


class SmolLM3(Architecture):
    """SmolLM3. Every fourth layer does not rotate queries and keys (NoPE, Yang et al. 2025)."""

    name = "smollm3"
    gguf_name = "smollm3"
    gguf_interleaves_rope = True
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

    def refine_folder_config(self, config: Config, keys: SimpleNamespace) -> Config:
        return _rotate_only(config, lambda layer: bool(keys.no_rope_layers[layer]))

    def refine_gguf_config(self, config: Config, metadata: Metadata) -> Config:
        return _rotate_only(config, lambda layer: layer % 4 != 3)  # the files do not list the layers


def _rotate_only(config: Config, rotated: Callable[[int], bool]) -> Config:
    layers = (layer if rotated(i) else replace(layer, rope=None) for i, layer in enumerate(config.layers))
    return replace(config, layers=tuple(layers))


ARCHITECTURES = (Llama(), Mistral(), SmolLM3())
