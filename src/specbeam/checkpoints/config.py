"""The configuration of a transformer, one class for all architectures and for encoders."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sized
from dataclasses import asdict, dataclass, fields
from typing import Any

from specbeam.errors import SpecbeamError

MAX_SIZE, MAX_HEAD_DIM = 2**31 - 1, 2**16
"""The largest sizes that are believed. Rotary frequencies are lists of head_dim / 2 numbers."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021) of the first features of each head.

    Attributes:
        theta: the base of the frequencies.
        dim: how many features of a head are rotated.
        divisors: one for each of the dim / 2 frequencies; None to divide by 1.
        scale: factor of the rotated features (LongRoPE's attention factor; Ding et al. 2024).
    """

    theta: float
    dim: int
    divisors: tuple[float, ...] | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        divisors = self.divisors or (1.0,)
        if not all(math.isfinite(x) and x > 0 for x in (self.theta, self.scale, *divisors)):
            raise SpecbeamError(
                f"the model's configuration has rope_theta {self.theta}, attention factor {self.scale} and rotary "
                f"divisors from {min(divisors)}: all must be over 0"
            )
        if self.dim % 2 or self.dim < 2 or (self.divisors and len(self.divisors) != self.dim // 2):
            raise SpecbeamError(
                f"the model's configuration rotates {self.dim} features of a head with {len(divisors)} divisors: "
                "the first must be even, and the second half of it"
            )

    def frequencies(self) -> list[float]:
        """The dim / 2 frequencies in radians per position."""
        plain = rope_frequencies(self.theta, self.dim)
        return [f / d for f, d in zip(plain, self.divisors or [1.0] * len(plain), strict=True)]


def rope_frequencies(theta: float, dim: int) -> list[float]:
    """Rotary frequencies without scaling (Su et al. 2021, 3.2.2)."""
    return [theta ** (-i / dim) for i in range(0, dim, 2)]


def llama3_divisors(
    theta: float, dim: int, factor: float, low: float, high: float, trained: float
) -> tuple[float, ...]:
    """Llama 3.1's rotary scaling: it stretches long wavelengths by factor, keeps short ones, and blends between.

    Args:
        low, high: wavelengths over trained / low are stretched. Those under trained / high are kept.
        trained: context length before the stretch.
    """
    divisors = []
    for frequency in rope_frequencies(theta, dim):
        turns = trained * frequency / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - kept) / factor + kept))
    return tuple(divisors)


def yarn_divisors(
    theta: float,
    dim: int,
    factor: float,
    trained: float,
    fast: float = 32.0,
    slow: float = 1.0,
    whole: bool = True,
    mix: float = 1.0,
) -> tuple[float, ...]:
    """YaRN's rotary scaling: it keeps fast frequencies, stretches slow ones by factor, and blends between (Peng 2023).

    Args:
        trained: context length before the stretch.
        fast, slow: frequencies with over fast turns in the trained context are kept. Those under slow are stretched.
        whole: the blend begins and ends at whole numbers of features.
        mix: how much of the kept part counts (``extrapolation_factor``).
    """
    if not (factor > 0 and trained > 0 and fast > 0 and slow > 0 and theta > 0 and theta != 1):
        raise SpecbeamError(
            f"the model's configuration has YaRN scaling with factor {factor}, original context {trained}, beta_fast "
            f"{fast}, beta_slow {slow} and rope_theta {theta}: all must be over 0"
        )

    def feature(turns: float) -> float:  # whose frequency makes this number of turns in the trained context
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = feature(fast), feature(slow)
    if whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    span = last - first or 0.001
    kept = (mix * (1 - min(max((i - first) / span, 0.0), 1.0)) for i in range(dim // 2))
    return tuple(1 / ((1 - k) / factor + k) for k in kept)


def yarn_scale(factor: float, numerator: float = 1.0, denominator: float = 0.0) -> float:
    """YaRN's attention factor (Peng 2023, 3.4), as a quotient where a model says so (``mscale / mscale_all_dim``)."""
    if factor <= 1:
        return 1.0
    return (0.1 * numerator * math.log(factor) + 1) / (0.1 * denominator * math.log(factor) + 1)


def longrope_scale(factor: float, trained: float) -> float:
    """LongRoPE's attention factor (Ding et al. 2024, 3.2).

    Args:
        factor: the context length now, as a multiple of the trained one.
        trained: context length in the first training.
    """
    return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0


@dataclass(frozen=True)
class Layer:
    """The settings that may differ from layer to layer.

    Attributes:
        rope: None where keys and queries are not rotated.
        window: a node attends to this many last positions, its own included; None for all positions.
    """

    rope: Rope | None = None
    window: int | None = None


@dataclass(frozen=True)
class Config:
    """A decoder, alone or with an encoder; or the encoder, all of whose positions see each other.

    Attributes:
        vocab_size: an encoder that reads sound has its decoder's.
        head_dim: features of a head; heads * head_dim need not be hidden_size.
        context_length: positions the model was trained for.
        norm: "rms" (RMSNorm), or "layer" (LayerNorm with a bias).
        activation: "silu", "gelu" or "gelu_tanh".
        gated_mlp: the activation of one product gates another (Shazeer 2020).
        learned_positions: each position has an embedding, which is added to the token's.
        parallel: attention and MLP read the same input, instead of one after the other.
        mlp_norm: the MLP has its own norm. Without one, in a parallel block, it shares the norm of the attention.
        post_norms: the outputs of attention and MLP are normed too.
        qkv_bias, output_bias, mlp_bias: which products have a bias.
        qk_norm: RMSNorm over each query and key head before rotation.
        embedding_scale: factor of the embeddings.
        attention_scale: factor of the products of queries and keys.
        attention_softcap, logits_softcap: values x become cap * tanh(x / cap); None for no cap.
        tied_head: the output matrix is the embedding.
        bands: an encoder reads sound, as frames of this many numbers. Two convolutions over three frames each make one
            position of two frames. None for a model that reads tokens.
        encoder: each layer attends to its output, too, between attention and MLP (Vaswani et al. 2017).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[Layer, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float
    attention_scale: float
    norm: str = "rms"
    activation: str = "silu"
    gated_mlp: bool = True
    learned_positions: bool = False
    parallel: bool = False
    mlp_norm: bool = True
    post_norms: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    tied_head: bool = False
    bands: int | None = None
    encoder: Config | None = None

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "context_length"):
            size(name, getattr(self, name), MAX_HEAD_DIM if name == "head_dim" else MAX_SIZE)
        numbers = (getattr(self, field.name) for field in fields(self) if "float" in str(field.type))
        for number in (n for n in numbers if n is not None):
            if not (math.isfinite(number) and number > 0):
                raise SpecbeamError(
                    f"the model's configuration has the number {number} for its norms, scales or caps: all must be "
                    "over 0"
                )
        if self.bands is not None:
            size("num_mel_bins", self.bands)
        for layer in self.layers:
            if layer.window is not None:
                size("sliding_window", layer.window)
        if self.num_heads % self.num_kv_heads:
            raise SpecbeamError(
                f"the model's configuration has {self.num_heads} heads and {self.num_kv_heads} key-value heads: the "
                "first must be a multiple of the second"
            )
        if any(layer.rope and layer.rope.dim > self.head_dim for layer in self.layers):
            raise SpecbeamError("the model's configuration rotates more features of a head than it has")

    @property
    def description(self) -> str:
        """The fields that differ from their defaults, as one text. Equal for equal models of two versions."""
        values = asdict(self)
        return json.dumps({f.name: values[f.name] for f in fields(self) if values[f.name] != f.default}, sort_keys=True)

    @property
    def features_shape(self) -> tuple[int, int] | None:
        """The bands and frames of the sound that the encoder reads; None without such an encoder."""
        if self.encoder is None or self.encoder.bands is None:
            return None
        return self.encoder.bands, 2 * self.encoder.context_length

    @property
    def cross_heads(self) -> tuple[int, int] | None:
        """The layers of the decoder and their heads that attend to an encoder's output; None without an encoder."""
        return None if self.encoder is None else (self.num_layers, self.num_heads)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def window(self) -> int | None:
        """The largest window, if every layer has one. None if a layer attends to all positions."""
        windows = [layer.window for layer in self.layers if layer.window is not None]
        return max(windows) if len(windows) == len(self.layers) else None


def make_layers(number: Any, tensors: Sized, layer: Callable[[int], Layer]) -> tuple[Layer, ...]:
    """The layers of a model. Refuses a number above the number of tensors, before any layer is made."""
    if size("num_layers", number) > len(tensors):
        raise SpecbeamError(
            f"the model's configuration says {number} layers, but there are only {len(tensors)} tensors"
        )
    return tuple(layer(i) for i in range(number))


def size(name: str, value: Any, most: int = MAX_SIZE) -> int:
    """The value, if it is a size. Raises SpecbeamError if it is not."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise SpecbeamError(f"the model's configuration says {name} = {value!r}, which is no size")
    return value
