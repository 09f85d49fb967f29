"""The architectures we run: one configuration, and how two file formats name what it describes."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from specbeam.errors import SpecbeamError

ARCHITECTURES: dict[str, dict[str, Any]] = {
    # model_type in config.json and general.architecture in GGUF: what is particular
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 128},
}

GGUF_PERMUTES_ROPE = {"llama"}
"""Architectures whose query and key rows llama.cpp stores with the two halves of a head interleaved."""

TENSORS = {
    # ours: (Hugging Face, GGUF); several sources are stacked along their rows
    "embedding.weight": (["model.embed_tokens.weight"], ["token_embd.weight"]),
    "blocks.{}.attention_norm.weight": (["model.layers.{}.input_layernorm.weight"], ["blk.{}.attn_norm.weight"]),
    "blocks.{}.attention.qkv.weight": (
        [f"model.layers.{{}}.self_attn.{x}_proj.weight" for x in "qkv"],
        [f"blk.{{}}.attn_{x}.weight" for x in "qkv"],
    ),
    "blocks.{}.attention.qkv.bias": (
        [f"model.layers.{{}}.self_attn.{x}_proj.bias" for x in "qkv"],
        [f"blk.{{}}.attn_{x}.bias" for x in "qkv"],
    ),
    "blocks.{}.attention.q_norm.weight": (["model.layers.{}.self_attn.q_norm.weight"], ["blk.{}.attn_q_norm.weight"]),
    "blocks.{}.attention.k_norm.weight": (["model.layers.{}.self_attn.k_norm.weight"], ["blk.{}.attn_k_norm.weight"]),
    "blocks.{}.attention.output.weight": (["model.layers.{}.self_attn.o_proj.weight"], ["blk.{}.attn_output.weight"]),
    "blocks.{}.attention.output.bias": (["model.layers.{}.self_attn.o_proj.bias"], ["blk.{}.attn_output.bias"]),
    "blocks.{}.mlp_norm.weight": (["model.layers.{}.post_attention_layernorm.weight"], ["blk.{}.ffn_norm.weight"]),
    "blocks.{}.mlp.gate_up.weight": (
        [f"model.layers.{{}}.mlp.{x}_proj.weight" for x in ("gate", "up")],
        [f"blk.{{}}.ffn_{x}.weight" for x in ("gate", "up")],
    ),
    "blocks.{}.mlp.gate_up.bias": (
        [f"model.layers.{{}}.mlp.{x}_proj.bias" for x in ("gate", "up")],
        [f"blk.{{}}.ffn_{x}.bias" for x in ("gate", "up")],
    ),
    "blocks.{}.mlp.down.weight": (["model.layers.{}.mlp.down_proj.weight"], ["blk.{}.ffn_down.weight"]),
    "blocks.{}.mlp.down.bias": (["model.layers.{}.mlp.down_proj.bias"], ["blk.{}.ffn_down.bias"]),
    "norm.weight": (["model.norm.weight"], ["output_norm.weight"]),
    "head.weight": (["lm_head.weight"], ["output.weight"]),
}

HUGGING_FACE, GGUF = 0, 1


@dataclass(frozen=True)
class Config:
    """A decoder-only transformer.

    Attributes:
        head_dim: features of a head; heads * head_dim need not be hidden_size.
        context_length: positions the model was trained for.
        rope_divisors: what each of the head_dim / 2 rotary frequencies is divided by; None for 1.
        qkv_bias, output_bias, mlp_bias: which products have a bias.
        qk_norm: RMSNorm over each query and key head before rotation.
        tied_head: the output matrix is the embedding.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float
    rope_theta: float
    rope_divisors: tuple[float, ...] | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = False

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "context_length"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
                raise SpecbeamError(f"the model's configuration says {name} = {value!r}, which is no size")
        divisors = self.rope_divisors or ()
        if not all(math.isfinite(x) and x > 0 for x in (self.rope_theta, self.norm_eps, *divisors)):
            raise SpecbeamError(
                f"the model's configuration has rope_theta {self.rope_theta}, norm_eps {self.norm_eps} and rotary "
                f"divisors from {min(divisors, default=1)}: all must be over 0"
            )
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise SpecbeamError(
                f"the model's configuration has {self.num_heads} heads, {self.num_kv_heads} key-value heads and "
                f"head_dim {self.head_dim}: the first must be a multiple of the second, and the third even"
            )

    def rope_frequencies(self) -> list[float]:
        """The head_dim / 2 rotary frequencies in radians a position."""
        plain = rope_frequencies(self.rope_theta, self.head_dim)
        return [f / d for f, d in zip(plain, self.rope_divisors or [1.0] * len(plain), strict=True)]


def rope_frequencies(theta: float, head_dim: int) -> list[float]:
    """Rotary frequencies without scaling (Su et al. 2021, 3.2.2)."""
    return [theta ** (-i / head_dim) for i in range(0, head_dim, 2)]


def require_supported(architecture: str) -> None:
    """Raises SpecbeamError for an architecture we cannot run."""
    if architecture not in ARCHITECTURES:
        raise SpecbeamError(f"architecture {architecture!r} is not supported: supported are {', '.join(ARCHITECTURES)}")


