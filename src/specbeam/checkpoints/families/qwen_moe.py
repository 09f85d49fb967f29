"""Qwen 3 with experts (Yang et al. 2025), such as Qwen3-30B-A3B and Qwen3-Coder."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import ClassVar

from specbeam.checkpoints.architecture import Architecture, Metadata, Usual
from specbeam.checkpoints.config import Layer
from specbeam.checkpoints.families.qwen import Qwen3
from specbeam.checkpoints.parts.part import size


class Qwen3MoE(Architecture):
    """Layers have experts in place of an MLP: all of them, or every few."""

    name = "qwen3_moe"
    gguf_name = "qwen3moe"
    tokenizer_class = Qwen3.tokenizer_class
    keys: ClassVar = {
        "attention_bias": (bool, False),
        "decoder_sparse_step": (int, 1),
        "head_dim": (int | None, None),
        "hidden_act": (str, "silu"),
        "intermediate_size": (int, 6144),
        "max_position_embeddings": (int, 32768),
        "mlp_only_layers": (list[int] | None, None),
        "moe_intermediate_size": (int, 768),
        "norm_topk_prob": (bool, False),
        "num_experts": (int, 128),
        "num_experts_per_tok": (int, 8),
        "num_key_value_heads": (int, 4),
        "num_local_experts": (object, ...),
        "rms_norm_eps": (float, 1e-6),
        "sliding_window": (int | None, 4096),
        "use_sliding_window": (bool, False),
    }
    attention: ClassVar = {"qk_norm": "head"}
    has_experts = True

    def derive(self, keys: SimpleNamespace) -> None:
        super().derive(keys)
        if keys.num_local_experts is not ...:  # the other name goes before, as in transformers
            keys.num_experts = keys.num_local_experts
        keys.sliding_window = keys.sliding_window if keys.use_sliding_window else None

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        step = size("decoder_sparse_step", keys.decoder_sparse_step)
        if not keys.num_experts or number in (keys.mlp_only_layers or ()) or (number + 1) % step:
            return usual.attention(), usual.mlp()
        experts = usual.experts(
            experts_per_token=keys.num_experts_per_tok,
            intermediate_size=keys.moe_intermediate_size,
            normalized=keys.norm_topk_prob,
        )
        return usual.attention(), experts

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        experts = usual.experts
        if not metadata.need("expert_feed_forward_length", 0):
            used = size("expert_used_count", metadata.need("expert_used_count", 0))
            experts = partial(experts, intermediate_size=metadata.need("feed_forward_length") // used)
        return usual.attention(), experts(normalized=True)


ARCHITECTURES = (Qwen3MoE(),)
