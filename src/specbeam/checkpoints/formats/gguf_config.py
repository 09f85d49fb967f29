"""The metadata of a GGUF file as a :class:`Config`, by the rules that all architectures share.

A key that a file lacks has llama.cpp's default here, and is refused where llama.cpp needs it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from math import isclose
from typing import Any

from specbeam.checkpoints.architecture import Architecture, Metadata, Usual
from specbeam.checkpoints.config import Config, Layer, layer_count
from specbeam.checkpoints.families import GGUF_ARCHITECTURES, require_supported
from specbeam.checkpoints.files import refusing
from specbeam.checkpoints.formats.folder_config import config_from_hugging_face
from specbeam.checkpoints.parts.attention import MAX_HEAD_DIM, Attention
from specbeam.checkpoints.parts.experts import Experts
from specbeam.checkpoints.parts.mlp import MLP, SharedExpert
from specbeam.checkpoints.parts.part import Part, size
from specbeam.checkpoints.rope import Rope, yarn_divisors, yarn_scale
from specbeam.errors import SpecbeamError

logger = logging.getLogger("specbeam")

LLAMA3_DIVISORS, LONGROPE_DIVISORS = "rope_freqs.weight", "rope_factors_short.weight"
DIVISORS = (LLAMA3_DIVISORS, LONGROPE_DIVISORS, "rope_factors_long.weight")
"""Tensors of rotary divisors. They are part of the configuration, and no parameters of the model."""
NO_EFFECT = frozenset(
    (
        "vocab_size",  # the embedding has as many rows
        "use_parallel_residual",  # tensors tell, except in GPT-NeoX, which reads the key
        "tensor_data_layout",
        "rope.scaling.finetuned",
        "expert_used_count",  # of no experts
        "pooling_type",  # of embeddings
    )
)
"""Keys that change no text, and that nothing reads."""
KINDS_OF_MODELS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            *("context_length", "embedding_length", "block_count", "attention.sliding_window"),
            *("expert_count", "expert_used_count", "expert_feed_forward_length", "expert_gating_func"),
            *("expert_shared_feed_forward_length", "leading_dense_block_count", "nextn_predict_layers"),
            *(
                "attention.key_length",
                "attention.value_length",
                "attention.key_length_swa",
                "attention.value_length_swa",
            ),
            *("rope.dimension_count", "rope.dimension_count_swa", "rope.scaling.original_context_length"),
        ),
        ("uint32",),
    ),
    **dict.fromkeys(
        ("feed_forward_length", "attention.head_count", "attention.head_count_kv"), ("uint32", "[uint32]", "[int32]")
    ),
    "attention.sliding_window_pattern": ("uint32", "[bool]", "[uint32]", "[int32]"),
    **dict.fromkeys(
        (
            *("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
            *("attn_logit_softcapping", "final_logit_softcapping", "expert_weights_scale"),
            *("rope.freq_base", "rope.freq_base_swa", "rope.scale_linear", "rope.scaling.factor"),
            *("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"),
            *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_log_multiplier"),
        ),
        ("float32",),
    ),
    **dict.fromkeys(("attention.causal", "use_parallel_residual"), ("bool",)),
    "rope.scaling.type": ("string",),
}
"""The keys that several architectures read, without the architecture's name, with the types that llama.cpp takes."""
OTHER_FILES = {
    "adapter": "a LoRA adapter, and no model: merge it into its base model with llama-export-lora and give the merged "
    "file, or give the adapter as the folder that PEFT saves, with a base model that is a folder",
    "mmproj": "the part of a model that reads pictures or audio: give the file of its language model",
    "vocab": "a vocabulary without weights: give the file of the model",
    "imatrix": "an importance matrix for llama-quantize: give the file of the model",
}
"""What a file is that is no model, by ``general.type``."""
TRANSFORMERS_NAMES = {
    "gpt-oss": "gpt_oss",
    "minimax-m2": "minimax_m2",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
}
"""transformers' names of architectures, where GGUF files have other names."""
IN_SHAPES = frozenset(("expert_feed_forward_length", "expert_shared_feed_forward_length", "attention.value_length"))
"""Keys that the shapes of tensors repeat. transformers refuses tensors of other shapes."""
WAY_OUT = "Give the folder from which the file was made"


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
        Unsupported: an architecture that specbeam lacks.
        SpecbeamError: a key is missing, its value is wrong, or it asks for a feature that specbeam lacks. transformers'
            loader of GGUF files drops such features in silence.
    """
    name = str(metadata.get("general.architecture"))
    check_model_file(metadata, tensors)
    require_supported(name, GGUF_ARCHITECTURES)
    of_architecture = Metadata(name, metadata, tensors)
    with refusing(f"the GGUF file's metadata do not describe a {name} model"):
        config = _read(GGUF_ARCHITECTURES[name], of_architecture, tensors, divisors or {})
    if unknown := sorted(of_architecture.keys() - of_architecture.read - NO_EFFECT):
        logger.warning(
            "the GGUF file has keys that are not known and have no effect: %s",
            ", ".join(map(of_architecture.name, unknown)),
        )
    return config


def check_model_file(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> None:
    """Raises SpecbeamError for a GGUF file that is something else than a language model."""
    kind = metadata.get("general.type", "model")
    if metadata.get("general.architecture") == "clip":
        kind = "mmproj"
    if kind in OTHER_FILES:
        raise SpecbeamError(f"the GGUF file is {OTHER_FILES[kind]}")
    if "token_embd.weight" not in tensors:
        raise SpecbeamError("the GGUF file has no tensor token_embd.weight: it is not a language model")


def _read(
    architecture: Architecture,
    metadata: Metadata,
    tensors: Mapping[str, tuple[int, ...]],
    divisors: Mapping[str, tuple[float, ...]],
) -> Config:
    get = metadata.need
    if get("expert_count", 0) and not architecture.has_experts:
        raise SpecbeamError(f"{metadata.architecture} models with experts are not supported")
    if not get("attention.causal", True):
        raise SpecbeamError(f"{metadata.architecture} models whose attention is not causal are not supported")

    hidden, depth = get("embedding_length"), layer_count(get("block_count"), tensors)
    depth = size("block_count - nextn_predict_layers", depth - get("nextn_predict_layers", 0))
    if (head_dim := get("attention.key_length", None)) is None:
        head_dim = hidden // size("num_heads", metadata.of_layer(0, "attention.head_count"))
    size("head_dim", head_dim, MAX_HEAD_DIM)
    rotated = size("rope.dimension_count", get("rope.dimension_count", head_dim), MAX_HEAD_DIM)
    metadata.require("attention.value_length", head_dim)
    if not architecture.has_heads_by_kind:
        for key in ("attention.key_length_swa", "attention.value_length_swa"):
            metadata.require(key, head_dim)
        metadata.require("rope.dimension_count_swa", rotated)

    context, window = get("context_length"), get("attention.sliding_window", 0) or None
    truncated = architecture.yarn_truncated
    rope = _rope(metadata, rotated, divisors, context, truncated) if architecture.has_rope else None
    if LONGROPE_DIVISORS in divisors:  # a longer text would change the rotation of all of its tokens
        context = min(context, get("rope.scaling.original_context_length", context))
    elif rope is not None and get("rope.scaling.type", "linear") == "yarn":  # as for the folder of the file
        trained = get("rope.scaling.original_context_length", None)
        context = context if trained is None else int(_factor(metadata) * trained)

    no_mlp = (0,) if architecture.has_experts else ()  # the width may be missing

    def layer(i: int) -> Layer:
        heads = metadata.of_layer(i, "attention.head_count")
        attention_fields: dict[str, Any] = {
            "num_heads": heads,
            "num_kv_heads": metadata.of_layer(i, "attention.head_count_kv", heads),
            "head_dim": head_dim,
            "scale": head_dim**-0.5,
            "rope": rope,
            "window": window,
            **architecture.attention,
            "qkv_bias": not metadata.in_layers.isdisjoint(("attn_q.bias", "attn_qkv.bias")),
            "output_bias": "attn_output.bias" in metadata.in_layers,
        }
        mlp_fields: dict[str, Any] = {
            "intermediate_size": metadata.of_layer(i, "feed_forward_length", *no_mlp),
            **architecture.mlp,
            "bias": "ffn_down.bias" in metadata.in_layers,
        }
        experts_fields: dict[str, Any] = {
            "num_experts": get("expert_count", 0),
            "experts_per_token": get("expert_used_count", 0),
            "intermediate_size": get("expert_feed_forward_length", metadata.of_layer(i, "feed_forward_length", 0)),
            "weight_scale": float(get("expert_weights_scale", 0.0)) or 1.0,
            **architecture.experts,
            "bias": "ffn_down_exps.bias" in metadata.in_layers,
        }
        usual = Usual(
            partial(Attention, **attention_fields),
            partial(MLP, **mlp_fields),
            partial(Experts, **experts_fields),
            partial(SharedExpert, **architecture.shared_expert),
        )
        return architecture.gguf_layer(i, usual, metadata)

    epsilon = "layer_norm_epsilon" if architecture.features.get("norm") == "layer" else "layer_norm_rms_epsilon"
    config = Config(
        architecture=architecture.name,
        vocab_size=tensors["token_embd.weight"][0],
        hidden_size=hidden,
        layers=tuple(map(layer, range(depth))),
        context_length=context,
        norm_eps=float(get(f"attention.{epsilon}")),
        tied_head="output.weight" not in tensors,
        **architecture.features,
    )
    return architecture.refine_gguf_config(config, metadata)


def _factor(metadata: Metadata) -> float:
    """By how much the rotation is stretched. 0 stands for no scaling."""
    return float(metadata.need("rope.scaling.factor", metadata.need("rope.scale_linear", 0.0))) or 1.0


def _rope(
    metadata: Metadata, dim: int, divisors: Mapping[str, tuple[float, ...]], context: int, truncated: bool
) -> Rope:
    """The rotation of a file's layers, as llama.cpp makes it: the factor of a scaling divides all frequencies."""
    get = metadata.need
    theta, kind = float(get("rope.freq_base", 10000.0)), get("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "longrope", "yarn"):
        raise SpecbeamError(f"rope scaling {kind!r} is not supported: supported are none, linear, longrope, yarn")
    factor, scale = _factor(metadata), float(get("rope.scaling.attn_factor", 1.0))
    trained = get("rope.scaling.original_context_length", context)
    stretched: tuple[float, ...] | None = None
    if kind == "yarn":
        # llama.cpp computes with the defaults of these five. Its converter takes them from config.json, so they count.
        mix = float(get("rope.scaling.yarn_ext_factor", -1.0))
        mix = 1.0 if mix < 0 else mix
        fast, slow = get("rope.scaling.yarn_beta_fast", 32.0), get("rope.scaling.yarn_beta_slow", 1.0)
        usual = yarn_scale(factor, 1.0, float(get("rope.scaling.yarn_log_multiplier", 0.0))) if mix else 1.0
        scale *= float(get("rope.scaling.yarn_attn_factor", usual))
        stretched = yarn_divisors(theta, dim, factor, trained, float(fast), float(slow), truncated, mix)
    elif kind != "none" and factor != 1:
        stretched = (factor,) * (dim // 2)
    factors = divisors.get(LONGROPE_DIVISORS, divisors.get(LLAMA3_DIVISORS))
    if factors is not None and stretched is not None and len(factors) == len(stretched):
        factors = tuple(a * b for a, b in zip(factors, stretched, strict=True))
    return Rope(theta, dim, stretched if factors is None else factors, scale)


def check_transformers(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
    config: Any,
    make_config: Callable[[], Config],
) -> None:
    """Refuse a GGUF file that transformers' loader would run as another model.

    Args:
        metadata: all keys of the file.
        tensors: the shape of each tensor, by name.
        config: the configuration that the loader makes of the file.
        make_config: gives the configuration that specbeam makes of it, for an architecture that specbeam has.

    Raises:
        SpecbeamError: names what the loader drops or changes.
    """
    check_model_file(metadata, tensors)
    name = str(metadata.get("general.architecture"))
    if name in GGUF_ARCHITECTURES:
        ours, theirs = make_config(), config_from_hugging_face(config.to_dict(), tensors)
        if difference := next(_differences(ours, replace(theirs, architecture=ours.architecture)), None):
            raise SpecbeamError(
                f"transformers' loader of GGUF files takes another value for {difference} than the file says: use "
                "the cpu or the torch backend"
            )
        return
    lost = sorted([*(tensor for tensor in DIVISORS if tensor in tensors), *_lost_keys(Metadata(name, metadata))])
    if lost:
        raise SpecbeamError(
            f"architecture {name!r} is not supported natively, and transformers' loader of GGUF files drops what this "
            f"file says in {', '.join(lost[:5])}{', ...' if len(lost) > 5 else ''}. {WAY_OUT}"
        )


def _differences(ours: Any, theirs: Any, name: str = "") -> Iterator[str]:
    """What differs between two configurations, such as "num_kv_heads of the attention of layer 3".

    Args:
        name: the name of both values; empty for the whole configurations.
    """
    if isinstance(ours, float) and isinstance(theirs, float):
        if not isclose(ours, theirs, rel_tol=1e-6):
            yield name
    elif isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            part = f"{a.title} of {name}" if isinstance(a, Part) else name
            yield from _differences(a, b, f"layer {i}" if isinstance(a, tuple) else part)
    elif is_dataclass(ours) and type(ours) is type(theirs):
        for field in fields(ours):
            own = f"{field.name} of the {name}" if name else field.name
            yield from _differences(getattr(ours, field.name), getattr(theirs, field.name), own)
    elif ours != theirs:
        yield name


def _lost_keys(metadata: Metadata) -> list[str]:
    """The keys of an architecture unknown to specbeam that have an effect, and that the loader ignores."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    taken = GGUF_CONFIG_MAPPING.get(TRANSFORMERS_NAMES.get(metadata.architecture, metadata.architecture))
    heads, hidden = metadata.get("attention.head_count"), metadata.get("embedding_length")
    head_dims = [metadata.get("attention.key_length")]
    if isinstance(heads, int) and isinstance(hidden, int) and heads:
        head_dims.append(hidden // heads)
    kind, factor = metadata.get("rope.scaling.type", "linear"), metadata.get("rope.scaling.factor", 0)
    is_scaled = kind in ("yarn", "longrope") or (
        kind != "none" and (factor or metadata.get("rope.scale_linear", 0)) > 1
    )
    lost = []
    for key, value in metadata.items():
        if key.startswith("rope.scal"):
            is_kept = metadata.architecture == "gpt-oss" or not (is_scaled or key.endswith("attn_factor"))
        elif taken is None:  # the loader has code of its own for this architecture
            is_kept = True
        elif key in ("attention.key_length", "rope.dimension_count"):
            is_kept = value in head_dims or taken.get(key) is not None
        else:
            is_kept = taken.get(key) is not None or key in NO_EFFECT | IN_SHAPES or value in (0, "", None)
        if not is_kept and (key, value) != ("attention.causal", True):
            lost.append(metadata.name(key))
    return lost
