"""The architectures we run: what is particular to each, and how files name and describe them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Container, Mapping, Sized
from typing import Any

from specbeam.checkpoints.config import Config, Layer, Rope, rope_frequencies, size
from specbeam.errors import SpecbeamError, Unsupported

LLAMA, GPT2, GPT_NEOX, GGUF = range(4)  # the columns of TENSORS

GEMMA = {"activation": "gelu_tanh", "post_norms": True, "scaled_embedding": True}
GPT = {"norm": "layer", "gated_mlp": False, "qkv_bias": True, "output_bias": True, "mlp_bias": True}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    # model_type in config.json: the names of its tensors in a folder, and what is particular
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "smollm3": {},
    "phi3": {},
    "stablelm": {"norm": "layer"},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA | {"qk_norm": True},
    "gpt2": GPT | {"names": GPT2, "learned_positions": True},
    "gpt_neox": GPT | {"names": GPT_NEOX},
}

GGUF_ARCHITECTURES = {name: name for name in ARCHITECTURES if name != "mistral"} | {
    "gemma3": "gemma3_text",
    "gptneox": "gpt_neox",
}
"""Ours by general.architecture. Mistral's files say llama."""

GGUF_INTERLEAVES_ROPE = {"llama", "smollm3"}
"""Architectures whose query and key rows llama.cpp stores with the two halves of a head interleaved."""

TENSORS: dict[str, tuple[str, str, str, str]] = {
    # ours, N being the layer: Llama and its kin, GPT-2, GPT-NeoX, GGUF; where several are named they are stacked
    "embedding": ("model.embed_tokens", "transformer.wte", "gpt_neox.embed_in", "token_embd"),
    "positions": ("", "transformer.wpe", "", "position_embd"),
    "blocks.N.attention_norm": (
        "model.layers.N.input_layernorm",
        "transformer.h.N.ln_1",
        "gpt_neox.layers.N.input_layernorm",
        "blk.N.attn_norm",
    ),
    "blocks.N.attention.qkv": (
        "model.layers.N.self_attn.{q,k,v}_proj",
        "transformer.h.N.attn.c_attn",
        "gpt_neox.layers.N.attention.query_key_value",
        "blk.N.attn_{q,k,v}",
    ),
    "blocks.N.attention.q_norm": ("model.layers.N.self_attn.q_norm", "", "", "blk.N.attn_q_norm"),
    "blocks.N.attention.k_norm": ("model.layers.N.self_attn.k_norm", "", "", "blk.N.attn_k_norm"),
    "blocks.N.attention.output": (
        "model.layers.N.self_attn.o_proj",
        "transformer.h.N.attn.c_proj",
        "gpt_neox.layers.N.attention.dense",
        "blk.N.attn_output",
    ),
    "blocks.N.post_attention_norm": ("model.layers.N.post_attention_layernorm", "", "", "blk.N.post_attention_norm"),
    "blocks.N.mlp_norm": (
        "model.layers.N.post_attention_layernorm",
        "transformer.h.N.ln_2",
        "gpt_neox.layers.N.post_attention_layernorm",
        "blk.N.ffn_norm",
    ),
    "blocks.N.mlp.gate_up": ("model.layers.N.mlp.{gate,up}_proj", "", "", "blk.N.ffn_{gate,up}"),
    "blocks.N.mlp.up": ("", "transformer.h.N.mlp.c_fc", "gpt_neox.layers.N.mlp.dense_h_to_4h", "blk.N.ffn_up"),
    "blocks.N.mlp.down": (
        "model.layers.N.mlp.down_proj",
        "transformer.h.N.mlp.c_proj",
        "gpt_neox.layers.N.mlp.dense_4h_to_h",
        "blk.N.ffn_down",
    ),
    "blocks.N.post_mlp_norm": ("model.layers.N.post_feedforward_layernorm", "", "", "blk.N.post_ffw_norm"),
    "norm": ("model.norm", "transformer.ln_f", "gpt_neox.final_layer_norm", "output_norm"),
    "head": ("lm_head", "lm_head", "embed_out", "output"),
}

