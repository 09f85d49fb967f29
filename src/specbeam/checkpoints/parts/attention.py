"""Attention to the nodes before (Vaswani et al. 2017), and to the output of an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from specbeam.checkpoints.parts.part import Memory, Parameter, Parameters, Part, Sizes, norm, product, size
from specbeam.checkpoints.rope import Rope
from specbeam.errors import SpecbeamError

MAX_HEAD_DIM = 2**16
"""The largest size that is believed. Rotary frequencies are lists of head_dim / 2 numbers."""
OF_KEYS = ("num_kv_heads", "head_dim", "window")
"""What is equal in an attention and in one that reads its keys and values."""


@dataclass(frozen=True, kw_only=True)
class Heads(Part):
    """The heads of an attention.

    Attributes:
        num_kv_heads: groups of query heads share a head of keys and values (Ainslie et al. 2023).
        head_dim: features of a head; num_heads * head_dim need not be the hidden size.
        scale: factor of the products of queries and keys.
        softcap: products x become softcap * tanh(x / softcap); None for no cap.
        qkv_bias, output_bias: which products have a bias.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_heads", "num_kv_heads"):
            size(name, getattr(self, name))
        size("head_dim", self.head_dim, MAX_HEAD_DIM)
        if self.num_heads % self.num_kv_heads:
            raise SpecbeamError(
                f"the model's configuration has {self.num_heads} heads and {self.num_kv_heads} key-value heads: the "
                "first must be a multiple of the second"
            )

    @property
    def query_size(self) -> int:
        """Numbers of all queries of a node."""
        return self.num_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Numbers of all keys of a node, and of all of its values."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class Attention(Heads):
    """Each node attends to its ancestors and to itself. In an encoder all positions see each other.

    Attributes:
        rope: None where keys and queries are not rotated.
        window: a node attends to this many last positions, its own included; None for all positions.
        qk_norm: what is normed before the rotation: "head" for each query and key head by itself, "all" for all
            queries of a node together and all of its keys; None for nothing. "rotated_head" stands for each head
            after the rotation.
        query_growth, query_growth_period: the factor of rotated queries at a position is 1 + query_growth *
            ln(1 + position // query_growth_period), the attention temperature tuning of Llama 4. None for no factor.
        value_norm: each head of the values is normed, without a weight.
        keys_are_values: the values are the keys before norm and rotation, so there is no product for them.
        shares_keys_of: the number of an earlier layer, whose keys and values are read in place of own ones; None where
            it has its own.
        beside_embedding: its input is the normed embedding of the node's token, then the normed hidden states. Only
            draft heads have it (:class:`specbeam.checkpoints.stems.FeatureStem`).
        sinks: a number for each query head is one more score in the softmax, and has no value (OpenAI 2025).
        output_gate: one more product, whose rows follow those of the queries, makes a gate of the output: a factor
            from 0 to 1 for each feature of a head (Qiu et al. 2025).
    """

    name: ClassVar = "attention"
    rope: Rope | None = None
    window: int | None = None
    qk_norm: str | None = None
    query_growth: float | None = None
    query_growth_period: int | None = None
    value_norm: bool = False
    keys_are_values: bool = False
    shares_keys_of: int | None = None
    sinks: bool = False
    output_gate: bool = False
    beside_embedding: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None:
            size("sliding_window", self.window)
        if self.query_growth is not None:
            size("query_growth_period", self.query_growth_period)
        if self.rope is not None and self.rope.dim > self.head_dim:
            raise SpecbeamError("the model's configuration rotates more features of a head than it has")

    def check(self, config: Sizes, before: Part | None, earlier: Sequence[tuple[Part, ...]]) -> None:
        super().check(config, before, earlier)
        if self.output_gate and (self.keys_are_values or self.shares_keys_of is not None):
            raise SpecbeamError("the model's configuration has a gate in an attention without values of its own")
        if self.shares_keys_of is None:
            return
        layer = earlier[self.shares_keys_of] if 0 <= self.shares_keys_of < len(earlier) else ()
        source = next((part for part in layer if isinstance(part, Attention) and part.shares_keys_of is None), None)
        if source is None or any(getattr(source, name) != getattr(self, name) for name in OF_KEYS):
            raise SpecbeamError(
                f"the model's configuration lets layer {len(earlier)} read the keys of layer {self.shares_keys_of}, "
                "which is no earlier layer with keys and values of its own, of the same size, number and window"
            )

    def memory(self, config: Sizes) -> Memory:
        return Memory(2 * self.key_size if self.shares_keys_of is None else 0, self.window)

    def weights(self, config: Sizes) -> Parameters:
        hidden, own = config.hidden_size * (2 if self.beside_embedding else 1), self.shares_keys_of is None
        queries = self.query_size * (2 if self.output_gate else 1)
        if not own:
            yield from product("query", self.query_size, hidden, self.qkv_bias)
        elif self.keys_are_values:
            yield from product("query_key", (self.query_size, self.key_size), hidden, self.qkv_bias)
        else:
            yield from product("qkv", (queries, self.key_size, self.key_size), hidden, self.qkv_bias)
        yield from product("output", config.hidden_size, self.query_size, self.output_bias)
        if self.qk_norm:
            yield from norm("q_norm", self.query_size if self.qk_norm == "all" else self.head_dim, config)
        if self.qk_norm and own:
            yield from norm("k_norm", self.key_size if self.qk_norm == "all" else self.head_dim, config)
        if self.sinks:
            yield "sinks.weight", Parameter((self.num_heads,))


@dataclass(frozen=True, kw_only=True)
class CrossAttention(Heads):
    """Each node attends to the whole output of the encoder.

    It follows an :class:`Attention` with as many heads of keys and values, of the same size. A slot has a token of the
    text or a position of the source, and never both. So both parts keep theirs in one place.
    """

    name: ClassVar = "cross_attention"

    def check(self, config: Sizes, before: Part | None, earlier: Sequence[tuple[Part, ...]]) -> None:
        super().check(config, before, earlier)
        if config.encoder is None:
            raise SpecbeamError("the model's configuration has cross-attention, but no encoder")
        alike = isinstance(before, Attention) and (before.num_kv_heads, before.head_dim)
        if alike != (self.num_kv_heads, self.head_dim):
            raise SpecbeamError(
                "the model's configuration has cross-attention that does not follow an attention with as many "
                "key-value heads of the same size"
            )

    def weights(self, config: Sizes) -> Parameters:
        assert config.encoder is not None
        yield from product("query", self.query_size, config.hidden_size, self.qkv_bias)
        yield from product("key_value", (self.key_size, self.key_size), config.encoder.hidden_size, self.qkv_bias)
        yield from product("output", config.hidden_size, self.query_size, self.output_bias)