def config_from_hugging_face(given: Mapping[str, Any], tensors: Container[str]) -> Config:
    """The configuration a ``config.json`` of transformers 4 or 5 describes, beside tensors of these names.

    Raises:
        SpecbeamError: an unsupported architecture or feature, or a key is missing.
    """
    architecture = str(given.get("model_type"))
    require_supported(architecture)
    particular = ARCHITECTURES[architecture]
    if given.get("hidden_act", "silu") != "silu":
        raise SpecbeamError(f"hidden_act {given['hidden_act']!r} is not supported for {architecture}: only silu is")
    if given.get("use_sliding_window"):
        raise SpecbeamError("use_sliding_window is not supported yet: only full attention is")
    try:
        heads, hidden = given["num_attention_heads"], given["hidden_size"]
        head_dim = given.get("head_dim") or particular.get("head_dim") or hidden // heads
        # transformers 5 writes one dictionary, 4 wrote two keys.
        rope = dict(given.get("rope_parameters") or given.get("rope_scaling") or {})
        theta = float(rope.get("rope_theta") or given.get("rope_theta") or 10000.0)
        bias = bool(given.get("attention_bias", False))
        return Config(
            architecture=architecture,
            vocab_size=given["vocab_size"],
            hidden_size=hidden,
            intermediate_size=given["intermediate_size"],
            num_layers=given["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=given.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            context_length=given["max_position_embeddings"],
            norm_eps=float(given.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_divisors=_rope_divisors(rope, theta, head_dim),
            qkv_bias=bias or particular.get("qkv_bias", False),
            output_bias=bias,
            mlp_bias=bool(given.get("mlp_bias", False)),
            qk_norm=particular.get("qk_norm", False),
            tied_head=bool(given.get("tie_word_embeddings", "lm_head.weight" not in tensors)),
        )
    except KeyError as error:
        raise SpecbeamError(f"config.json has no {error.args[0]!r}: it is not that of a {architecture} model") from None
    except SpecbeamError:
        raise
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise SpecbeamError(f"config.json cannot be read as that of a {architecture} model: {error}") from None


def _rope_divisors(rope: Mapping[str, Any], theta: float, head_dim: int) -> tuple[float, ...] | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return (float(rope["factor"]),) * (head_dim // 2)
    if kind == "llama3":
        return llama3_divisors(
            theta,
            head_dim,
            factor=float(rope["factor"]),
            low=float(rope["low_freq_factor"]),
            high=float(rope["high_freq_factor"]),
            trained=float(rope["original_max_position_embeddings"]),
        )
    raise SpecbeamError(f"rope scaling {kind!r} is not supported: supported are default, linear, llama3")


def llama3_divisors(
    theta: float, head_dim: int, factor: float, low: float, high: float, trained: float
) -> tuple[float, ...]:
    """Llama 3.1's rotary scaling: long wavelengths are stretched by factor, short ones kept, those between blended.

    Args:
        low, high: wavelengths over trained / low are stretched, those under trained / high kept.
        trained: context length before the stretch.
    """
    divisors = []
    for frequency in rope_frequencies(theta, head_dim):
        turns = trained * frequency / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - kept) / factor + kept))
    return tuple(divisors)


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> Config:
    """The configuration a GGUF file's metadata and tensor shapes describe.

    Raises:
        SpecbeamError: an unsupported architecture or feature, or a key is missing.
    """
    architecture = str(metadata.get("general.architecture"))
    require_supported(architecture)

    def get(key: str, *otherwise: Any) -> Any:
        value = metadata.get(f"{architecture}.{key}", *otherwise)
        if value is None:
            raise SpecbeamError(f"the GGUF file has no {architecture}.{key}: it is not a complete {architecture} model")
        return value

    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise SpecbeamError(f"rope scaling {scaling!r} is not supported: supported are none, linear, and llama3's")
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise SpecbeamError("the GGUF file has no tensor token_embd.weight: it is not a language model")
    try:
        heads, hidden = get("attention.head_count"), get("embedding_length")
        head_dim = metadata.get(f"{architecture}.attention.key_length") or hidden // heads
        divisors = (float(get("rope.scaling.factor")),) * (head_dim // 2) if scaling == "linear" else None
        return Config(
            architecture=architecture,
            vocab_size=embedding[0],
            hidden_size=hidden,
            intermediate_size=get("feed_forward_length"),
            num_layers=get("block_count"),
            num_heads=heads,
            num_kv_heads=get("attention.head_count_kv", heads),
            head_dim=head_dim,
            context_length=get("context_length"),
            norm_eps=float(get("attention.layer_norm_rms_epsilon")),
            rope_theta=float(get("rope.freq_base", 10000.0)),
            rope_divisors=divisors,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_down.bias" in tensors,
            qk_norm=ARCHITECTURES[architecture].get("qk_norm", False),
            tied_head="output.weight" not in tensors,
        )
    except SpecbeamError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        raise SpecbeamError(f"the GGUF file's metadata is not that of a {architecture} model: {error}") from None


def sources(name: str, file_format: int) -> list[str]:
    """The tensors of a file format that make up one of our parameters, such as ``blocks.3.mlp.down.weight``."""
    parts = name.split(".")
    layer = parts[1] if parts[0] == "blocks" else ""
    pattern = ".".join(["blocks", "{}", *parts[2:]]) if layer else name
    return [source.format(layer) for source in TENSORS[pattern][file_format]]