_gemma = {LLAMA: {"blocks.N.mlp_norm": "model.layers.N.pre_feedforward_layernorm"}}
_one_qkv = {GGUF: {"blocks.N.attention.qkv": "blk.N.attn_qkv"}}
EXCEPTIONS: dict[str, dict[int, dict[str, str]]] = {
    "phi3": {
        LLAMA: {
            "blocks.N.attention.qkv": "model.layers.N.self_attn.qkv_proj",
            "blocks.N.mlp.gate_up": "model.layers.N.mlp.gate_up_proj",
        },
        GGUF: {"blocks.N.attention.qkv": "blk.N.attn_qkv", "blocks.N.mlp.gate_up": "blk.N.ffn_up"},
    },
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "gpt2": _one_qkv,
    "gpt_neox": _one_qkv,
}

ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Ours by transformers' names."""


def _layers(number: Any, tensors: Sized, layer: Callable[[int], Layer]) -> tuple[Layer, ...]:
    if size("num_layers", number) > len(tensors):  # before they are made
        raise SpecbeamError(
            f"the model's configuration says {number} layers, but there are only {len(tensors)} tensors"
        )
    return tuple(layer(i) for i in range(number))


def require_supported(architecture: str, known: Container[str] = ARCHITECTURES) -> None:
    """Raises Unsupported for an architecture we cannot run."""
    if architecture not in known:
        raise Unsupported(f"architecture {architecture!r} is not supported: supported are {', '.join(ARCHITECTURES)}")


def config_from_hugging_face(given: Mapping[str, Any], tensors: Collection[str]) -> Config:
    """The configuration a ``config.json`` of transformers 4 or 5 describes, beside tensors of these names.

    Raises:
        Unsupported: an architecture or a feature we do not have.
        SpecbeamError: a key is missing, or a value is none.
    """
    architecture = str(given.get("model_type"))
    require_supported(architecture)

    from transformers import CONFIG_MAPPING

    try:
        kind = CONFIG_MAPPING[architecture]
        for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            if key not in given and kind.attribute_map.get(key) not in given:
                raise SpecbeamError(f"config.json has no {key!r}: it is not that of a {architecture} model")
        read = kind.from_dict(dict(given))  # it knows the keys of older versions, and their defaults
        return _config_from_transformers(architecture, read, tensors)
    except SpecbeamError:
        raise
    except Exception as error:  # it checks the values, and raises what its parts raise
        reason = " ".join(str(error).split())
        raise SpecbeamError(f"config.json cannot be read as that of a {architecture} model: {reason}") from None


