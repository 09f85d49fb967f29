"""Nemotron-H and Nemotron Nano 2 (NVIDIA 2025): a layer is Mamba 2, attention without a rotation or an MLP."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.architecture import Architecture, Metadata, Usual, fits, in_words
from specbeam.checkpoints.config import Layer
from specbeam.checkpoints.families import mamba
from specbeam.checkpoints.parts.mamba2 import Mamba2
from specbeam.errors import SpecbeamError, Unsupported

FULL, LINEAR, MLP = "full_attention", "linear_attention", "mlp"
OF_PATTERN = {"M": LINEAR, "*": FULL, "-": MLP, "E": "moe"}
"""The kinds of layers in ``hybrid_override_pattern``."""
FIRST_NAMES = {
    **{"conv_kernel": "mamba_d_conv", "expand": "mamba_expand", "n_groups": "mamba_n_groups"},
    **{"time_step_limit": "mamba_dt_limit", "use_conv_bias": "mamba_conv_bias"},
}
"""The first names of keys. They go before the newer ones."""
REQUIRED = {"attention_bias": False, "use_bias": False, "mamba_hidden_act": "silu", "mlp_hidden_act": "relu2"}
"""What all published models have."""


class NemotronH(Architecture):
    """The models without experts. Their squared ReLU has no gate.

    dt has the limits ``time_step_limit``, as in NVIDIA's code and in llama.cpp. transformers 5 takes ``time_step_min``
    for the lower limit as it reads a prompt, and no limit after it.
    """

    name = "nemotron_h"
    gguf_name = "nemotron_h"
    keys: ClassVar = {
        **dict.fromkeys(("attention_bias", "mamba_proj_bias", "mlp_bias", "use_bias"), (bool, False)),
        **dict.fromkeys(("n_group", "n_shared_experts", "topk_group"), (int, 1)),  # of experts, as the next ones
        **{"n_routed_experts": (int, 8), "moe_intermediate_size": (int, 7688), "num_experts_per_tok": (int, 2)},
        **{"norm_topk_prob": (bool, True), "routed_scaling_factor": (float | int, 1.0)},
        "conv_kernel": (int, 4),
        "expand": (int, 2),
        "head_dim": (int, 128),
        "hybrid_override_pattern": (object, None),
        "intermediate_size": (int, 21504),
        "layer_norm_epsilon": (float, 1e-5),
        "layer_types": (list[str] | None, None),
        "mamba_head_dim": (int, 64),
        "mamba_hidden_act": (str, "silu"),
        "mamba_num_heads": (int, 128),
        "max_position_embeddings": (int, 4096),
        "mlp_hidden_act": (str, "relu2"),
        "n_groups": (int, 8),
        "num_hidden_layers": (object, None),
        "num_key_value_heads": (int, 8),
        "sliding_window": (int | None, None),
        "ssm_state_size": (int, 128),
        "time_step_limit": (list, [0.0, float("inf")]),
        "use_conv_bias": (bool, True),
    }
    older_names: ClassVar = {"layer_types": "layers_block_type"}
    derived_sizes = ("num_hidden_layers",)
    mlp: ClassVar = {"gated": False}
    layer_kinds = (FULL, LINEAR, MLP)
    folder_tensors: ClassVar = {
        **mamba.folder_tensors("backbone.layers.N.mixer", norm="backbone.layers.N.norm"),
        "embedding": "backbone.embeddings",
        "blocks.N.attention_norm": "backbone.layers.N.norm",
        "blocks.N.attention.qkv": "backbone.layers.N.mixer.{q,k,v}_proj",
        "blocks.N.attention.output": "backbone.layers.N.mixer.o_proj",
        "blocks.N.mlp_norm": "backbone.layers.N.norm",
        "blocks.N.mlp.up": "backbone.layers.N.mixer.up_proj",
        "blocks.N.mlp.down": "backbone.layers.N.mixer.down_proj",
        "norm": "backbone.norm_f",
        "head": "lm_head",
    }
    gguf_keys: ClassVar = mamba.GGUF_KEYS
    gguf_tensors: ClassVar = {
        **Architecture.gguf_tensors,
        **mamba.GGUF_TENSORS,
        "blocks.N.mlp_norm": "blk.N.attn_norm",
    }

    @property
    def has_rope(self) -> bool:
        return False

    def derive(self, keys: SimpleNamespace) -> None:
        for name, first in FIRST_NAMES.items():
            if hasattr(keys, first):
                if not fits(value := getattr(keys, first), kind := self.keys[name][0]):
                    raise SpecbeamError(f"config.json says {first} = {str(value)[:80]!r}, not {in_words(kind)}")
                setattr(keys, name, value)
        if keys.layer_types is None:
            if not isinstance(pattern := keys.hybrid_override_pattern, str):
                raise SpecbeamError(f"config.json has no 'layers_block_type': it does not describe a {self.name} model")
            if unknown := set(pattern) - set(OF_PATTERN):
                raise SpecbeamError(f"config.json has layers of the unknown kind {min(unknown)!r}")
            keys.layer_types = [OF_PATTERN[one] for one in pattern]
        keys.num_hidden_layers = len(keys.layer_types)

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        for key, value in REQUIRED.items():
            if getattr(keys, key) != value:
                raise Unsupported(f"{key} = {getattr(keys, key)!r} is not supported for {self.name}")
        if keys.layer_types[number] == FULL:
            return (usual.attention(),)
        if keys.layer_types[number] == MLP:
            return (usual.mlp(activation="relu2"),)
        min_step, max_step = mamba.step_limits(keys.time_step_limit)
        mamba2 = Mamba2(
            num_heads=keys.mamba_num_heads,
            head_dim=keys.mamba_head_dim,
            num_groups=keys.n_groups,
            state_size=keys.ssm_state_size,
            kernel_size=keys.conv_kernel,
            convolution_bias=keys.use_conv_bias,
            min_step=min_step,
            max_step=max_step,
        )
        return (mamba2,)

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        metadata.need("attention.layer_norm_epsilon", None)  # files say it beside the same number of RMSNorm
        if usual.attention.keywords["num_kv_heads"]:
            return (usual.attention(),)
        if usual.mlp.keywords["intermediate_size"]:
            return (usual.mlp(activation="relu2"),)
        return (mamba.mamba2_of_gguf(metadata),)

    def folder_values(self, source: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
        return mamba.folder_values(source, values)


ARCHITECTURES = (NemotronH(),)
