"""Phi-3 and Phi-4. Query, key and value lie in one tensor, and so do the gate and the up projection."""

from __future__ import annotations

from typing import ClassVar

from specbeam.checkpoints.architecture import Architecture


class Phi3(Architecture):
    """Phi-3 (Abdin et al. 2024). Its long models have LongRoPE, and run up to the length they were first trained at."""

    name = "phi3"
    gguf_name = "phi3"
    folder_tensors: ClassVar = Architecture.folder_tensors | {
        "blocks.N.attention.qkv": "model.layers.N.self_attn.qkv_proj",
        "blocks.N.mlp.gate_up": "model.layers.N.mlp.gate_up_proj",
    }
    gguf_tensors: ClassVar = Architecture.gguf_tensors | {
        "blocks.N.attention.qkv": "blk.N.attn_qkv",
        "blocks.N.mlp.gate_up": "blk.N.ffn_up",
    }


ARCHITECTURES = (Phi3(),)