def _config_from_transformers(architecture: str, given: Any, tensors: Collection[str]) -> Config:
    def get(*names: str, otherwise: Any = None) -> Any:
        return next((v for name in names if (v := getattr(given, name, None)) is not None), otherwise)

    particular: dict[str, Any] = dict(ARCHITECTURES[architecture])
    names = particular.pop("names", LLAMA)
    scaled_embedding = particular.pop("scaled_embedding", False)
    for flag in ("qk_layernorm", "scale_attn_by_inverse_layer_idx", "use_bidirectional_attention"):
        if get(flag):
            raise Unsupported(f"{flag} is not supported for {architecture}")
    if not get("scale_attn_weights", otherwise=True):
        raise Unsupported(f"scale_attn_weights=False is not supported for {architecture}")
    activation = get("hidden_activation", "hidden_act", "activation_function")
    if activation not in ACTIVATIONS:
        raise Unsupported(f"activation {activation!r} is not supported: supported are {', '.join(ACTIVATIONS)}")
    particular.setdefault("mlp_bias", bool(get("mlp_bias")))
    particular.setdefault("activation", ACTIVATIONS[activation])

    hidden, heads = given.hidden_size, given.num_attention_heads
    head_dim = get("head_dim", otherwise=hidden // heads)
    context = given.max_position_embeddings
    window, kinds = get("sliding_window"), get("layer_types")
    ropes = get("rope_parameters", otherwise={})
    rotated = get("no_rope_layers")  # 1 where there is one

    def layer(i: int) -> Layer:
        kind = kinds[i] if kinds else "sliding_attention" if window else "full_attention"
        if kind not in ("sliding_attention", "full_attention"):
            raise Unsupported(f"layers of kind {kind!r} are not supported")
        rope = None
        if not particular.get("learned_positions") and (rotated is None or rotated[i]):
            own = ropes.get(kind, ropes)
            partial = own.get("partial_rotary_factor") or get("partial_rotary_factor", otherwise=1.0)
            rope = rope_from_transformers(own, int(head_dim * partial), context)
        return Layer(rope, window if kind == "sliding_attention" else None)

    layers = _layers(given.num_hidden_layers, tensors, layer)
    if ropes.get("rope_type") == "longrope":  # in a longer text all of its tokens would be rotated otherwise
        context = min(context, int(ropes["original_max_position_embeddings"]))
    for flag, biases in {"use_qkv_bias": ("qkv_bias",), "attention_bias": ("qkv_bias", "output_bias")}.items():
        if (has := get(flag)) is not None:
            particular |= dict.fromkeys(biases, bool(has))
    parallel = bool(get("use_parallel_residual"))
    head = TENSORS["head"][names] + ".weight"
    return Config(
        architecture=architecture,
        vocab_size=given.vocab_size,
        hidden_size=hidden,
        intermediate_size=get("n_inner" if names == GPT2 else "intermediate_size", otherwise=4 * hidden),
        layers=layers,
        num_heads=heads,
        num_kv_heads=get("num_key_value_heads", otherwise=heads) if names == LLAMA else heads,
        head_dim=head_dim,
        context_length=context,
        norm_eps=float(get("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", otherwise=1e-6)),
        attention_scale=float(get("query_pre_attn_scalar", otherwise=head_dim)) ** -0.5,
        embedding_scale=hidden**0.5 if scaled_embedding else 1.0,
        parallel=parallel,
        mlp_norm=not parallel or architecture != "stablelm",
        attention_softcap=get("attn_logit_softcapping"),
        logits_softcap=get("final_logit_softcapping"),
        tied_head=bool(get("tie_word_embeddings", otherwise=head not in tensors)),
        **particular,
    )


def rope_from_transformers(given: Mapping[str, Any], dim: int, context: int) -> Rope:
    """What a dictionary ``rope_parameters`` of transformers 5 says of rotating so many features of a head.

    Args:
        context: ``max_position_embeddings``.
    """
    theta = float(given.get("rope_theta", 10000.0))
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default":
        return Rope(theta, dim)
    if kind == "linear":
        return Rope(theta, dim, (float(given["factor"]),) * (dim // 2))
    if kind == "llama3":
        divisors = llama3_divisors(
            theta,
            dim,
            factor=float(given["factor"]),
            low=float(given["low_freq_factor"]),
            high=float(given["high_freq_factor"]),
            trained=float(given["original_max_position_embeddings"]),
        )
        return Rope(theta, dim, divisors)
    if kind == "longrope":
        trained = float(given["original_max_position_embeddings"])
        factor = float(given.get("factor") or context / trained)
        scale = given.get("attention_factor") or longrope_scale(factor, trained)
        return Rope(theta, dim, tuple(map(float, given["short_factor"])), float(scale))
    raise Unsupported(f"rope scaling {kind!r} is not supported: supported are default, linear, llama3, longrope")


def llama3_divisors(
    theta: float, dim: int, factor: float, low: float, high: float, trained: float
) -> tuple[float, ...]:
    """Llama 3.1's rotary scaling: long wavelengths are stretched by factor, short ones kept, those between blended.

    Args:
        low, high: wavelengths over trained / low are stretched, those under trained / high kept.
        trained: context length before the stretch.
    """
    divisors = []
    for frequency in rope_frequencies(theta, dim):
        turns = trained * frequency / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - kept) / factor + kept))
    return tuple(divisors)


def longrope_scale(factor: float, trained: float) -> float:
    """LongRoPE's attention factor for a context factor times as long as that trained (Ding et al. 2024, 3.2)."""
    return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0


def config_from_gguf(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
    divisors: Mapping[str, tuple[float, ...]] | None = None,
) -> Config:
    """The configuration a GGUF file's metadata and tensor shapes describe.

    Args:
        divisors: what the file's tensors of rotary divisors hold, by their names.

    Raises:
        Unsupported: an architecture or a feature we do not have.
        SpecbeamError: a key is missing, or a value is none.
    """
    named = str(metadata.get("general.architecture"))
    require_supported(named, GGUF_ARCHITECTURES)
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise SpecbeamError("the GGUF file has no tensor token_embd.weight: it is not a language model")
    try:
        return _config_from_gguf(named, metadata, tensors, embedding[0], divisors or {})
    except SpecbeamError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        raise SpecbeamError(f"the GGUF file's metadata is not that of a {named} model: {error}") from None


