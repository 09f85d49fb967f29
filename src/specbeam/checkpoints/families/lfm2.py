"""LFM2 (Liquid AI 2025). Most layers have a gated short convolution in place of attention. Some models have experts.

GGUF files say which by the number of key heads of each layer, which is 0 there. Their last norm is ``token_embd_norm``.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

from specbeam.checkpoints.architecture import SIGMOID, Architecture, Metadata, Usual
from specbeam.checkpoints.config import Config, Layer
from specbeam.checkpoints.parts.part import Part, size
from specbeam.checkpoints.parts.short_convolution import MAX_KERNEL_SIZE, ShortConvolution
from specbeam.errors import SpecbeamError, Unsupported


class LFM2(Architecture):
    """LFM2 and LFM2.5 without experts."""

    name = "lfm2"
    gguf_name = "lfm2"
    sizes = (65536, 2560, 32, 32)
    rope_theta = 1_000_000.0
    keys: ClassVar = {
        "block_auto_adjust_ff_dim": (bool, True),
        "block_ff_dim": (int, None),
        "block_ffn_dim_multiplier": (float | int, 1.0),
        "block_multiple_of": (int, 256),
        "conv_L_cache": (int, 3),
        "conv_bias": (bool, False),
        "full_attn_idxs": (list[int] | None, None),
        "intermediate_size": (int, 12288),
        "layer_types": (list[str] | None, None),
        "max_position_embeddings": (int, 128_000),
        "norm_eps": (float, 1e-5),
        "num_key_value_heads": (int, 8),
        "tie_embedding": (bool, None),
        "tie_word_embeddings": (bool, True),
    }
    attention: ClassVar = {"qk_norm": "head"}
    layer_kinds = ("full_attention", "conv")
    folder_tensors: ClassVar = Architecture.folder_tensors | {
        "blocks.N.attention_norm": "model.layers.N.operator_norm",
        "blocks.N.attention.q_norm": "model.layers.N.self_attn.q_layernorm",
        "blocks.N.attention.k_norm": "model.layers.N.self_attn.k_layernorm",
        "blocks.N.attention.output": "model.layers.N.self_attn.out_proj",
        "blocks.N.short_convolution_norm": "model.layers.N.operator_norm",
        "blocks.N.short_convolution.input": "model.layers.N.conv.in_proj",
        "blocks.N.short_convolution.filter": "model.layers.N.conv.conv",
        "blocks.N.short_convolution.output": "model.layers.N.conv.out_proj",
        "blocks.N.mlp_norm": "model.layers.N.ffn_norm",
        "blocks.N.mlp.gate_up": "model.layers.N.feed_forward.w{1,3}",
        "blocks.N.mlp.down": "model.layers.N.feed_forward.w2",
        "norm": "model.embedding_norm",
    }
    gguf_keys: ClassVar = {"shortconv.l_cache": ("uint32",)}
    gguf_tensors: ClassVar = Architecture.gguf_tensors | {
        "blocks.N.short_convolution_norm": "blk.N.attn_norm",
        "blocks.N.short_convolution.input": "blk.N.shortconv.in_proj",
        "blocks.N.short_convolution.filter": "blk.N.shortconv.conv",
        "blocks.N.short_convolution.output": "blk.N.shortconv.out_proj",
        "norm": "token_embd_norm",
    }

    def derive(self, keys: SimpleNamespace) -> None:
        """The names of the first files."""
        layers = range(keys.num_hidden_layers)
        if keys.layer_types is None:
            full = layers if keys.full_attn_idxs is None else keys.full_attn_idxs
            keys.layer_types = ["full_attention" if i in full else "conv" for i in layers]
        if keys.tie_embedding is not None:
            keys.tie_word_embeddings = keys.tie_embedding
        if keys.block_ff_dim is not None:
            keys.intermediate_size = keys.block_ff_dim

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        width = size("intermediate_size", keys.intermediate_size)
        if keys.block_auto_adjust_ff_dim:
            multiple = size("block_multiple_of", keys.block_multiple_of)
            width = int(keys.block_ffn_dim_multiplier * int(2 * width / 3))
            width = -(-width // multiple) * multiple
        mlp = usual.mlp(intermediate_size=width, activation="silu", bias=False)
        return self._attention_or_convolution(number, usual, keys), mlp

    def _attention_or_convolution(self, number: int, usual: Usual, keys: SimpleNamespace) -> Part:
        """The first part of a layer of a folder."""
        if keys.layer_types is None:
            raise SpecbeamError(f"config.json has no 'layer_types': it does not describe a {self.name} model")
        if keys.layer_types[number] == "full_attention":
            return usual.attention()
        if keys.conv_bias:
            raise Unsupported(f"conv_bias is not supported for {self.name}")
        return ShortConvolution(kernel_size=size("conv_L_cache", keys.conv_L_cache, MAX_KERNEL_SIZE))

    def refine_folder_config(self, config: Config, keys: SimpleNamespace) -> Config:
        return replace(config, norm_eps=keys.norm_eps)

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        kernel_size = metadata.need("shortconv.l_cache")
        has_attention = usual.attention.keywords["num_kv_heads"]
        return usual.attention() if has_attention else ShortConvolution(kernel_size=kernel_size), usual.mlp()


class LFM2MoE(LFM2):
    """LFM2-8B-A1B: experts in place of MLPs, but for the first layers. A bias takes part in the choice of experts."""

    name = "lfm2_moe"
    gguf_name = "lfm2moe"
    sizes = (65536, 2048, 32, 32)
    keys: ClassVar = {
        "conv_L_cache": (int, 3),
        "conv_bias": (bool, False),
        "intermediate_size": (int, 7168),
        "layer_types": (list[str] | None, None),
        "max_position_embeddings": (int, 128_000),
        "moe_intermediate_size": (int, 1792),
        "norm_eps": (float, 1e-5),
        "norm_topk_prob": (bool, True),
        "num_dense_layers": (int, 2),
        "num_experts": (int, 32),
        "num_experts_per_tok": (int, 4),
        "num_key_value_heads": (int, 8),
        "routed_scaling_factor": (float | int, 1.0),
        "tie_embedding": (bool, None),
        "tie_word_embeddings": (bool, True),
        "use_expert_bias": (bool, True),
    }
    experts: ClassVar = {"scoring": "sigmoid"}
    has_experts = True
    folder_tensors: ClassVar = LFM2.folder_tensors | {
        "blocks.N.experts_norm": "model.layers.N.ffn_norm",
        "blocks.N.experts.router": "model.layers.N.feed_forward.gate",
        "blocks.N.experts.selection_bias": "model.layers.N.feed_forward.expert_bias!",
        "blocks.N.experts.gate": "model.layers.N.feed_forward.experts.*.w1",
        "blocks.N.experts.up": "model.layers.N.feed_forward.experts.*.w3",
        "blocks.N.experts.down": "model.layers.N.feed_forward.experts.*.w2",
    }

    def derive(self, keys: SimpleNamespace) -> None:
        if keys.tie_embedding is not None:
            keys.tie_word_embeddings = keys.tie_embedding

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        attention = self._attention_or_convolution(number, usual, keys)
        if number < keys.num_dense_layers:
            return attention, usual.mlp(activation="silu", bias=False)
        experts = usual.experts(
            activation="silu",
            normalized=keys.norm_topk_prob,
            selection_bias=keys.use_expert_bias,
            weight_scale=float(keys.routed_scaling_factor),
        )
        return attention, experts

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        attention, mlp = super().gguf_layer(number, usual, metadata)
        metadata.require("expert_gating_func", SIGMOID)
        if number < metadata.need("leading_dense_block_count", 0):
            return attention, mlp
        has_bias = "exp_probs_b.bias" in metadata.in_layers
        return attention, usual.experts(normalized=True, selection_bias=has_bias)


ARCHITECTURES = (LFM2(), LFM2MoE())
