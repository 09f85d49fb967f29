"""Mamba 2 (Dao and Gu 2024): a state space layer, which stands in place of attention or beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specbeam.checkpoints.parts.attention import MAX_HEAD_DIM
from specbeam.checkpoints.parts.gated_delta_net import LANES
from specbeam.checkpoints.parts.part import Memory, Parameter, Parameters, Part, Sizes, product, size
from specbeam.checkpoints.parts.short_convolution import MAX_KERNEL_SIZE
from specbeam.errors import SpecbeamError


@dataclass(frozen=True, kw_only=True)
class Mamba2(Part):
    """Each head has a state S [state_size, head_dim], which a node changes to S = e^(decay * dt) S + B (dt x)^T.

    The head's output is S^T C + skip * x. A short convolution with a SiLU makes x, B and C of a product. Other rows of
    the product make the gate z, and the step dt = softplus(step + its row) of each head. The output is multiplied by
    SiLU(z), and normed by groups.

    Attributes:
        num_heads, head_dim: of x.
        num_groups: groups of heads share B and C, each [state_size]. They are also the groups of the norm.
        kernel_size: the positions that a filter of the convolution covers, the node's own included.
        convolution_bias: the convolution has a bias.
        group_norm: the output is normed.
        norm_before_gate: it is normed before it is multiplied by SiLU(z), and not afterwards.
        min_step, max_step: limits of dt; None for no limit.
        gate_scale, value_scale, key_scale, query_scale, step_scale: factors of the rows of the product that make z, x,
            B, C and dt.
    """

    name: ClassVar = "mamba2"
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel_size: int
    convolution_bias: bool = True
    group_norm: bool = True
    norm_before_gate: bool = False
    min_step: float | None = None
    max_step: float | None = None
    gate_scale: float = 1.0
    value_scale: float = 1.0
    key_scale: float = 1.0
    query_scale: float = 1.0
    step_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_heads", "num_groups"):
            size(name, getattr(self, name))
        for name in ("head_dim", "state_size"):
            if size(name, getattr(self, name), MAX_HEAD_DIM) % LANES:
                raise SpecbeamError(
                    f"the model's configuration says {name} = {getattr(self, name)} for Mamba 2: it must be a multiple "
                    f"of {LANES}"
                )
        size("kernel_size", self.kernel_size, MAX_KERNEL_SIZE)
        if self.num_heads % self.num_groups:
            raise SpecbeamError(
                f"the model's configuration has {self.num_heads} heads and {self.num_groups} groups of Mamba 2: the "
                "first must be a multiple of the second"
            )

    @property
    def title(self) -> str:
        return "Mamba 2"

    @property
    def inner_size(self) -> int:
        """Numbers of x of a node."""
        return self.num_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Numbers of B of a node, and of C."""
        return self.num_groups * self.state_size

    @property
    def convolved_size(self) -> int:
        """Numbers of x, B and C together."""
        return self.inner_size + 2 * self.key_size

    def memory(self, config: Sizes) -> Memory:
        """What is convolved, B, dt x and decays. All positions count, because states are made of them."""
        return Memory(self.convolved_size + self.key_size + self.inner_size + self.num_heads)

    def weights(self, config: Sizes) -> Parameters:
        hidden = config.hidden_size
        yield from product("input", self.inner_size + self.convolved_size + self.num_heads, hidden)
        yield from product("filter", self.convolved_size, self.kernel_size, self.convolution_bias, min_bits=32)
        for name in ("decay", "step", "skip"):
            yield f"{name}.weight", Parameter((self.num_heads,))
        if self.group_norm:
            yield "norm.weight", Parameter((self.inner_size,))
        yield from product("output", hidden, self.inner_size)
