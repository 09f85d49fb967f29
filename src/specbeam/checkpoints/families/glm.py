"""GLM-4 (GLM Team 2024). Half of the features of each head are rotated, neighbours paired.

Files have queries and keys in pairs. Our rows have the first features of all pairs before the second ones.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.architecture import Architecture, Metadata, Usual
from specbeam.checkpoints.config import Layer
from specbeam.checkpoints.families.llama import rows_of_pairs
from specbeam.checkpoints.parts.part import Part
from specbeam.errors import Unsupported


class GLM(Architecture):
    """GLM-4 9B of 2024. Its outputs are not normed. GGUF files of it stack other tensors, and are not read."""

    name = "glm"
    gguf_name: ClassVar[str | None] = None
    tokenizer_class = "TokenizersBackend"
    keys: ClassVar = {
        "attention_bias": (bool, True),
        "head_dim": (int | None, 128),
        "hidden_act": (str, "silu"),
        "intermediate_size": (int, 13696),
        "max_position_embeddings": (int, 131072),
        "num_key_value_heads": (int | None, 2),
        "partial_rotary_factor": (object, 0.5),
        "rms_norm_eps": (float, 1.5625e-7),
    }
    folder_tensors: ClassVar = Architecture.folder_tensors | {
        "blocks.N.mlp.gate_up": "model.layers.N.mlp.gate_up_proj",
    }

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        return usual.attention(output_bias=False), usual.mlp()

    def folder_rows(self, source: str, part: Part | None) -> NDArray[np.int64] | None:
        return rows_of_pairs(source, part, ".q_proj.", ".k_proj.")


class GLM4(GLM):
    """GLM-4-0414 and GLM-Z1, 9B and 32B."""

    name = "glm4"
    gguf_name = "glm4"
    attention: ClassVar = {"output_norm": True}
    mlp: ClassVar = {"output_norm": True}
    keys: ClassVar = GLM.keys | {"head_dim": (int, 128), "num_key_value_heads": (int, 2)}
    folder_tensors: ClassVar = GLM.folder_tensors | {
        "blocks.N.post_attention_norm": "model.layers.N.post_self_attn_layernorm",
        "blocks.N.post_mlp_norm": "model.layers.N.post_mlp_layernorm",
    }
    gguf_keys: ClassVar = {"nextn_predict_layers": ("uint32",), "rope.dimension_sections": ("[uint32]", "[int32]")}
    gguf_tensors: ClassVar = Architecture.gguf_tensors | {"blocks.N.mlp.gate_up": "blk.N.ffn_up"}

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        if any(metadata.need("rope.dimension_sections", ())):
            raise Unsupported("glm4 models with positions of pictures (rope.dimension_sections) are not supported")
        metadata.require("nextn_predict_layers", 0)
        return usual.attention(), usual.mlp()

    def gguf_rows(self, source: str, part: Part | None) -> NDArray[np.int64] | None:
        return rows_of_pairs(source, part)


ARCHITECTURES = (GLM(), GLM4())
