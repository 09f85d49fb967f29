"""A config.json of transformers as a :class:`Config`, by the rules that all architectures share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

from specbeam.checkpoints.architecture import (
    COMMON,
    SIZES,
    Architecture,
    Usual,
    check_rope,
    fits,
    in_words,
    nested,
    scaled_context,
)
from specbeam.checkpoints.config import Config, Layer, layer_count
from specbeam.checkpoints.families import ARCHITECTURES, require_supported
from specbeam.checkpoints.files import dictionaries, refusing
from specbeam.checkpoints.parts.attention import MAX_HEAD_DIM, Attention
from specbeam.checkpoints.parts.experts import Experts
from specbeam.checkpoints.parts.mlp import MLP, SharedExpert
from specbeam.checkpoints.parts.part import size
from specbeam.checkpoints.rope import (
    Rope,
    llama3_divisors,
    longrope_scale,
    proportional_divisors,
    yarn_divisors,
    yarn_scale,
)
from specbeam.errors import SpecbeamError, Unsupported

ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Our names of the activations, by the names in transformers."""
LAYERS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
)
"""The keys that say how many layers a model, or a part of it, has."""
LAYER_KINDS = {
    *("full_attention", "sliding_attention", "chunked_attention", "window_attention", "indexed_attention"),
    *("compressed_sparse_attention", "heavily_compressed_attention", "minimax_m3_sparse", "conv", "mlp", "moe"),
    *("hybrid", "hybrid_sliding", "reference_sliding_attention", "linear_attention"),
}
"""The values of ``layer_types`` that transformers knows."""
OLDER_LAYER_KINDS = {"attention": "full_attention", "mamba": "linear_attention"}
OTHER_COUNTS, MAX_COUNT = ("num_labels", "num_experts", "num_local_experts", "n_routed_experts"), 2**16
SCALINGS = ("default", "linear", "llama3", "longrope", "proportional", "yarn")
UNSUPPORTED_FLAGS = ("qk_layernorm", "scale_attn_by_inverse_layer_idx", "use_bidirectional_attention")


def check_counts(content: Mapping[str, Any], tensors: Collection[str]) -> None:
    """Refuse numbers of layers, labels or experts for which transformers would make lists without end.

    Args:
        content: the content of config.json.
        tensors: the names of the tensors beside it. A layer has one at least.
    """
    for part in dictionaries(content):
        for names, limit in ((LAYERS, len(tensors)), (OTHER_COUNTS, MAX_COUNT)):
            for name in names:
                if isinstance(number := part.get(name), int | float) and not number <= limit:
                    raise SpecbeamError(f"config.json says {name} = {number}, which is too large: at most {limit} fit")


def config_from_hugging_face(content: Mapping[str, Any], tensors: Collection[str]) -> Config:
    """The configuration in a ``config.json`` of transformers 4 or 5.

    Args:
        content: the content of the file.
        tensors: the names of the tensors beside it.
    """
    name = str(content.get("model_type"))
    require_supported(name)

    with refusing(f"config.json cannot be read as the configuration of a {name} model"):
        return _read(ARCHITECTURES[name], complete(ARCHITECTURES[name], content), tensors)


