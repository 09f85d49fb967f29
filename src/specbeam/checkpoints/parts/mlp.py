"""The feed-forward network of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specbeam.checkpoints.parts.part import Parameters, Part, Sizes, product, size


@dataclass(frozen=True, kw_only=True)
class MLP(Part):
    """Two products with an activation between them.

    Attributes:
        intermediate_size: numbers between the products.
        activation: "silu", "gelu" or "gelu_tanh".
        gated: the activation of one product gates another (Shazeer 2020).
        bias: the products have biases.
    """

    name: ClassVar = "mlp"
    intermediate_size: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        size("intermediate_size", self.intermediate_size)

    def weights(self, config: Sizes) -> Parameters:
        inner = self.intermediate_size
        if self.gated:
            yield from product("gate_up", (inner, inner), config.hidden_size, self.bias)
        else:
            yield from product("up", inner, config.hidden_size, self.bias)
        yield from product("down", config.hidden_size, inner, self.bias)
