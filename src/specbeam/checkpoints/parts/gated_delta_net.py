"""Gated DeltaNet (Yang et al. 2024): linear attention by the gated delta rule, which stands in place of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specbeam.checkpoints.parts.attention import MAX_HEAD_DIM
from specbeam.checkpoints.parts.part import Memory, Parameter, Parameters, Part, Sizes, norm, product, size
from specbeam.checkpoints.parts.short_convolution import MAX_KERNEL_SIZE
from specbeam.errors import SpecbeamError

LANES = 16
"""The kernels read the features of a head by as many at a time."""


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet(Part):
    """Each value head has a state S [key_dim, value_dim], which a node changes to S = e^g S + k u^T.

    Here u = beta (v - e^g S^T k), and the head's output is the new S^T q. A short convolution with a SiLU makes q, k
    and v of a product, and q and k become unit vectors. Other rows of the product make beta = sigmoid(b) and the decay
    g = decay * softplus(a + step) of each value head, and the gate: the output of each head is normed and multiplied
    by SiLU(gate).

    Attributes:
        num_key_heads: groups of value heads share a key and a query.
        key_dim, value_dim: features of a head.
        kernel_size: the positions that a filter of the convolution covers, the node's own included.
        tiled: value head h reads key head h % num_key_heads, as in GGUF files, and not h // (size of a group).
    """

    name: ClassVar = "gated_delta_net"
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    tiled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_key_heads", "num_value_heads"):
            size(name, getattr(self, name))
        for name in ("key_dim", "value_dim"):
            if size(name, getattr(self, name), MAX_HEAD_DIM) % LANES:
                raise SpecbeamError(
                    f"the model's configuration says {name} = {getattr(self, name)} for linear attention: it must be a "
                    f"multiple of {LANES}"
                )
        size("kernel_size", self.kernel_size, MAX_KERNEL_SIZE)
        if self.num_value_heads % self.num_key_heads:
            raise SpecbeamError(
                f"the model's configuration has {self.num_value_heads} value heads and {self.num_key_heads} key heads "
                "of linear attention: the first must be a multiple of the second"
            )

    @property
    def key_size(self) -> int:
        """Numbers of all keys of a node, and of all of its queries."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Numbers of all values of a node."""
        return self.num_value_heads * self.value_dim

    @property
    def convolved_size(self) -> int:
        """Numbers of queries, keys and values together."""
        return 2 * self.key_size + self.value_size

    def memory(self, config: Sizes) -> Memory:
        """What is convolved, keys, u and decays. All positions count, because states are made of them."""
        return Memory(self.convolved_size + self.key_size + self.value_size + self.num_value_heads)

    def weights(self, config: Sizes) -> Parameters:
        hidden = config.hidden_size
        yield from product("input", (self.convolved_size, self.value_size), hidden)
        yield from product("rates", (self.num_value_heads, self.num_value_heads), hidden, min_bits=8)
        yield "filter.weight", Parameter((self.convolved_size, self.kernel_size), min_bits=32)
        yield "decay.weight", Parameter((self.num_value_heads,))
        yield "step.weight", Parameter((self.num_value_heads,))
        yield from norm("norm", self.value_dim, config)
        yield from product("output", hidden, self.value_size)