def complete(architecture: Architecture, content: Mapping[str, Any]) -> SimpleNamespace:
    """The keys of a config.json as attributes, with the defaults of its architecture."""
    older = architecture.older_names
    for key in SIZES:
        if key not in content and older.get(key) not in content and key not in architecture.derived_sizes:
            raise SpecbeamError(f"config.json has no {key!r}: it does not describe a {architecture.name} model")
    if content.get("per_layer_config") is not None and "per_layer_config" not in architecture.keys:
        raise Unsupported("per_layer_config in config.json is not supported")
    newer = {old: new for new, old in older.items()}
    named = {newer.get(key, key): value for key, value in content.items() if newer.get(key) not in content}
    keys = COMMON | architecture.keys
    for key, value in named.items():
        if key in keys and not fits(value, keys[key][0]):
            written = key if key in content else older[key]
            raise SpecbeamError(f"config.json says {written} = {str(value)[:80]!r}, not {in_words(keys[key][0])}")
    complete = SimpleNamespace(**{key: default for key, (_, default) in keys.items()} | deepcopy(named))
    architecture.derive(complete)
    _check_layer_kinds(complete)
    if "layer_types" not in keys:  # the models of such an architecture do not look at it
        complete.layer_types = None
    if architecture.has_rope:
        complete.rope_parameters = architecture.rope_parameters(complete)
        for parameters in nested(complete) or [complete.rope_parameters]:
            check_rope(parameters)
    return complete


def _check_layer_kinds(keys: SimpleNamespace) -> None:
    """Refuse kinds of layers that nobody knows, too many or too few. Older names become newer ones."""
    if (kinds := getattr(keys, "layer_types", None)) is None:
        return
    keys.layer_types = kinds = [OLDER_LAYER_KINDS.get(kind, kind) for kind in kinds]
    if unknown := [kind for kind in kinds if kind not in LAYER_KINDS]:
        raise SpecbeamError(f"config.json has layers of the unknown kind {unknown[0]!r}")
    if len(kinds) != keys.num_hidden_layers:
        raise SpecbeamError(
            f"config.json says num_hidden_layers = {keys.num_hidden_layers}, and layer_types has {len(kinds)} entries"
        )


