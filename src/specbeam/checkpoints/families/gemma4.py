"""Gemma 4 (Gemma Team 2026): the text models E2B, E4B, 12B, 26B-A4B and 31B.

Layers that see the whole text have heads of another size than layers with a window. The last layers may read the keys
and values of earlier ones, and each layer may have embeddings of tokens of its own (E2B, E4B). Layers may have experts
beside their MLP (26B-A4B), whose outputs are normed apart and together.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

from specbeam.checkpoints.architecture import Architecture, Metadata, Usual, standardized
from specbeam.checkpoints.config import Config, Layer
from specbeam.checkpoints.parts.attention import MAX_HEAD_DIM, Attention
from specbeam.checkpoints.parts.mlp import MLP
from specbeam.checkpoints.parts.part import size
from specbeam.checkpoints.parts.per_layer_embedding import PerLayerEmbedding
from specbeam.checkpoints.rope import Rope
from specbeam.checkpoints.stems import TokenStem
from specbeam.errors import SpecbeamError, Unsupported

logger = logging.getLogger("specbeam")

FULL, SLIDING = "full_attention", "sliding_attention"
PERIOD = 6
"""Every how many layers one sees the whole text, where a config.json does not list them."""
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
CHANGED = ("head_dim", "num_key_value_heads")
"""What differs between layers, in files of transformers 5 by ``per_layer_config``."""
NOT_GIVEN = ...
"""In place of ``per_layer_config`` where a config.json lacks it. Then other keys count."""
OF_EXPERTS = ("enable_moe_block", "moe_intermediate_size", "num_experts", "top_k_experts")
ABSENT = (*OF_EXPERTS, "hidden_size_per_layer_input", "vocab_size_per_layer_input")
"""Keys that folders of 12B lack."""
UNUSED_KEYS = tuple(f"self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm", "v_norm"))
"""Tensors that files may have for layers without keys and values of their own."""


class Gemma4(Architecture):
    """Gemma 4 E2B, E4B, 26B-A4B and 31B. Norms have their weights as they are, and not less 1 as in Gemma 2 and 3."""

    name: ClassVar[str] = "gemma4_text"
    gguf_name: ClassVar[str | None] = "gemma4"
    sizes = (262_144, 2304, 30, 8)
    keys: ClassVar = {
        "attention_bias": (bool, False),
        "attention_k_eq_v": (bool, False),
        "enable_moe_block": (bool, False),
        "final_logit_softcapping": (float | None, None),
        "global_head_dim": (object, 512),
        "head_dim": (int, 256),
        "hidden_activation": (str, "gelu_pytorch_tanh"),
        "hidden_size_per_layer_input": (int, 256),
        "intermediate_size": (int, 9216),
        "layer_types": (list[str] | None, None),
        "max_position_embeddings": (int, 131072),
        "moe_intermediate_size": (int | None, None),
        "num_experts": (int | None, None),
        "num_global_key_value_heads": (object, None),
        "num_key_value_heads": (int, 4),
        "num_kv_shared_layers": (int, 0),
        "per_layer_config": (dict | None, NOT_GIVEN),
        "rms_norm_eps": (float, 1e-6),
        "rope_scaling": (dict | None, None),
        "sliding_window": (int, 512),
        "tie_word_embeddings": (bool, True),
        "top_k_experts": (int | None, None),
        "use_bidirectional_attention": (str | None, None),
        "use_double_wide_mlp": (bool, False),
        "vocab_size_per_layer_input": (int, 262_144),
    }
    attention: ClassVar = {"output_norm": True, "qk_norm": "head", "value_norm": True, "scale": 1.0}
    mlp: ClassVar = {"activation": "gelu_tanh", "output_norm": True}
    experts: ClassVar = {
        **{"activation": "gelu_tanh", "norm": False, "own_norms": True, "output_norm": True},
        **{"normalized": True, "expert_scale": True},
    }
    shared_expert: ClassVar = {"norm": True, "output_norm": True, "joint_norm": True}
    has_experts = True
    has_heads_by_kind = True
    allowed_flags: ClassVar = {"use_bidirectional_attention": ("vision",)}  # of pictures alone
    folder_tensors: ClassVar = Architecture.folder_tensors | {
        "per_layer_embedding": "model.embed_tokens_per_layer",
        "per_layer_projection": "model.per_layer_model_projection",
        "per_layer_norm": "model.per_layer_projection_norm",
        "blocks.N.attention.query_key": "model.layers.N.self_attn.{q,k}_proj",
        "blocks.N.attention.query": "model.layers.N.self_attn.q_proj",
        "blocks.N.post_attention_norm": "model.layers.N.post_attention_layernorm",
        "blocks.N.mlp_norm": "model.layers.N.pre_feedforward_layernorm",
        "blocks.N.post_mlp_norm": "model.layers.N.post_feedforward_layernorm",
        "blocks.N.mlp_sum_scale": "model.layers.N.layer_scalar!",
        "blocks.N.experts.router_norm": "model.layers.N.router.scale!",
        "blocks.N.experts.input_norm": "model.layers.N.pre_feedforward_layernorm_2",
        "blocks.N.experts.router": "model.layers.N.router.proj",
        "blocks.N.experts.expert_scale": "model.layers.N.router.per_expert_scale!",
        "blocks.N.experts.gate": "model.layers.N.experts.gate_proj",
        "blocks.N.experts.up": "model.layers.N.experts.up_proj",
        "blocks.N.experts.down": "model.layers.N.experts.down_proj",
        "blocks.N.post_experts_norm": "model.layers.N.post_feedforward_layernorm_2",
        "blocks.N.shared_expert_norm": "model.layers.N.pre_feedforward_layernorm",
        "blocks.N.shared_expert.gate_up": "model.layers.N.mlp.{gate,up}_proj",
        "blocks.N.shared_expert.down": "model.layers.N.mlp.down_proj",
        "blocks.N.post_shared_expert_norm": "model.layers.N.post_feedforward_layernorm_1",
        "blocks.N.shared_expert_joint_norm": "model.layers.N.post_feedforward_layernorm",
        "blocks.N.shared_expert_sum_scale": "model.layers.N.layer_scalar!",
        "blocks.N.per_layer_embedding.gate": "model.layers.N.per_layer_input_gate",
        "blocks.N.per_layer_embedding.projection": "model.layers.N.per_layer_projection",
        "blocks.N.post_per_layer_embedding_norm": "model.layers.N.post_per_layer_input_norm",
        "blocks.N.per_layer_embedding_sum_scale": "model.layers.N.layer_scalar!",
    }
    folder_ignored: ClassVar = (*Architecture.folder_ignored, *UNUSED_KEYS)
    gguf_keys: ClassVar = {
        **dict.fromkeys(("attention.shared_kv_layers", "embedding_length_per_layer_input"), ("uint32",)),
    }
    gguf_tensors: ClassVar = Architecture.gguf_tensors | {
        "per_layer_embedding": "per_layer_token_embd",
        "per_layer_projection": "per_layer_model_proj",
        "per_layer_norm": "per_layer_proj_norm",
        "blocks.N.attention.query_key": "blk.N.attn_{q,k}",
        "blocks.N.attention.query": "blk.N.attn_q",
        "blocks.N.mlp_sum_scale": "blk.N.layer_output_scale",
        "blocks.N.experts.router_norm": "blk.N.ffn_gate_inp.scale!",
        "blocks.N.experts.input_norm": "blk.N.pre_ffw_norm_2",
        "blocks.N.experts.expert_scale": "blk.N.ffn_down_exps.scale!",
        "blocks.N.post_experts_norm": "blk.N.post_ffw_norm_2",
        "blocks.N.shared_expert_norm": "blk.N.ffn_norm",
        "blocks.N.shared_expert.gate_up": "blk.N.ffn_{gate,up}",
        "blocks.N.shared_expert.down": "blk.N.ffn_down",
        "blocks.N.post_shared_expert_norm": "blk.N.post_ffw_norm_1",
        "blocks.N.shared_expert_joint_norm": "blk.N.post_ffw_norm",
        "blocks.N.shared_expert_sum_scale": "blk.N.layer_output_scale",
        "blocks.N.per_layer_embedding.gate": "blk.N.inp_gate",
        "blocks.N.per_layer_embedding.projection": "blk.N.proj",
        "blocks.N.post_per_layer_embedding_norm": "blk.N.post_norm",
        "blocks.N.per_layer_embedding_sum_scale": "blk.N.layer_output_scale",
    }
    gguf_ignored: ClassVar = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")

    def derive(self, keys: SimpleNamespace) -> None:
        if keys.use_bidirectional_attention not in (None, "all", "vision"):
            raise SpecbeamError(f"config.json says use_bidirectional_attention = {keys.use_bidirectional_attention!r}")
        if keys.layer_types is None:
            keys.layer_types = [FULL if (i + 1) % PERIOD == 0 else SLIDING for i in range(keys.num_hidden_layers)]
        if keys.layer_types and keys.layer_types[-1] != FULL:
            logger.warning("the last layer of config.json is made one that sees the whole text, as in transformers")
            keys.layer_types = [*keys.layer_types[:-1], FULL]
        usual = {"head_dim": keys.head_dim, "num_key_value_heads": keys.num_key_value_heads}
        own = self._changed_layers(keys)
        keys.per_layer_config = [SimpleNamespace(**usual | own.get(i, {})) for i in range(len(keys.layer_types))]

    def _changed_layers(self, keys: SimpleNamespace) -> dict[int, dict[str, Any]]:
        """The layers of a folder with other heads than its keys say, by their numbers. transformers 5 lists them."""
        if keys.per_layer_config is not NOT_GIVEN:
            own = {int(number): dict(changes) for number, changes in (keys.per_layer_config or {}).items()}
            if any(not 0 <= number < keys.num_hidden_layers for number in own):
                raise SpecbeamError("per_layer_config of config.json is about layers that the model lacks")
            if unknown := sorted({key for changes in own.values() for key in changes} - {*CHANGED}):
                raise Unsupported(f"per_layer_config of config.json changes {unknown[0]}, which is not supported")
            return own
        changes = {"head_dim": keys.global_head_dim}
        if keys.attention_k_eq_v and keys.num_global_key_value_heads is not None:
            changes["num_key_value_heads"] = keys.num_global_key_value_heads
        return {i: changes for i, kind in enumerate(keys.layer_types) if kind == FULL}

    def rope_parameters(self, keys: SimpleNamespace) -> dict[str, Any]:
        if keys.rope_parameters is None:
            keys.rope_parameters = {kind: {**rope} for kind, rope in ROPES.items()}
        return standardized(keys)

    def folder_head_dim(self, number: int, usual: int, keys: SimpleNamespace) -> int:
        head_dim: int = keys.per_layer_config[number].head_dim
        return head_dim

    def per_layer_size(self, keys: SimpleNamespace) -> int:
        """The size of the embeddings that the layers of a folder have of their own; 0 for none."""
        if keys.hidden_size_per_layer_input and keys.vocab_size_per_layer_input != keys.vocab_size:
            raise SpecbeamError(
                f"config.json says vocab_size_per_layer_input = {keys.vocab_size_per_layer_input} and vocab_size = "
                f"{keys.vocab_size}: both must be equal"
            )
        size_of_folder: int = keys.hidden_size_per_layer_input
        return size_of_folder

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        kinds, kind = keys.layer_types, keys.layer_types[number]
        source = source_of(number, kinds, len(kinds) - keys.num_kv_shared_layers, "num_kv_shared_layers")
        attention = usual.attention(
            num_kv_heads=keys.per_layer_config[number].num_key_value_heads,
            keys_are_values=keys.attention_k_eq_v and kind == FULL and source is None,
            shares_keys_of=source,
        )
        if not isinstance(rope := keys.rope_parameters.get(kind), dict):
            raise SpecbeamError(f"rope_parameters of config.json has none for layers of kind {kind!r}")
        if rope.get("rope_type", "default") == "default":  # of the whole head, whatever else it says
            theta = float(rope.get("rope_theta", 10_000.0))
            attention = replace(attention, rope=Rope(theta, attention.head_dim))
        mlp = usual.mlp()
        if keys.use_double_wide_mlp and source is not None:
            mlp = replace(mlp, intermediate_size=2 * mlp.intermediate_size)
        feed_forward: Layer = (mlp,)
        if getattr(keys, "enable_moe_block", False):
            fields = {"router_scale": keys.hidden_size**-0.5, "experts_per_token": keys.top_k_experts}
            feed_forward = usual.experts(**fields), usual.shared_expert(intermediate_size=mlp.intermediate_size)
        return layer_of(attention, feed_forward, self.per_layer_size(keys), scaled=True)

    def refine_folder_config(self, config: Config, keys: SimpleNamespace) -> Config:
        return replace(config, stem=stem_of(config), logits_softcap=keys.final_logit_softcapping)

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        depth, slides = metadata.need("block_count"), metadata.need("attention.sliding_window_pattern")
        if not isinstance(slides, list):
            slides = [(i + 1) % size("attention.sliding_window_pattern", slides) != 0 for i in range(depth)]
        metadata.of_layer(number, "attention.sliding_window_pattern")  # has as many values as there are layers
        shared = metadata.need("attention.shared_kv_layers", 0)
        source = source_of(
            number, [SLIDING if one else FULL for one in slides], depth - shared, "attention.shared_kv_layers"
        )
        attention = usual.attention(
            shares_keys_of=source,
            keys_are_values=source is None and f"blk.{number}.attn_v.weight" not in metadata.tensors,
        )
        attention = self._sliding(attention, metadata) if slides[number] else self._full(attention)
        per_layer = metadata.need("embedding_length_per_layer_input")
        mlp = usual.mlp()
        feed_forward: Layer = (mlp,)
        if f"blk.{number}.ffn_gate_inp.weight" in metadata.tensors:
            has_scale = "ffn_down_exps.scale" in metadata.in_layers
            router_scale = metadata.need("embedding_length") ** -0.5
            feed_forward = (
                usual.experts(router_scale=router_scale, expert_scale=has_scale),
                usual.shared_expert(intermediate_size=mlp.intermediate_size, activation=mlp.activation),
            )
        return layer_of(attention, feed_forward, per_layer, "layer_output_scale.weight" in metadata.in_layers)

    def _full(self, attention: Attention) -> Attention:
        if attention.rope is None or attention.rope.divisors is None:
            raise SpecbeamError("the GGUF file has no tensor rope_freqs.weight: it is not a complete gemma4 model")
        return replace(attention, window=None)

    def _sliding(self, attention: Attention, metadata: Metadata) -> Attention:
        head_dim = size("attention.key_length_swa", metadata.need("attention.key_length_swa"), MAX_HEAD_DIM)
        metadata.require("attention.value_length_swa", head_dim)
        rotated = size("rope.dimension_count_swa", metadata.need("rope.dimension_count_swa", head_dim), MAX_HEAD_DIM)
        theta = float(metadata.need("rope.freq_base_swa", 10_000.0))
        window = metadata.need("attention.sliding_window")
        return replace(attention, head_dim=head_dim, rope=Rope(theta, rotated), window=window)

    def refine_gguf_config(self, config: Config, metadata: Metadata) -> Config:
        cap = float(metadata.need("final_logit_softcapping", 30.0))
        return replace(config, stem=stem_of(config), logits_softcap=cap or None)


def source_of(number: int, kinds: Sequence[str], first: int, key: str) -> int | None:
    """The layer whose keys and values a layer reads; None if it has its own.

    Args:
        first: the first layer without its own.
        key: says how many such layers there are.
    """
    if not 0 <= first <= len(kinds):
        raise SpecbeamError(f"{key} is {len(kinds) - first}, but the model has {len(kinds)} layers")
    if number < first:
        return None
    source = next((i for i in reversed(range(first)) if kinds[i] == kinds[number]), None)
    if source is None:
        raise SpecbeamError(
            f"layer {number} has no keys of its own ({key} = {len(kinds) - first}), and no layer of its kind before "
            f"layer {first} has any"
        )
    return source


def layer_of(attention: Attention, feed_forward: Layer, per_layer_size: int, scaled: bool) -> Layer:
    """The parts of a layer. Its last part ends with the layer's scale.

    Args:
        feed_forward: an MLP, or experts and the MLP beside them.
    """
    *others, mlp = feed_forward
    if not per_layer_size:
        return attention, *others, replace(mlp, sum_scale=scaled)
    assert isinstance(mlp, MLP)
    about = {"norm": False, "output_norm": True, "sum_scale": scaled}
    return attention, *feed_forward, PerLayerEmbedding(size=per_layer_size, activation=mlp.activation, **about)


def stem_of(config: Config) -> TokenStem:
    """Embeddings are scaled."""
    return TokenStem(scale=config.hidden_size**0.5)


class Gemma4Unified(Gemma4):
    """The text model of Gemma 4 12B. Its folders have no keys of experts and of layers' own embeddings."""

    name = "gemma4_unified_text"
    gguf_name = None
    keys: ClassVar = {
        **{key: kind for key, kind in Gemma4.keys.items() if key not in ABSENT},
        "max_position_embeddings": (int, 262_144),
        "sliding_window": (int, 1024),
        "use_bidirectional_attention": (str | None, "vision"),
    }

    def per_layer_size(self, keys: SimpleNamespace) -> int:
        return 0


ARCHITECTURES = (Gemma4(), Gemma4Unified())
