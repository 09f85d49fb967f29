"""GPT-NeoX and Pythia. Attention and MLP run in parallel, each with its own LayerNorm.

A folder keeps query, key and value of a head together.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.architecture import Architecture, Metadata, Usual, require_whole_heads, rope_parameters
from specbeam.checkpoints.config import Layer
from specbeam.checkpoints.parts.attention import Attention
from specbeam.checkpoints.parts.part import Part


class GPTNeoX(Architecture):
    """GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023)."""

    name = "gpt_neox"
    gguf_name = "gptneox"
    tokenizer_class = "GPTNeoXTokenizer"
    attention: ClassVar = {"qkv_bias": True, "output_bias": True}
    mlp: ClassVar = {"activation": "gelu", "gated": False, "bias": True}
    features: ClassVar = {"norm": "layer"}
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

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        parallel = bool(keys.use_parallel_residual)
        return usual.attention(num_kv_heads=keys.num_attention_heads), usual.mlp(parallel=parallel)

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        return usual.attention(), usual.mlp(parallel=bool(metadata.need("use_parallel_residual")))

    def folder_rows(self, source: str, part: Part | None) -> NDArray[np.int64] | None:
        if not (isinstance(part, Attention) and ".query_key_value." in source):
            return None
        rows = np.arange(3 * part.query_size).reshape(-1, 3, part.head_dim)
        return rows.swapaxes(0, 1).ravel()  # (heads, 3, head_dim) to (3, heads, head_dim)


ARCHITECTURES = (GPTNeoX(),)