def _read(architecture: Architecture, keys: SimpleNamespace, tensors: Collection[str]) -> Config:
    def get(*names: str, otherwise: Any = None) -> Any:
        return next((v for name in names if (v := getattr(keys, name, None)) is not None), otherwise)

    for flag in UNSUPPORTED_FLAGS:
        if get(flag) and get(flag) not in architecture.allowed_flags.get(flag, ()):
            raise Unsupported(f"{flag} is not supported for {architecture.name}")
    if not get("scale_attn_weights", otherwise=True):
        raise Unsupported(f"scale_attn_weights=False is not supported for {architecture.name}")
    activation = get("hidden_activation", "hidden_act", "activation_function", otherwise="silu")
    if activation not in ACTIVATIONS:
        raise Unsupported(f"activation {activation!r} is not supported: supported are {', '.join(ACTIVATIONS)}")
    biases: dict[str, bool] = {}
    if "attention_bias" in architecture.keys and (bias := get("attention_bias")) is not None:  # others ignore it
        biases = {"qkv_bias": bool(bias), "output_bias": bool(bias)}

    hidden, heads = keys.hidden_size, size("num_heads", keys.num_attention_heads)
    head_dim = size("head_dim", get("head_dim", otherwise=hidden // heads), MAX_HEAD_DIM)
    context = get("max_position_embeddings", "max_target_positions")
    window, kinds = get("sliding_window"), get("layer_types")
    ropes = get("rope_parameters", otherwise={}) if architecture.has_rope else {}
    mlp_fields: dict[str, Any] = {
        "intermediate_size": get("intermediate_size", otherwise=4 * hidden),
        "bias": bool(get("mlp_bias")),
        **architecture.mlp,
        "activation": ACTIVATIONS[activation],
    }

    experts_fields: dict[str, Any] = {
        "num_experts": get("num_experts", "num_local_experts"),
        "experts_per_token": get("num_experts_per_tok"),
        "intermediate_size": get("moe_intermediate_size", "intermediate_size"),
        **architecture.experts,
        "activation": ACTIVATIONS[activation],
    }

    def layer(i: int) -> Layer:
        kind = kinds[i] if kinds else "sliding_attention" if window else "full_attention"
        if kind not in architecture.layer_kinds:
            raise Unsupported(f"layers of kind {kind!r} are not supported")
        rope, own_dim = None, size("head_dim", architecture.folder_head_dim(i, head_dim, keys), MAX_HEAD_DIM)
        if architecture.has_rope:
            parameters = ropes.get(kind, ropes)
            rotated = parameters.get("partial_rotary_factor") or get("partial_rotary_factor", otherwise=1.0)
            dim = size("rotary dimension", int(own_dim * rotated), MAX_HEAD_DIM)
            rope = rope_from_transformers(parameters, dim, context, own_dim)
        attention_fields: dict[str, Any] = {
            "num_heads": heads,
            "num_kv_heads": get("num_key_value_heads", otherwise=heads),
            "head_dim": own_dim,
            "scale": float(own_dim) ** -0.5,
            "rope": rope,
            "window": window if kind == "sliding_attention" else None,
            **architecture.attention,
            **biases,
        }
        usual = Usual(
            partial(Attention, **attention_fields),
            partial(MLP, **mlp_fields),
            partial(Experts, **experts_fields),
            partial(SharedExpert, **architecture.shared_expert, activation=ACTIVATIONS[activation]),
        )
        return architecture.folder_layer(i, usual, keys)

    layers = tuple(map(layer, range(layer_count(keys.num_hidden_layers, tensors))))
    head = architecture.folder_tensors["head"] + ".weight"
    config = Config(
        architecture=architecture.name,
        vocab_size=keys.vocab_size,
        hidden_size=hidden,
        layers=layers,
        context_length=scaled_context(ropes, context),
        norm_eps=float(get("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", otherwise=1e-6)),
        tied_head=bool(get("tie_word_embeddings", otherwise=head not in tensors)),
        **architecture.features,
    )
    return architecture.refine_folder_config(config, keys)


def rope_from_transformers(parameters: Mapping[str, Any], dim: int, context: int, head_dim: int | None = None) -> Rope:
    """A dictionary ``rope_parameters`` of transformers 5 as a :class:`Rope`.

    Args:
        dim: how many features of a head are rotated.
        context: ``max_position_embeddings``.
        head_dim: all features of a head; None if all are rotated.
    """
    theta = float(parameters.get("rope_theta", 10000.0))
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return Rope(theta, dim)
    if kind == "linear":
        return Rope(theta, dim, (float(parameters["factor"]),) * (dim // 2))
    if kind == "proportional":
        divisors = proportional_divisors(dim // 2, (head_dim or dim) // 2, float(parameters.get("factor") or 1.0))
        return Rope(theta, head_dim or dim, divisors)
    if kind == "llama3":
        divisors = llama3_divisors(
            theta,
            dim,
            factor=float(parameters["factor"]),
            low=float(parameters["low_freq_factor"]),
            high=float(parameters["high_freq_factor"]),
            trained=float(parameters["original_max_position_embeddings"]),
        )
        return Rope(theta, dim, divisors)
    if kind == "longrope":
        trained = float(parameters["original_max_position_embeddings"])
        factor = float(parameters.get("factor") or context / trained)
        scale = parameters.get("attention_factor") or longrope_scale(factor, trained)
        return Rope(theta, dim, tuple(map(float, parameters["short_factor"])), float(scale))
    if kind == "yarn":
        trained = float(parameters["original_max_position_embeddings"])
        factor = context / trained if parameters["factor"] is None else float(parameters["factor"])
        fast, slow = float(parameters.get("beta_fast") or 32), float(parameters.get("beta_slow") or 1)
        truncate = bool(parameters.get("truncate", True))
        divisors = yarn_divisors(theta, dim, factor, trained, fast, slow, truncate)
        mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
        usual = yarn_scale(factor, float(mscale), float(mscale_all)) if mscale and mscale_all else yarn_scale(factor)
        scale = parameters.get("attention_factor")
        return Rope(theta, dim, divisors, usual if scale is None else float(scale))
    raise Unsupported(f"rope scaling {kind!r} is not supported: supported are {', '.join(SCALINGS)}")
