"""OLMo 2 and 3, and OLMoE. In OLMo 2 and 3, attention and MLP read the hidden states as they are, and their outputs are
normed.

GGUF files of both carry the name of OLMo 2. A file of OLMo 3 has a window.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

from specbeam.checkpoints.architecture import Architecture, Metadata, Usual, rope_parameters_by_kind
from specbeam.checkpoints.config import Layer
from specbeam.checkpoints.rope import Rope
from specbeam.errors import Unsupported

PERIOD = 4
"""Every how many layers one of OLMo 3 sees the whole text."""


class OLMo2(Architecture):
    """OLMo 2 (OLMo Team 2024). A norm goes over all queries of a node, and another one over all of its keys."""

    name = "olmo2"
    gguf_name: ClassVar[str | None] = "olmo2"
    tokenizer_class = "TokenizersBackend"
    keys: ClassVar = {
        "attention_bias": (bool, False),
        "hidden_act": (str, "silu"),
        "intermediate_size": (int, 11008),
        "num_key_value_heads": (int | None, None),
        "rms_norm_eps": (float, 1e-5),
    }
    attention: ClassVar = {"norm": False, "output_norm": True, "qk_norm": "all"}
    mlp: ClassVar = {"norm": False, "output_norm": True}
    folder_tensors: ClassVar = Architecture.folder_tensors | {
        "blocks.N.post_attention_norm": "model.layers.N.post_attention_layernorm",
        "blocks.N.post_mlp_norm": "model.layers.N.post_feedforward_layernorm",
    }

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        attention = usual.attention()
        if attention.rope is None or attention.window is None:
            return attention, usual.mlp()
        if metadata.slides(number, PERIOD):  # the scaling of the rotation is for the other layers alone
            theta = float(metadata.need("rope.freq_base_swa", attention.rope.theta))
            return replace(attention, rope=Rope(theta, attention.rope.dim)), usual.mlp()
        return replace(attention, window=None), usual.mlp()


class OLMo3(OLMo2):
    """OLMo 3 (OLMo Team 2025). Most layers have a window, and the scaling of the rotation is for the others alone."""

    name = "olmo3"
    gguf_name = None
    rope_theta = 500_000.0
    keys: ClassVar = OLMo2.keys | {
        "layer_types": (list[str] | None, None),
        "sliding_window": (int | None, 4096),
    }

    def derive(self, keys: SimpleNamespace) -> None:
        super().derive(keys)
        if keys.layer_types is None:
            kinds = ("full_attention", "sliding_attention")
            keys.layer_types = [kinds[(i + 1) % PERIOD != 0] for i in range(keys.num_hidden_layers)]

    def rope_parameters(self, keys: SimpleNamespace) -> dict[str, Any]:
        # transformers takes the key for the layers that see the whole text, and its default for the others.
        thetas = {"full_attention": getattr(keys, "rope_theta", self.rope_theta), "sliding_attention": self.rope_theta}
        return rope_parameters_by_kind(keys, thetas)


class OLMoE(Architecture):
    """OLMoE (Muennighoff et al. 2024). Norms go over all queries of a node, and over all of its keys."""

    name = "olmoe"
    gguf_name = "olmoe"
    gguf_keys: ClassVar = {"attention.clamp_kqv": ("float32",)}
    tokenizer_class = "GPTNeoXTokenizer"
    keys: ClassVar = {
        "attention_bias": (bool, False),
        "clip_qkv": (float | int | None, None),
        "hidden_act": (str, "silu"),
        "intermediate_size": (int, 2048),
        "max_position_embeddings": (int, 4096),
        "norm_topk_prob": (bool, False),
        "num_experts": (int, 64),
        "num_experts_per_tok": (int, 8),
        "num_key_value_heads": (int | None, None),
        "num_local_experts": (int, None),
        "rms_norm_eps": (float, 1e-5),
    }
    attention: ClassVar = {"qk_norm": "all"}
    has_experts = True

    def derive(self, keys: SimpleNamespace) -> None:
        super().derive(keys)
        if keys.num_local_experts is not None:  # the other name goes before, as in transformers
            keys.num_experts = keys.num_local_experts

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        if keys.clip_qkv is not None:
            raise Unsupported("clip_qkv is not supported for olmoe")
        return usual.attention(), usual.experts(normalized=keys.norm_topk_prob)

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        metadata.require("attention.clamp_kqv", 0)
        return usual.attention(), usual.experts()


ARCHITECTURES = (OLMo2(), OLMo3(), OLMoE())
