"""The parameters of a transformer: their names and shapes, by its configuration, and that all are finite numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.config import Config
from specbeam.errors import SpecbeamError

Shape = tuple[int, ...]
FILTER_FRAMES = 3
"""The frames that a convolution's filter covers."""


def parameter_shapes(config: Config) -> dict[str, Shape]:
    """The shape of each parameter, by its name, in the order in which packed weights have them.

    Matrices are [out, in]. Query, key and value weights are stacked into one matrix, and so are gate and up.
    """
    return dict(_parameters(config))


def stacked_rows(name: str, config: Config) -> tuple[int, ...]:
    """The rows of each matrix or bias that is stacked to a parameter of several, such as query, key and value."""
    if name.startswith("encoder.") and config.encoder is not None:
        return stacked_rows(name.removeprefix("encoder."), config.encoder)
    return next(rows for module, rows in _stacks(config).items() if f".{module}." in name)


def _stacks(config: Config) -> dict[str, tuple[int, ...]]:
    """The rows of each stacked matrix, by the name of the module in a block."""
    head_dim, inner = config.head_dim, config.intermediate_size
    query, key = config.num_heads * head_dim, config.num_kv_heads * head_dim
    return {"attention.qkv": (query, key, key), "cross_attention.key_value": (key, key), "mlp.gate_up": (inner, inner)}


def _parameters(config: Config) -> Iterator[tuple[str, Shape]]:
    hidden = config.hidden_size
    if config.bands is None:
        yield "embedding.weight", (config.vocab_size, hidden)
    else:  # a convolution's filters are rows, frame by frame
        yield from _weights("conv1", hidden, FILTER_FRAMES * config.bands, True)
        yield from _weights("conv2", hidden, FILTER_FRAMES * hidden, True)
    if config.learned_positions:
        yield "positions.weight", (config.context_length, hidden)
    for layer in range(config.num_layers):
        for name, shape in _block(config):
            yield f"blocks.{layer}.{name}", shape
    yield from _norm("norm", hidden, config)
    if not config.tied_head and config.bands is None:
        yield "head.weight", (config.vocab_size, hidden)
    if config.encoder is not None:
        for name, shape in _parameters(config.encoder):
            yield f"encoder.{name}", shape


def _block(config: Config) -> Iterator[tuple[str, Shape]]:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    stacked = {module: sum(rows) for module, rows in _stacks(config).items()}
    yield from _norm("attention_norm", hidden, config)
    yield from _weights("attention.qkv", stacked["attention.qkv"], hidden, config.qkv_bias)
    yield from _weights("attention.output", hidden, config.num_heads * head_dim, config.output_bias)
    if config.qk_norm:
        yield from _norm("attention.q_norm", head_dim, config)
        yield from _norm("attention.k_norm", head_dim, config)
    if config.post_norms:
        yield from _norm("post_attention_norm", hidden, config)
    if config.encoder is not None:
        width, key_value = config.num_heads * head_dim, "cross_attention.key_value"
        yield from _norm("cross_attention_norm", hidden, config)
        yield from _weights("cross_attention.query", width, hidden, config.qkv_bias)
        yield from _weights(key_value, stacked[key_value], config.encoder.hidden_size, config.qkv_bias)
        yield from _weights("cross_attention.output", hidden, width, config.output_bias)
    if config.mlp_norm:
        yield from _norm("mlp_norm", hidden, config)
    up = "mlp.gate_up" if config.gated_mlp else "mlp.up"
    yield from _weights(up, stacked.get(up, inner), hidden, config.mlp_bias)
    yield from _weights("mlp.down", hidden, inner, config.mlp_bias)
    if config.post_norms:
        yield from _norm("post_mlp_norm", hidden, config)


def _weights(name: str, rows: int, columns: int, has_bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if has_bias:
        yield f"{name}.bias", (rows,)


def _norm(name: str, size: int, config: Config) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (size,)
    if config.norm == "layer":
        yield f"{name}.bias", (size,)


def are_finite(weights: NDArray[np.float32]) -> bool:
    """Whether all of some weights are finite numbers. ``isfinite`` of each would make an array of the same length."""
    with np.errstate(invalid="ignore"):
        return not weights.size or bool(np.isfinite((weights.min(), weights.max())).all())


def not_finite(place: str | Path, tensor: str) -> SpecbeamError:
    """The error for a tensor with weights that are not finite."""
    return SpecbeamError(
        f"{place}: tensor {tensor} has weights that are not finite numbers (NaN or infinite): fetch it again, or ask "
        "who made it for a sound one"
    )
