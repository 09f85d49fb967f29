"""Qwen with experts: Qwen1.5-MoE and Qwen2 with a gated MLP beside them (Qwen Team 2024), Qwen3 (Yang et al. 2025)."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import ClassVar

from specbeam.checkpoints.architecture import Architecture, Metadata, Usual
from specbeam.checkpoints.config import Layer
from specbeam.checkpoints.families.qwen import Qwen2, Qwen3
from specbeam.checkpoints.parts.experts import Experts
from specbeam.checkpoints.parts.part import size


def has_experts(number: int, keys: SimpleNamespace) -> bool:
    """Whether a layer of a folder has experts in place of an MLP: all layers may have them, or every few."""
    step = size("decoder_sparse_step", keys.decoder_sparse_step)
    return bool(keys.num_experts) and number not in (keys.mlp_only_layers or ()) and (number + 1) % step == 0


class Qwen2MoE(Architecture):
    """Qwen1.5-MoE-A2.7B and Qwen2-57B-A14B."""

    name = "qwen2_moe"
    gguf_name = "qwen2moe"
    tokenizer_class = Qwen2.tokenizer_class
    keys: ClassVar = {
        "decoder_sparse_step": (int, 1),
        "hidden_act": (str, "silu"),
        "intermediate_size": (int, 5632),
        "layer_types": (list[str] | None, None),
        "max_position_embeddings": (int, 32768),
        "max_window_layers": (int, 28),
        "mlp_only_layers": (list[int] | None, None),
        "moe_intermediate_size": (int, 1408),
        "norm_topk_prob": (bool, False),
        "num_experts": (int, 60),
        "num_experts_per_tok": (int, 4),
        "num_key_value_heads": (int | None, 16),
        "qkv_bias": (bool, True),
        "rms_norm_eps": (float, 1e-6),
        "shared_expert_intermediate_size": (int, 5632),
        "sliding_window": (int | None, 4096),
        "use_sliding_window": (bool, False),
    }
    shared_expert: ClassVar = {"output_gate": True}
    has_experts = True
    folder_tensors: ClassVar = Architecture.folder_tensors | {
        "blocks.N.shared_expert.gate_up": "model.layers.N.mlp.shared_expert.{gate,up}_proj",
        "blocks.N.shared_expert.down": "model.layers.N.mlp.shared_expert.down_proj",
        "blocks.N.shared_expert.output_gate": "model.layers.N.mlp.shared_expert_gate",
    }

    def derive(self, keys: SimpleNamespace) -> None:
        super().derive(keys)
        keys.sliding_window = keys.sliding_window if keys.use_sliding_window else None
        if keys.layer_types is None:  # every other layer has a window, up to a layer
            slides = [keys.use_sliding_window and i % 2 == 0 for i in range(keys.num_hidden_layers)]
            kinds = ("full_attention", "sliding_attention")
            keys.layer_types = [kinds[one and i < keys.max_window_layers] for i, one in enumerate(slides)]

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        attention = usual.attention(qkv_bias=keys.qkv_bias)
        if not has_experts(number, keys):
            return attention, usual.mlp()
        shared = usual.shared_expert(intermediate_size=keys.shared_expert_intermediate_size)
        return attention, usual.experts(normalized=keys.norm_topk_prob), shared

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        experts, width = gguf_experts(usual, metadata), metadata.need("feed_forward_length")
        shared = usual.shared_expert(intermediate_size=metadata.need("expert_shared_feed_forward_length", 0) or width)
        return usual.attention(), experts(), shared


def gguf_experts(usual: Usual, metadata: Metadata) -> partial[Experts]:
    """The maker of a GGUF file's experts. The widths of all experts of a token are one width if it gives none."""
    if metadata.need("expert_feed_forward_length", 0):
        return usual.experts
    used = size("expert_used_count", metadata.need("expert_used_count", 0))
    return partial(usual.experts, intermediate_size=metadata.need("feed_forward_length") // used)


class Qwen3MoE(Architecture):
    """Qwen3-30B-A3B, Qwen3-Coder and others."""

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
        if not has_experts(number, keys):
            return usual.attention(), usual.mlp()
        experts = usual.experts(
            experts_per_token=keys.num_experts_per_tok,
            intermediate_size=keys.moe_intermediate_size,
            normalized=keys.norm_topk_prob,
        )
        return usual.attention(), experts

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        return usual.attention(), gguf_experts(usual, metadata)(normalized=True)


ARCHITECTURES = (Qwen2MoE(), Qwen3MoE())
