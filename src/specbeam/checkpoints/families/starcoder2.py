"""StarCoder2 (Lozhkov et al. 2024). It has LayerNorm, biases, and an MLP without a gate."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

from specbeam.checkpoints.architecture import Architecture, Usual
from specbeam.checkpoints.config import Config, Layer


class StarCoder2(Architecture):
    """StarCoder2, 3B to 15B. Its GGUF files have no window."""

    name = "starcoder2"
    gguf_name = "starcoder2"
    tokenizer_class = "GPT2Tokenizer"
    features: ClassVar = {"norm": "layer"}
    mlp: ClassVar = {"activation": "gelu_tanh", "gated": False}
    keys: ClassVar = {
        "hidden_act": (str, "gelu_pytorch_tanh"),
        "intermediate_size": (int, 12288),
        "max_position_embeddings": (int, 4096),
        "norm_epsilon": (float, 1e-5),
        "num_key_value_heads": (int, 2),
        "sliding_window": (int | None, None),
        "tie_word_embeddings": (bool, True),
        "use_bias": (bool, True),
    }
    folder_tensors: ClassVar = Architecture.folder_tensors | {
        "blocks.N.mlp.up": "model.layers.N.mlp.c_fc",
        "blocks.N.mlp.down": "model.layers.N.mlp.c_proj",
    }

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        return usual.attention(qkv_bias=keys.use_bias, output_bias=keys.use_bias), usual.mlp(bias=keys.use_bias)

    def refine_folder_config(self, config: Config, keys: SimpleNamespace) -> Config:
        return replace(config, norm_eps=keys.norm_epsilon)


ARCHITECTURES = (StarCoder2(),)
