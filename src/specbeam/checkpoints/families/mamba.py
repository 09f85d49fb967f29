"""What files say of Mamba 2 (Dao and Gu 2024), for the families that have it beside attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.architecture import Architecture, Keys, Metadata
from specbeam.checkpoints.parts.mamba2 import Mamba2
from specbeam.checkpoints.parts.part import size
from specbeam.errors import SpecbeamError, Unsupported

KEYS: Keys = {
    "mamba_conv_bias": (bool | None, True),
    "mamba_d_conv": (int | None, 4),
    "mamba_d_head": (int | str | None, "auto"),
    "mamba_d_state": (int | None, 256),
    "mamba_expand": (int | None, 2),
    "mamba_n_groups": (int | None, 1),
    "mamba_n_heads": (int | None, 128),
    "mamba_proj_bias": (bool | None, False),
    "time_step_limit": (list | None, None),
}
"""The keys of a config.json that begin with ``mamba_``, and the limits of dt."""
GGUF_KEYS: dict[str, tuple[str, ...]] = dict.fromkeys(
    (f"ssm.{name}" for name in ("conv_kernel", "group_count", "inner_size", "state_size", "time_step_rank")),
    ("uint32",),
)
GGUF_TENSORS = {
    "blocks.N.mamba2_norm": "blk.N.attn_norm",
    "blocks.N.mamba2.input": "blk.N.ssm_in",
    "blocks.N.mamba2.filter": "blk.N.ssm_conv1d",
    "blocks.N.mamba2.decay": "blk.N.ssm_a!",
    "blocks.N.mamba2.step": "blk.N.ssm_dt.bias!",
    "blocks.N.mamba2.skip": "blk.N.ssm_d!",
    "blocks.N.mamba2.norm": "blk.N.ssm_norm",
    "blocks.N.mamba2.output": "blk.N.ssm_out",
}


def folder_tensors(mixer: str, norm: str = "model.layers.N.input_layernorm") -> dict[str, str]:
    """The names of a folder's tensors, whose module is called ``mixer``."""
    return {
        "blocks.N.mamba2_norm": norm,
        "blocks.N.mamba2.input": f"{mixer}.in_proj",
        "blocks.N.mamba2.filter": f"{mixer}.conv1d",
        "blocks.N.mamba2.decay": f"{mixer}.A_log!",
        "blocks.N.mamba2.step": f"{mixer}.dt_bias!",
        "blocks.N.mamba2.skip": f"{mixer}.D!",
        "blocks.N.mamba2.norm": f"{mixer}.norm",
        "blocks.N.mamba2.output": f"{mixer}.out_proj",
    }


def mamba2_of_folder(architecture: Architecture, keys: SimpleNamespace, inner_size: int, **others: Any) -> Mamba2:
    """The part that :data:`KEYS` describe.

    Args:
        inner_size: numbers of x, if the file names it; else what ``mamba_expand`` makes of the hidden size.
        others: other fields.
    """
    if keys.hidden_act != "silu":
        raise Unsupported(
            f"hidden_act = {keys.hidden_act!r} is not supported for {architecture.name}: it must be 'silu'"
        )
    if keys.mamba_proj_bias:
        raise Unsupported(f"mamba_proj_bias is not supported for {architecture.name}")
    heads = size("mamba_n_heads", keys.mamba_n_heads)
    head_dim = inner_size // heads if keys.mamba_d_head == "auto" else keys.mamba_d_head
    if size("mamba_d_head", head_dim) * heads != inner_size:
        raise SpecbeamError(
            f"config.json says mamba_n_heads = {heads} and mamba_d_head = {head_dim}, but Mamba's inner size is "
            f"{inner_size}, which must be their product"
        )
    min_step, max_step = step_limits(keys.time_step_limit)
    return Mamba2(
        num_heads=heads,
        head_dim=head_dim,
        num_groups=keys.mamba_n_groups,
        state_size=keys.mamba_d_state,
        kernel_size=keys.mamba_d_conv,
        convolution_bias=bool(keys.mamba_conv_bias),
        min_step=min_step,
        max_step=max_step,
        **others,
    )


def step_limits(limits: list[Any] | None) -> tuple[float | None, float | None]:
    """``min_step`` and ``max_step`` of a config.json's limits of dt. transformers writes infinity as an object."""
    if limits is None:
        return None, None
    try:
        low, high = (float(one["__float__"] if isinstance(one, dict) else one) for one in limits)
    except (KeyError, TypeError, ValueError):
        raise SpecbeamError(f"config.json says time_step_limit = {limits!r}, which is not two numbers") from None
    return low or None, None if high == np.inf else high


def mamba2_of_gguf(metadata: Metadata, **others: Any) -> Mamba2:
    """The part that the keys of a GGUF file describe."""
    heads = size("ssm.time_step_rank", metadata.need("ssm.time_step_rank"))
    return Mamba2(
        num_heads=heads,
        head_dim=metadata.need("ssm.inner_size") // heads,
        num_groups=metadata.need("ssm.group_count"),
        state_size=metadata.need("ssm.state_size"),
        kernel_size=metadata.need("ssm.conv_kernel"),
        convolution_bias="ssm_conv1d.bias" in metadata.in_layers,
        **others,
    )


def folder_values(source: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Our values of a tensor in a folder: the file has the logarithms of the negative decays."""
    return -np.exp(values) if source.endswith("A_log") else values


ARCHITECTURES = ()
