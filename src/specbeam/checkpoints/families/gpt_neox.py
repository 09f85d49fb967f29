"""GPT-NeoX and Pythia. Attention and MLP run in parallel, each with its own LayerNorm.

A folder keeps query, key and value of a head together.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

from specbeam.checkpoints.architecture import Architecture, Metadata, require_whole_heads, rope_parameters
from specbeam.checkpoints.config import Config


class GPTNeoX(Architecture):
    """GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023)."""

    name = "gpt_neox"
    gguf_name = "gptneox"
    features: ClassVar = {
        "norm": "layer",
        "activation": "gelu",
        "gated_mlp": False,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
    }
    keys: ClassVar = {
        "attention_bias": (bool, True),
        "hidden_act": (str, "gelu"),
        "intermediate_size": (int, 24576),
        "layer_norm_eps": (float, 1e-5),
        "use_parallel_residual": (bool, True),
    }
    folder_tensors: ClassVar = {
        "embedding": "gpt_neox.embed_in",
        "blocks.N.attention_norm": "gpt_neox.layers.N.input_layernorm",
        "blocks.N.attention.qkv": "gpt_neox.layers.N.attention.query_key_value",
        "blocks.N.attention.output": "gpt_neox.layers.N.attention.dense",
        "blocks.N.mlp_norm": "gpt_neox.layers.N.post_attention_layernorm",
        "blocks.N.mlp.up": "gpt_neox.layers.N.mlp.dense_h_to_4h",
        "blocks.N.mlp.down": "gpt_neox.layers.N.mlp.dense_4h_to_h",
        "norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
    }
    folder_ignored = (".attention.bias", ".attention.masked_bias", *Architecture.folder_ignored)  # the causal mask
    gguf_tensors: ClassVar = Architecture.gguf_tensors | {"blocks.N.attention.qkv": "blk.N.attn_qkv"}

    def derive(self, keys: SimpleNamespace) -> None:
        require_whole_heads(keys)

    def rope_parameters(self, keys: SimpleNamespace) -> dict[str, Any]:
        keys.partial_rotary_factor = getattr(keys, "rotary_pct", 0.25)
        return rope_parameters(keys, self.rope_theta, "rotary_emb_base")

    def refine_folder_config(self, config: Config, keys: SimpleNamespace) -> Config:
        return replace(config, parallel=bool(keys.use_parallel_residual), num_kv_heads=config.num_heads)

    def refine_gguf_config(self, config: Config, metadata: Metadata) -> Config:
        return replace(config, parallel=bool(metadata.need("use_parallel_residual")))

    def stores_qkv_by_head(self, source: str) -> bool:
        return ".query_key_value." in source


ARCHITECTURES = (GPTNeoX(),)
