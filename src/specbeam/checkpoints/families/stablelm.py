"""StableLM. It is Llama with LayerNorm. Where attention and MLP run in parallel, they share one norm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

from specbeam.checkpoints.architecture import Architecture, Metadata, Usual
from specbeam.checkpoints.config import Layer


class StableLM(Architecture):
    """StableLM 2 (Bellagente et al. 2024)."""

    name = "stablelm"
    gguf_name = "stablelm"
    tokenizer_class = "TokenizersBackend"
    features: ClassVar = {"norm": "layer"}
    keys: ClassVar = {
        "hidden_act": (str, "silu"),
        "intermediate_size": (int, 6912),
        "layer_norm_eps": (float, 1e-5),
        "max_position_embeddings": (int, 4096),
        "num_key_value_heads": (int, 32),
        "partial_rotary_factor": (object, 0.25),
        "qk_layernorm": (bool, False),
        "use_parallel_residual": (bool, False),
        "use_qkv_bias": (bool, False),
    }

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        parallel = bool(keys.use_parallel_residual)
        return usual.attention(qkv_bias=bool(keys.use_qkv_bias)), usual.mlp(parallel=parallel, norm=not parallel)

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        has_norm = "ffn_norm.weight" in metadata.in_layers
        return usual.attention(), usual.mlp(norm=has_norm, parallel=not has_norm)


ARCHITECTURES = (StableLM(),)
