"""Qwen3.5 without experts (Qwen 2026). Most layers have a Gated DeltaNet, and others a gated attention.

GGUF files list the value heads in another order, so that value head h has key head h % num_key_heads. Behind the layers
they have a block that predicts further tokens (``nextn_predict_layers``; :mod:`specbeam.checkpoints.heads`). Folders
have it apart, as ``mtp``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.architecture import Architecture, Metadata, Usual
from specbeam.checkpoints.config import Layer
from specbeam.checkpoints.parts.attention import Attention
from specbeam.checkpoints.parts.gated_delta_net import GatedDeltaNet
from specbeam.checkpoints.parts.part import Part, size
from specbeam.errors import SpecbeamError, Unsupported

FULL, LINEAR = "full_attention", "linear_attention"
NORMS = ("norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
"""Ends of the names of norms in folders. The last two are of the head for multi-token prediction."""
PERIOD = 4
"""Every how many layers one has attention, unless a file says otherwise."""


class Qwen35(Architecture):
    """The text model, alone or in a model that also reads images."""

    name = "qwen3_5_text"
    gguf_name = "qwen35"
    tokenizer_class = "Qwen3_5Tokenizer"
    turn_end = "<|im_end|>"
    sizes = (248320, 4096, 32, 16)
    keys: ClassVar = {
        "attention_bias": (bool, False),
        "full_attention_interval": (int, PERIOD),
        "head_dim": (int, 256),
        "hidden_act": (str, "silu"),
        "intermediate_size": (int, 12288),
        "layer_types": (list[str] | None, None),
        "linear_conv_kernel_dim": (int, 4),
        "linear_key_head_dim": (int, 128),
        "linear_num_key_heads": (int, 16),
        "linear_num_value_heads": (int, 32),
        "linear_value_head_dim": (int, 128),
        "max_position_embeddings": (int, 32768),
        "num_key_value_heads": (int, 4),
        "partial_rotary_factor": (float | int, 0.25),
        "rms_norm_eps": (float, 1e-6),
    }
    attention: ClassVar = {"qk_norm": "head", "output_gate": True}
    layer_kinds = (FULL, LINEAR)
    folder_tensors: ClassVar = Architecture.folder_tensors | {
        "blocks.N.gated_delta_net_norm": "model.layers.N.input_layernorm",
        "blocks.N.gated_delta_net.input": "model.layers.N.linear_attn.in_proj_{qkv,z}",
        "blocks.N.gated_delta_net.rates": "model.layers.N.linear_attn.in_proj_{b,a}",
        "blocks.N.gated_delta_net.filter": "model.layers.N.linear_attn.conv1d",
        "blocks.N.gated_delta_net.decay": "model.layers.N.linear_attn.A_log!",
        "blocks.N.gated_delta_net.step": "model.layers.N.linear_attn.dt_bias!",
        "blocks.N.gated_delta_net.norm": "model.layers.N.linear_attn.norm",
        "blocks.N.gated_delta_net.output": "model.layers.N.linear_attn.out_proj",
    }
    gguf_keys: ClassVar = {
        **dict.fromkeys(("ssm.conv_kernel", "ssm.group_count", "ssm.inner_size", "ssm.state_size"), ("uint32",)),
        **dict.fromkeys(("ssm.time_step_rank", "full_attention_interval"), ("uint32",)),
        "attention.recurrent_layers": ("[bool]", "[uint32]", "[int32]"),
        "rope.dimension_sections": ("[int32]", "[uint32]"),
    }
    gguf_tensors: ClassVar = Architecture.gguf_tensors | {
        "blocks.N.mlp_norm": "blk.N.post_attention_norm",
        "blocks.N.gated_delta_net_norm": "blk.N.attn_norm",
        "blocks.N.gated_delta_net.input": "blk.N.{attn_qkv,attn_gate}",
        "blocks.N.gated_delta_net.rates": "blk.N.{ssm_beta,ssm_alpha}",
        "blocks.N.gated_delta_net.filter": "blk.N.ssm_conv1d",
        "blocks.N.gated_delta_net.decay": "blk.N.ssm_a!",
        "blocks.N.gated_delta_net.step": "blk.N.ssm_dt.bias!",
        "blocks.N.gated_delta_net.norm": "blk.N.ssm_norm",
        "blocks.N.gated_delta_net.output": "blk.N.ssm_out",
    }

    def derive(self, keys: SimpleNamespace) -> None:
        if keys.layer_types is None:
            period = size("full_attention_interval", keys.full_attention_interval)
            keys.layer_types = [LINEAR if (i + 1) % period else FULL for i in range(keys.num_hidden_layers)]

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        if keys.layer_types[number] == FULL:
            return usual.attention(), usual.mlp()
        if keys.hidden_act != "silu":
            raise Unsupported(f"hidden_act = {keys.hidden_act!r} is not supported for {self.name}: it must be 'silu'")
        delta_net = GatedDeltaNet(
            num_key_heads=keys.linear_num_key_heads,
            num_value_heads=keys.linear_num_value_heads,
            key_dim=keys.linear_key_head_dim,
            value_dim=keys.linear_value_head_dim,
            kernel_size=keys.linear_conv_kernel_dim,
        )
        return delta_net, usual.mlp()

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        attention = usual.attention()
        _check_sections(metadata, attention)
        period = size("full_attention_interval", metadata.need("full_attention_interval", PERIOD))
        if not metadata.of_layer(number, "attention.recurrent_layers", (number + 1) % period != 0):
            return attention, usual.mlp()
        value_heads = size("ssm.time_step_rank", metadata.need("ssm.time_step_rank"))
        delta_net = GatedDeltaNet(
            num_key_heads=metadata.need("ssm.group_count"),
            num_value_heads=value_heads,
            key_dim=metadata.need("ssm.state_size"),
            value_dim=metadata.need("ssm.inner_size") // value_heads,
            kernel_size=metadata.need("ssm.conv_kernel"),
            tiled=True,
        )
        return delta_net, usual.mlp()

    def folder_values(self, source: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
        if source.endswith("A_log"):
            return -np.exp(values)
        is_zero_centered = source.endswith(NORMS) and not source.endswith("linear_attn.norm.weight")
        return values + np.float32(1) if is_zero_centered else values

    def folder_rows(self, source: str, part: Part | None) -> NDArray[np.int64] | None:
        return _queries_first(part) if source.endswith("q_proj.weight") or source.endswith("q_proj.bias") else None

    def gguf_rows(self, source: str, part: Part | None) -> NDArray[np.int64] | None:
        return _queries_first(part) if ".attn_q." in source else None


def _check_sections(metadata: Metadata, attention: Attention) -> None:
    """Refuse sections of a rotation that leave out some features, which llama.cpp would then not rotate in a text.

    In images, positions have three coordinates. Features take turns with these, as many as the sections say.
    """
    sections = metadata.need("rope.dimension_sections", None)
    pairs = range(0 if attention.rope is None else attention.rope.dim // 2)
    if sections is not None and (len(sections) < 3 or any(pair >= 3 * sections[pair % 3] for pair in pairs)):
        raise SpecbeamError(f"{metadata.name('rope.dimension_sections')} = {sections} leaves out features that rotate")


def _queries_first(part: Part | None) -> NDArray[np.int64]:
    """The rows of all queries and then those of all gates. Files have both head by head."""
    assert isinstance(part, Attention)
    return np.arange(2 * part.query_size).reshape(part.num_heads, 2, part.head_dim).swapaxes(0, 1).ravel()


ARCHITECTURES = (Qwen35(),)
