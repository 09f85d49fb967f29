"""GLM-4 (GLM Team 2024, 2025). Half of the features of each head are rotated, in most models neighbours paired.

Their files have queries and keys in pairs. Our rows have the first features of all pairs before the second ones.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.architecture import SIGMOID, Architecture, Metadata, Usual
from specbeam.checkpoints.config import Layer
from specbeam.checkpoints.families.llama import rows_of_pairs
from specbeam.checkpoints.parts.part import Part, size
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
    gguf_keys: ClassVar = {"rope.dimension_sections": ("[uint32]", "[int32]")}
    gguf_tensors: ClassVar = Architecture.gguf_tensors | {"blocks.N.mlp.gate_up": "blk.N.ffn_up"}

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        if any(metadata.need("rope.dimension_sections", ())):
            raise Unsupported("glm4 models with positions of pictures (rope.dimension_sections) are not supported")
        metadata.require("nextn_predict_layers", 0)
        return usual.attention(), usual.mlp()

    def gguf_rows(self, source: str, part: Part | None) -> NDArray[np.int64] | None:
        return rows_of_pairs(source, part)


class GLM4MoE(Architecture):
    """GLM-4.5 and GLM-4.5-Air. Experts have an MLP beside them, but in the first layers. Halves of heads are paired."""

    name = "glm4_moe"
    gguf_name = "glm4moe"
    tokenizer_class = GLM.tokenizer_class
    older_names: ClassVar = {"n_routed_experts": "num_local_experts"}
    keys: ClassVar = {
        "attention_bias": (bool, False),
        "first_k_dense_replace": (int, 1),
        "hidden_act": (str, "silu"),
        "intermediate_size": (int, 10944),
        "max_position_embeddings": (int, 131072),
        "moe_intermediate_size": (int, 1408),
        "n_group": (int, 1),
        "n_routed_experts": (int, 128),
        "n_shared_experts": (int, 1),
        "norm_topk_prob": (bool, True),
        "num_experts_per_tok": (int, 8),
        "num_key_value_heads": (int, 8),
        "partial_rotary_factor": (object, 0.5),
        "rms_norm_eps": (float, 1e-5),
        "routed_scaling_factor": (float, 1.0),
        "topk_group": (int, 1),
        "use_qk_norm": (bool, False),
    }
    experts: ClassVar = {"scoring": "sigmoid", "selection_bias": True, "sum_epsilon": 1e-20}
    has_experts = True
    folder_tensors: ClassVar = Architecture.folder_tensors | {
        "blocks.N.experts.selection_bias": "model.layers.N.mlp.gate.e_score_correction_bias!",
        "blocks.N.shared_expert.gate_up": "model.layers.N.mlp.shared_experts.{gate,up}_proj",
        "blocks.N.shared_expert.down": "model.layers.N.mlp.shared_experts.down_proj",
    }
    gguf_keys: ClassVar = {"expert_shared_count": ("uint32",), "expert_weights_norm": ("bool",)}
    gguf_tensors: ClassVar = Architecture.gguf_tensors | {
        "blocks.N.mlp_norm": "blk.N.post_attention_norm",
        "blocks.N.experts_norm": "blk.N.post_attention_norm",
    }

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        if keys.n_group != 1:
            raise Unsupported(f"n_group = {keys.n_group} is not supported for {self.name}: experts have no groups here")
        attention = usual.attention(qk_norm="head" if keys.use_qk_norm else None, output_bias=False)
        if number < keys.first_k_dense_replace:
            return attention, usual.mlp()
        experts = usual.experts(
            num_experts=keys.n_routed_experts,
            normalized=keys.norm_topk_prob,
            weight_scale=keys.routed_scaling_factor,
        )
        shared_size = experts.intermediate_size * size("n_shared_experts", keys.n_shared_experts)
        return attention, experts, usual.shared_expert(intermediate_size=shared_size)

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        attention = usual.attention(qk_norm="head" if "attn_q_norm.weight" in metadata.in_layers else None)
        metadata.require("expert_gating_func", SIGMOID)
        if number < metadata.need("leading_dense_block_count", 0):
            return attention, usual.mlp()
        experts = usual.experts(normalized=metadata.need("expert_weights_norm", False))
        if not (shared := metadata.need("expert_shared_count")):
            return attention, experts
        return attention, experts, usual.shared_expert(intermediate_size=experts.intermediate_size * shared)


ARCHITECTURES = (GLM(), GLM4(), GLM4MoE())
