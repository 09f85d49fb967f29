"""Gemma 2 and 3. They add norms after attention and MLP, scaled embeddings, and a few layers that see the whole text.

A folder stores norm weights less 1. GGUF files leave out which layers see the whole text, and the attention scale of
the largest model. Both follow llama.cpp here.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.architecture import (
    Architecture,
    Metadata,
    Usual,
    require_whole_heads,
    rope_parameters_by_kind,
)
from specbeam.checkpoints.config import Config, Layer
from specbeam.checkpoints.parts.attention import Attention
from specbeam.checkpoints.rope import Rope
from specbeam.checkpoints.stems import TokenStem

logger = logging.getLogger("specbeam")


class Gemma(Architecture):
    """The features that Gemma 2 and Gemma 3 share.

    Attributes:
        global_layer_period: the last layer of each group of this size sees the whole text. The other layers slide.
        largest_depth: the number of layers of the largest model. Its attention is scaled by hidden_size / num_heads.
    """

    attention: ClassVar = {"output_norm": True}
    mlp: ClassVar = {"activation": "gelu_tanh", "output_norm": True}
    folder_tensors: ClassVar = Architecture.folder_tensors | {
        "blocks.N.post_attention_norm": "model.layers.N.post_attention_layernorm",
        "blocks.N.mlp_norm": "model.layers.N.pre_feedforward_layernorm",
        "blocks.N.post_mlp_norm": "model.layers.N.post_feedforward_layernorm",
    }
    keys: ClassVar = {
        "attention_bias": (bool, False),
        "attn_logit_softcapping": (float | None, None),
        "final_logit_softcapping": (float | None, None),
        "head_dim": (int, 256),
        "hidden_activation": (str, "gelu_pytorch_tanh"),
        "intermediate_size": (int, 9216),
        "layer_types": (list[str] | None, None),
        "max_position_embeddings": (int, 131072),
        "num_key_value_heads": (int, 4),
        "query_pre_attn_scalar": (int, 256),
        "rms_norm_eps": (float, 1e-6),
        "sliding_window": (int | None, 4096),
        "tie_word_embeddings": (bool, True),
        "use_bidirectional_attention": (bool | None, False),
    }
    global_layer_period: int
    largest_depth: int

    def derive(self, keys: SimpleNamespace) -> None:
        if keys.layer_types is None:
            period = self.period(keys)
            kinds = ("full_attention", "sliding_attention")
            keys.layer_types = [kinds[(i + 1) % period != 0] for i in range(keys.num_hidden_layers)]
        require_whole_heads(keys)

    def period(self, keys: SimpleNamespace) -> int:
        """Every how many layers one sees the whole text, by a config.json."""
        return self.global_layer_period

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        scalar = keys.query_pre_attn_scalar
        scaled_by = usual.attention.keywords["head_dim"] if scalar is None else scalar
        return usual.attention(scale=float(scaled_by) ** -0.5), usual.mlp()

    def refine_folder_config(self, config: Config, keys: SimpleNamespace) -> Config:
        return replace(config, stem=_scaled(config), logits_softcap=keys.final_logit_softcapping)

    def folder_values(self, source: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
        return values + np.float32(1) if source.endswith("norm.weight") else values

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        attention = usual.attention()
        if metadata.need("block_count") == self.largest_depth:
            attention = replace(attention, scale=(metadata.need("embedding_length") // attention.num_heads) ** -0.5)
        slides = metadata.slides(number, self.global_layer_period)
        return self.sliding(attention, metadata) if slides else replace(attention, window=None), usual.mlp()

    def sliding(self, attention: Attention, metadata: Metadata) -> Attention:
        """The attention of a sliding layer of a GGUF file, by the one that the keys of all architectures describe."""
        raise NotImplementedError

    def refine_gguf_config(self, config: Config, metadata: Metadata) -> Config:
        return replace(config, stem=_scaled(config))


def _scaled(config: Config) -> TokenStem:
    return TokenStem(scale=config.hidden_size**0.5)


def _capped(usual: Usual, softcap: float | None) -> Usual:
    return usual._replace(attention=partial(usual.attention, softcap=softcap))


class Gemma2(Gemma):
    """Gemma 2 (Gemma Team 2024). It caps the logits of the attention and of the tokens."""

    name = "gemma2"
    gguf_name = "gemma2"
    tokenizer_class = "GemmaTokenizer"
    keys: ClassVar = Gemma.keys | {
        "attn_logit_softcapping": (float | None, 50.0),
        "final_logit_softcapping": (float | None, 30.0),
        "max_position_embeddings": (int, 8192),
    }
    global_layer_period = 2
    largest_depth = 46

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        return super().folder_layer(number, _capped(usual, keys.attn_logit_softcapping), keys)

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        softcap = float(metadata.need("attn_logit_softcapping", 50.0))
        return super().gguf_layer(number, _capped(usual, softcap), metadata)

    def sliding(self, attention: Attention, metadata: Metadata) -> Attention:
        window, rope = metadata.need("attention.sliding_window", 4096), attention.rope
        if rope is not None and (theta := metadata.need("rope.freq_base_swa", None)) is not None:
            rope = replace(rope, theta=float(theta))
        return replace(attention, rope=rope, window=window)

    def refine_gguf_config(self, config: Config, metadata: Metadata) -> Config:
        softcap = float(metadata.need("final_logit_softcapping", 30.0))
        return replace(super().refine_gguf_config(config, metadata), logits_softcap=softcap)


class Gemma3(Gemma):
    """The text model of Gemma 3 (Gemma Team 2025). Its sliding layers rotate with frequencies of their own.

    Neither transformers nor llama.cpp applies the key ``attn_logit_softcapping`` to it.
    """

    name = "gemma3_text"
    gguf_name = "gemma3"
    tokenizer_class = "GemmaTokenizer"
    sizes = (262208, 2304, 26, 8)
    attention: ClassVar = Gemma.attention | {"qk_norm": "head"}
    rope_theta, local_theta = 1_000_000.0, 10_000.0
    global_layer_period = 6
    largest_depth = 62

    def period(self, keys: SimpleNamespace) -> int:
        return int(getattr(keys, "sliding_window_pattern", self.global_layer_period))

    def rope_parameters(self, keys: SimpleNamespace) -> dict[str, Any]:
        thetas = {
            "full_attention": getattr(keys, "rope_theta", self.rope_theta),
            "sliding_attention": getattr(keys, "rope_local_base_freq", self.local_theta),
        }
        return rope_parameters_by_kind(keys, thetas)

    def refine_folder_config(self, config: Config, keys: SimpleNamespace) -> Config:
        if keys.attn_logit_softcapping is not None:
            logger.warning("attn_logit_softcapping in config.json has no effect on Gemma 3, as in transformers")
        return super().refine_folder_config(config, keys)

    def refine_gguf_config(self, config: Config, metadata: Metadata) -> Config:
        cap = float(metadata.need("final_logit_softcapping", 0.0))
        return replace(super().refine_gguf_config(config, metadata), logits_softcap=cap or None)

    def sliding(self, attention: Attention, metadata: Metadata) -> Attention:
        theta = float(metadata.need("rope.freq_base_swa", 10000.0))
        if attention.rope is None or attention.window is None:  # a file without a window has layers of one kind
            return attention
        return replace(attention, rope=Rope(theta, attention.rope.dim))


ARCHITECTURES = (Gemma2(), Gemma3())
