"""Hunyuan's dense models (Tencent 2025), of which Hy-MT translates. Queries and keys are normed after the rotation.

A fixed factor ``alpha`` stretches the base of the rotation, though config.json calls that scaling "dynamic". GGUF files
have the stretched base.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

from specbeam.checkpoints.architecture import Architecture, Metadata, Usual, rope_parameters
from specbeam.checkpoints.config import Layer
from specbeam.errors import SpecbeamError
from specbeam.system.numbers import is_real


class Hunyuan(Architecture):
    """Hunyuan 0.5B to 7B, Hunyuan-MT and Hy-MT 1.5."""

    name = "hunyuan_v1_dense"
    gguf_name = "hunyuan-dense"
    attention: ClassVar = {"qk_norm": "rotated_head"}
    keys: ClassVar = {
        "attention_bias": (bool, False),
        "head_dim": (int | None, None),
        "hidden_act": (str, "silu"),
        "intermediate_size": (int, 11008),
        "num_key_value_heads": (int | None, None),
        "rms_norm_eps": (float, 1e-5),
    }
    folder_tensors: ClassVar = Architecture.folder_tensors | {
        "blocks.N.attention.q_norm": "model.layers.N.self_attn.query_layernorm",
        "blocks.N.attention.k_norm": "model.layers.N.self_attn.key_layernorm",
    }
    gguf_keys: ClassVar = {"rope.scaling.alpha": ("float32",)}

    def rope_parameters(self, keys: SimpleNamespace) -> dict[str, Any]:
        ropes = rope_parameters(keys, self.rope_theta)
        alpha = ropes.get("alpha")
        if ropes["rope_type"] != "dynamic" or not alpha:
            return ropes
        head_dim = keys.head_dim or keys.hidden_size // keys.num_attention_heads
        if not is_real(alpha) or alpha <= 0:
            raise SpecbeamError(f"config.json says alpha = {str(alpha)[:80]!r} for its rotation: it must be over 0")
        return {"rope_type": "default", "rope_theta": stretched(ropes["rope_theta"], alpha, head_dim)}

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        attention, alpha = usual.attention(), float(metadata.need("rope.scaling.alpha", 0.0))
        if alpha > 0 and attention.rope is not None:
            theta = stretched(attention.rope.theta, alpha, attention.head_dim)
            attention = replace(attention, rope=replace(attention.rope, theta=theta))
        return attention, usual.mlp()


def stretched(theta: float, alpha: float, head_dim: int) -> float:
    """The base of NTK-aware scaling (bloc97 2023), which stretches the lowest frequency by ``alpha``."""
    if head_dim < 4:
        raise SpecbeamError(f"the model's configuration scales the rotation of heads of {head_dim} features")
    return float(theta * alpha ** (head_dim / (head_dim - 2)))


ARCHITECTURES = (Hunyuan(),)
