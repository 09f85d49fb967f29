"""gpt-oss (OpenAI 2025). Experts with a clamped activation, and attention with sinks. Every other layer has a window.

The published weights of the experts are MXFP4. A folder stacks the experts, and gate and up alternate there.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

from specbeam.checkpoints.architecture import Architecture, Metadata, Usual
from specbeam.checkpoints.config import Layer

PERIOD = 2
"""Every how many layers one sees the whole text."""
ALPHA, LIMIT = 1.702, 7.0
"""Of the clamped activation, where config.json does not say otherwise. GGUF files never do."""


class GptOss(Architecture):
    """gpt-oss 20b and 120b."""

    name = "gpt_oss"
    gguf_name = "gpt-oss"
    rope_theta = 150_000.0
    yarn_truncated = False
    keys: ClassVar = {
        "attention_bias": (bool, True),
        "head_dim": (int | None, 64),
        "hidden_act": (str, "silu"),
        "intermediate_size": (int, 2880),
        "layer_types": (list[str] | None, None),
        "max_position_embeddings": (int, 131_072),
        "num_experts": (int, None),
        "num_experts_per_tok": (int, 4),
        "num_key_value_heads": (int | None, 8),
        "num_local_experts": (int, 128),
        "rms_norm_eps": (float, 1e-5),
        "sliding_window": (int | None, 128),
        "swiglu_alpha": (float, ALPHA),
        "swiglu_limit": (float, LIMIT),
    }
    attention: ClassVar = {"sinks": True}
    experts: ClassVar = {"normalized": True, "router_bias": True, "bias": True}
    has_experts = True
    folder_tensors: ClassVar = Architecture.folder_tensors | {
        "blocks.N.attention.sinks": "model.layers.N.self_attn.sinks!",
        "blocks.N.experts.router": "model.layers.N.mlp.router",
    }
    experts_transposed = True
    gguf_tensors: ClassVar = Architecture.gguf_tensors | {
        "blocks.N.attention.sinks": "blk.N.attn_sinks",
        "blocks.N.experts_norm": "blk.N.post_attention_norm",
    }

    def derive(self, keys: SimpleNamespace) -> None:
        super().derive(keys)
        if keys.layer_types is None:
            kinds = ("full_attention", "sliding_attention")
            keys.layer_types = [kinds[(i + 1) % PERIOD != 0] for i in range(keys.num_hidden_layers)]
        if keys.rope_parameters is None and getattr(keys, "rope_scaling", None) is None:
            keys.rope_parameters = {
                **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
                "original_max_position_embeddings": 4096,
            }

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        return usual.attention(), usual.experts(swiglu_alpha=keys.swiglu_alpha, swiglu_limit=keys.swiglu_limit)

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        slides = metadata.slides(number, PERIOD)
        attention = usual.attention() if slides else usual.attention(window=None)
        return attention, usual.experts(swiglu_alpha=ALPHA, swiglu_limit=LIMIT)


ARCHITECTURES = (GptOss(),)
