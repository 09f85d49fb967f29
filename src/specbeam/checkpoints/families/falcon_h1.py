"""Falcon-H1 (TII 2025): attention and Mamba 2 side by side in each layer, with multipliers for all products.

GGUF files have the multipliers in their weights.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.architecture import Architecture, Metadata, Usual
from specbeam.checkpoints.config import Config, Layer
from specbeam.checkpoints.families import mamba
from specbeam.checkpoints.stems import TokenStem
from specbeam.errors import SpecbeamError, Unsupported

BIASES = ("attention_bias", "mlp_bias", "projectors_bias")
"""Flags that no published model has."""
NUMBER = float | None


class FalconH1(Architecture):
    """Falcon-H1, 0.5B to 34B."""

    name = "falcon_h1"
    gguf_name = "falcon-h1"
    keys: ClassVar = {
        **mamba.KEYS,
        **dict.fromkeys(BIASES, (bool, False)),
        "projectors_bias": (bool | None, False),
        **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier", "embedding_multiplier"), (NUMBER, 1.0)),
        **dict.fromkeys(("key_multiplier", "lm_head_multiplier"), (NUMBER, 1.0)),
        **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier"), (NUMBER, 1.0)),
        "head_dim": (int | None, None),
        "hidden_act": (str, "silu"),
        "intermediate_size": (int, 14336),
        "layer_types": (list[str] | None, None),
        "mamba_d_ssm": (int | None, 1024),
        "mamba_norm_before_gate": (bool | None, True),
        "mamba_rms_norm": (bool | None, False),
        "max_position_embeddings": (int, 8192),
        "mlp_multipliers": (list[float] | None, None),
        "num_key_value_heads": (int | None, 8),
        "rms_norm_eps": (float, 1e-5),
        "ssm_multipliers": (list[float] | None, None),
    }
    layer_kinds = ("hybrid",)
    folder_tensors: ClassVar = {
        **Architecture.folder_tensors,
        **mamba.folder_tensors("model.layers.N.mamba"),
        "blocks.N.mlp_norm": "model.layers.N.pre_ff_layernorm",
        "blocks.N.mlp.gate_up": "model.layers.N.feed_forward.{gate,up}_proj",
        "blocks.N.mlp.down": "model.layers.N.feed_forward.down_proj",
        "norm": "model.final_layernorm",
    }
    gguf_keys: ClassVar = mamba.GGUF_KEYS
    gguf_tensors: ClassVar = {
        **Architecture.gguf_tensors,
        **mamba.GGUF_TENSORS,
        "blocks.N.mlp_norm": "blk.N.ffn_norm!",  # llama.cpp's converter leaves ".weight" out
    }

    def derive(self, keys: SimpleNamespace) -> None:
        super().derive(keys)
        if keys.layer_types is None or len(keys.layer_types) == keys.num_hidden_layers:
            keys.layer_types = ["hybrid"] * keys.num_hidden_layers  # whatever the file says, as in transformers

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        for flag in BIASES:
            if getattr(keys, flag):
                raise Unsupported(f"{flag} is not supported for {self.name}")
        of_gate, of_mlp = multipliers("mlp_multipliers", keys.mlp_multipliers, 2)
        scales = multipliers("ssm_multipliers", keys.ssm_multipliers, 5)
        names = ("gate_scale", "value_scale", "key_scale", "query_scale", "step_scale")
        mamba2 = mamba.mamba2_of_folder(
            self,
            keys,
            keys.mamba_expand * keys.hidden_size if keys.mamba_d_ssm is None else keys.mamba_d_ssm,
            group_norm=bool(keys.mamba_rms_norm),
            norm_before_gate=bool(keys.mamba_norm_before_gate),
            output_scale=float(keys.ssm_out_multiplier),
            **{name: keys.ssm_in_multiplier * scale for name, scale in zip(names, scales, strict=True)},
        )
        attention = usual.attention(norm=False, parallel=True)
        # Queries, keys and values are made of scaled inputs.
        attention = replace(
            attention,
            scale=attention.scale * keys.key_multiplier * keys.attention_in_multiplier**2,
            output_scale=keys.attention_in_multiplier * keys.attention_out_multiplier,
        )
        return mamba2, attention, usual.mlp(gate_scale=of_gate, output_scale=of_mlp)

    def refine_folder_config(self, config: Config, keys: SimpleNamespace) -> Config:
        stem = TokenStem(scale=float(keys.embedding_multiplier))
        return replace(config, stem=stem, logits_scale=float(keys.lm_head_multiplier))

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        mamba2 = mamba.mamba2_of_gguf(metadata, group_norm="ssm_norm.weight" in metadata.in_layers)
        return mamba2, usual.attention(norm=False, parallel=True), usual.mlp()

    def folder_values(self, source: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
        return mamba.folder_values(source, values)


def multipliers(name: str, values: list[float] | None, count: int) -> list[float]:
    """As many numbers as a key of a config.json must have; ones if it has none."""
    if values is not None and len(values) != count:
        raise SpecbeamError(f"config.json says {name} = {values}, which is not a list of {count} numbers")
    return [1.0] * count if values is None else values


ARCHITECTURES = (FalconH1(),)
