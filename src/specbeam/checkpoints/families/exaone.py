"""EXAONE 4 (LG AI Research 2025). Not the inputs of attention and MLP are normed, but their outputs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

from specbeam.checkpoints.architecture import Architecture, Metadata, Usual
from specbeam.checkpoints.config import Layer
from specbeam.checkpoints.parts.part import size

PERIOD = 4
"""Every how many layers one sees the whole text, in models with windows."""
LAYERS_OF_32B, WINDOW_OF_32B = 64, 4096
"""llama.cpp gives this window to files of that many layers, unless they name another."""


class EXAONE4(Architecture):
    """EXAONE 4.0, 1.2B and 32B. In models with windows, only the layers with a window rotate queries and keys."""

    name = "exaone4"
    gguf_name = "exaone4"
    attention: ClassVar = {"norm": False, "output_norm": True, "qk_norm": "head"}
    mlp: ClassVar = {"norm": False, "output_norm": True}
    keys: ClassVar = {
        "head_dim": (int | None, None),
        "hidden_act": (str, "silu"),
        "intermediate_size": (int, 16384),
        "layer_types": (list[str] | None, None),
        "num_key_value_heads": (int, 32),
        "rms_norm_eps": (float, 1e-5),
        "sliding_window": (int | None, 4096),
        "sliding_window_pattern": (object, PERIOD),
    }
    folder_tensors: ClassVar = Architecture.folder_tensors | {
        "blocks.N.post_attention_norm": "model.layers.N.post_attention_layernorm",
        "blocks.N.post_mlp_norm": "model.layers.N.post_feedforward_layernorm",
    }

    def derive(self, keys: SimpleNamespace) -> None:
        if keys.layer_types is None:
            windows = keys.sliding_window is not None
            period = size("sliding_window_pattern", keys.sliding_window_pattern) if windows else 1
            kinds = ("full_attention", "sliding_attention")
            keys.layer_types = [kinds[(i + 1) % period != 0] for i in range(keys.num_hidden_layers)]

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        attention = usual.attention()
        rotates = keys.sliding_window is None or keys.layer_types[number] == "sliding_attention"
        return attention if rotates else replace(attention, rope=None), usual.mlp()

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        metadata.require("nextn_predict_layers", 0)
        otherwise = WINDOW_OF_32B if metadata.need("block_count") == LAYERS_OF_32B else 0
        attention = usual.attention(window=metadata.need("attention.sliding_window", otherwise) or None)
        if attention.window is None:
            return attention, usual.mlp()
        if not metadata.slides(number, PERIOD):
            return replace(attention, rope=None, window=None), usual.mlp()
        assert attention.rope is not None
        theta = float(metadata.need("rope.freq_base_swa", attention.rope.theta))
        return replace(attention, rope=replace(attention.rope, theta=theta)), usual.mlp()


ARCHITECTURES = (EXAONE4(),)