def _config_from_gguf(
    named: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
    vocab_size: int,
    divisors: Mapping[str, tuple[float, ...]],
) -> Config:
    def get(key: str, *otherwise: Any) -> Any:
        value = metadata.get(f"{named}.{key}", *otherwise)
        if value is None:
            raise SpecbeamError(f"the GGUF file has no {named}.{key}: it is not a complete {named} model")
        return value

    architecture = GGUF_ARCHITECTURES[named]
    particular: dict[str, Any] = dict(ARCHITECTURES[architecture])
    particular.pop("names", None)
    scaled_embedding = particular.pop("scaled_embedding", False)
    heads, hidden, depth = size("num_heads", get("attention.head_count")), get("embedding_length"), get("block_count")
    head_dim = metadata.get(f"{named}.attention.key_length") or hidden // heads
    context, window = get("context_length"), metadata.get(f"{named}.attention.sliding_window") or None

    theta, dim = float(get("rope.freq_base", 10000.0)), get("rope.dimension_count", head_dim)
    scaling = metadata.get(f"{named}.rope.scaling.type", "none")
    scale, local = 1.0, None
    given = divisors.get("rope_freqs.weight")  # Llama 3's rotary scaling, worked out already
    if "rope_factors_short.weight" in divisors:
        given = divisors["rope_factors_short.weight"]
        trained = get("rope.scaling.original_context_length")
        scale = float(get("rope.scaling.attn_factor", longrope_scale(context / trained, trained)))
        context = min(context, trained)
    elif scaling == "linear":
        given = (float(get("rope.scaling.factor")),) * (dim // 2)
    elif scaling not in ("none", "longrope"):
        raise Unsupported(f"rope scaling {scaling!r} is not supported: supported are none, linear, longrope, llama3's")
    everywhere = Rope(theta, dim, given, scale)
    if named == "gemma3":
        local = Rope(float(get("rope.freq_base_swa", 10000.0)), dim)

    def layer(i: int) -> Layer:
        # What the files do not say, as llama.cpp has it.
        if particular.get("learned_positions") or (named == "smollm3" and i % 4 == 3):
            return Layer(None, window)
        far = {"gemma2": i % 2 == 1, "gemma3": i % 6 == 5}.get(named, False)
        return Layer(everywhere if far or local is None else local, None if far else window)

    # The largest Gemma models scale by the width of the stream, which their files do not say either.
    wide = (named, depth) in (("gemma2", 46), ("gemma3", 62))
    epsilon = "layer_norm_epsilon" if particular.get("norm") == "layer" else "layer_norm_rms_epsilon"
    biases = {
        "qkv_bias": any(f"blk.0.attn_{x}.bias" in tensors for x in ("q", "qkv")),
        "output_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
    }
    return Config(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length"),
        layers=_layers(depth, tensors, layer),
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        context_length=context,
        norm_eps=float(get(f"attention.{epsilon}")),
        attention_scale=(hidden // heads if wide else head_dim) ** -0.5,
        embedding_scale=hidden**0.5 if scaled_embedding else 1.0,
        parallel=bool(get("use_parallel_residual", False)),
        mlp_norm="blk.0.ffn_norm.weight" in tensors,
        attention_softcap=metadata.get(f"{named}.attn_logit_softcapping"),
        logits_softcap=metadata.get(f"{named}.final_logit_softcapping"),
        tied_head="output.weight" not in tensors,
        **({"activation": _gguf_activation(architecture)} | particular | biases),
    )


def _gguf_activation(architecture: str) -> str:
    return {"gpt2": "gelu_tanh", "gpt_neox": "gelu"}.get(architecture, "silu")


def sources(name: str, column: int, architecture: str) -> list[str]:
    """The tensors that make up one of our parameters, such as ``blocks.3.mlp.down.weight``.

    Args:
        column: of TENSORS, for the kind of file.
    """
    module, _, kind = name.rpartition(".")
    parts = module.split(".")
    layer = parts[1] if parts[0] == "blocks" else ""
    pattern = ".".join(["blocks", "N", *parts[2:]]) if layer else module
    theirs = EXCEPTIONS.get(architecture, {}).get(column, {}).get(pattern) or TENSORS[pattern][column]
    theirs = re.sub(r"\bN\b", layer, theirs)
    several = re.fullmatch(r"(.*)\{(.*)\}(.*)", theirs)
    stacked = [several[1] + x + several[3] for x in several[2].split(",")] if several else [theirs]
    return [f"{source}.{kind}" for source in stacked]
