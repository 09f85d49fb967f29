"""The metadata of a GGUF file as a :class:`Config`, by the rules that all architectures share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbeam.checkpoints.architecture import Architecture
from specbeam.checkpoints.code import refusing
from specbeam.checkpoints.config import MAX_HEAD_DIM, Config, Layer, Rope, longrope_scale, make_layers, size
from specbeam.checkpoints.families import GGUF_ARCHITECTURES, require_supported
from specbeam.errors import SpecbeamError, Unsupported

LLAMA3_DIVISORS, LONGROPE_DIVISORS = "rope_freqs.weight", "rope_factors_short.weight"
DIVISORS = (LLAMA3_DIVISORS, LONGROPE_DIVISORS, "rope_factors_long.weight")
"""Tensors of rotary divisors. They are part of the configuration, and no parameters of the model."""


def config_from_gguf(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
    divisors: Mapping[str, tuple[float, ...]] | None = None,
) -> Config:
    """The configuration in a GGUF file's metadata and tensor shapes.

    Args:
        metadata: all keys of the file.
        tensors: the shape of each tensor, by name.
        divisors: the content of the tensors in ``DIVISORS`` that the file has, by name.

    Raises:
        Unsupported: an architecture or a feature that specbeam lacks.
        SpecbeamError: a key is missing, or its value is wrong.
    """
    name = str(metadata.get("general.architecture"))
    require_supported(name, GGUF_ARCHITECTURES)
    if "token_embd.weight" not in tensors:
        raise SpecbeamError("the GGUF file has no tensor token_embd.weight: it is not a language model")
    own = {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}
    with refusing(f"the GGUF file's metadata do not describe a {name} model"):
        return _read(GGUF_ARCHITECTURES[name], own, tensors, divisors or {})


def _read(
    architecture: Architecture,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
    divisors: Mapping[str, tuple[float, ...]],
) -> Config:
    def get(key: str, *otherwise: Any) -> Any:
        value = metadata.get(key, *otherwise)
        if value is None:
            name = architecture.gguf_name
            raise SpecbeamError(f"the GGUF file has no {name}.{key}: it is not a complete {name} model")
        return value

    features: dict[str, Any] = dict(architecture.features)
    features["qkv_bias"] = any(f"blk.0.attn_{x}.bias" in tensors for x in ("q", "qkv"))
    features["output_bias"] = "blk.0.attn_output.bias" in tensors
    features["mlp_bias"] = "blk.0.ffn_down.bias" in tensors

    heads, hidden, depth = size("num_heads", get("attention.head_count")), get("embedding_length"), get("block_count")
    head_dim = size("head_dim", metadata.get("attention.key_length") or hidden // heads, MAX_HEAD_DIM)
    context, window = get("context_length"), metadata.get("attention.sliding_window") or None

    theta = float(get("rope.freq_base", 10000.0))
    dim = size("rope.dimension_count", get("rope.dimension_count", head_dim), MAX_HEAD_DIM)
    scaling, scale = metadata.get("rope.scaling.type", "none"), 1.0
    rope_divisors = divisors.get(LLAMA3_DIVISORS)
    if LONGROPE_DIVISORS in divisors:
        rope_divisors = divisors[LONGROPE_DIVISORS]
        trained = get("rope.scaling.original_context_length")
        scale = float(get("rope.scaling.attn_factor", longrope_scale(context / trained, trained)))
        context = min(context, trained)  # a longer text would change the rotation of all of its tokens
    elif scaling == "linear":
        rope_divisors = (float(get("rope.scaling.factor")),) * (dim // 2)
    elif scaling not in ("none", "longrope"):
        raise Unsupported(f"rope scaling {scaling!r} is not supported: supported are none, linear, longrope, llama3's")
    rope = None if features.get("learned_positions") else Rope(theta, dim, rope_divisors, scale)

    epsilon = "layer_norm_epsilon" if features.get("norm") == "layer" else "layer_norm_rms_epsilon"
    config = Config(
        architecture=architecture.name,
        vocab_size=tensors["token_embd.weight"][0],
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length"),
        layers=make_layers(depth, tensors, lambda _: Layer(rope, window)),
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        context_length=context,
        norm_eps=float(get(f"attention.{epsilon}")),
        attention_scale=head_dim**-0.5,
        parallel=bool(get("use_parallel_residual", False)),
        mlp_norm="blk.0.ffn_norm.weight" in tensors,
        tied_head="output.weight" not in tensors,
        **features,
    )
    return architecture.refine_gguf_config(config, metadata)
