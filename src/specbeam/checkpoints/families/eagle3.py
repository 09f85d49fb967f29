"""EAGLE-3 heads (Li et al. 2025): one layer that drafts for a model from hidden states of three of its layers.

A folder holds the head alone, as published with ``LlamaForCausalLMEagle3`` in its config.json. Its ``model_type`` is
that of Llama, so the class decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

from specbeam.checkpoints.architecture import Architecture, Usual
from specbeam.checkpoints.config import Config, Layer
from specbeam.checkpoints.families.llama import Llama
from specbeam.checkpoints.parts.part import size
from specbeam.checkpoints.stems import FeatureStem
from specbeam.errors import SpecbeamError, Unsupported

LAYERS = "eagle_aux_hidden_state_layer_ids"
"""The key that says which hidden states a head reads. It may lie in ``eagle_config``."""
NUM_LAYERS_READ = 3
UNSUPPORTED = ("norm_before_residual", "norm_before_fc")
"""Keys of variants that compute something else where they are true."""


class Eagle3(Architecture):
    """EAGLE-3 with a layer of Llama."""

    name = "eagle3"
    gguf_name = None
    keys: ClassVar = Llama.keys | {
        "draft_vocab_size": (int | None, None),
        "eagle_config": (dict | None, None),
        "num_hidden_layers": (int, 1),
        "target_hidden_size": (int | None, None),
        LAYERS: (list[int] | None, None),
    }
    folder_tensors: ClassVar = {
        "fc": "fc",
        "embedding": "embed_tokens",
        "embedding_norm": "midlayer.input_layernorm",
        "blocks.N.attention_norm": "midlayer.hidden_norm",
        "blocks.N.attention.qkv": "midlayer.self_attn.{q,k,v}_proj",
        "blocks.N.attention.output": "midlayer.self_attn.o_proj",
        "blocks.N.mlp_norm": "midlayer.post_attention_layernorm",
        "blocks.N.mlp.gate_up": "midlayer.mlp.{gate,up}_proj",
        "blocks.N.mlp.down": "midlayer.mlp.down_proj",
        "norm": "norm",
        "head": "lm_head",
    }

    folder_renamed: ClassVar = {"layers.0.": "midlayer."}

    def derive(self, keys: SimpleNamespace) -> None:
        super().derive(keys)
        if keys.num_hidden_layers != 1:
            raise Unsupported(f"EAGLE-3 heads with {keys.num_hidden_layers} layers are not supported: they have one")
        for key in UNSUPPORTED:
            if getattr(keys, key, False):
                raise Unsupported(f"EAGLE-3 heads with {key} in config.json are not supported")
        keys.tie_word_embeddings = False

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        return usual.attention(beside_embedding=True), usual.mlp()

    def refine_folder_config(self, config: Config, keys: SimpleNamespace) -> Config:
        layers = getattr(keys, LAYERS) or (keys.eagle_config or {}).get(LAYERS) or None
        if layers is not None and (len(layers) != NUM_LAYERS_READ or not all(isinstance(one, int) for one in layers)):
            raise SpecbeamError(f"config.json says {LAYERS} = {layers}, which are not {NUM_LAYERS_READ} layers")
        stem = FeatureStem(
            layers=None if layers is None else tuple(layers),
            feature_size=NUM_LAYERS_READ * size("target_hidden_size", keys.target_hidden_size or keys.hidden_size),
            joins_embedding=False,
        )
        head_size = size("draft_vocab_size", keys.draft_vocab_size or keys.vocab_size, config.vocab_size)
        return replace(config, stem=stem, head_size=head_size if head_size < config.vocab_size else None)


def is_eagle3(content: Mapping[str, Any]) -> bool:
    """Whether a config.json describes an EAGLE-3 head."""
    names = content.get("architectures")
    return isinstance(names, list) and any(isinstance(name, str) and "Eagle3" in name for name in names)


ARCHITECTURES = (Eagle3(),)
