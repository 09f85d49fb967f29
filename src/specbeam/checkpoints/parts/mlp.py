"""The feed-forward network of a layer, and one that stands beside experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specbeam.checkpoints.parts.part import Parameters, Part, Sizes, product, size


@dataclass(frozen=True, kw_only=True)
class MLP(Part):
    """Two products with an activation between them.

    Attributes:
        intermediate_size: numbers between the products.
        activation: "silu", "gelu", "gelu_tanh", or "relu2" for a squared ReLU (So et al. 2021).
        gated: the activation of one product gates another (Shazeer 2020).
        gate_scale: factor of the product whose activation is taken.
        bias: the products have biases.
    """

    name: ClassVar = "mlp"
    intermediate_size: int
    activation: str = "silu"
    gated: bool = True
    gate_scale: float = 1.0
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


@dataclass(frozen=True, kw_only=True)
class SharedExpert(MLP):
    """An MLP that all nodes have beside the experts that a router gives each (Dai et al. 2024).

    Attributes:
        output_gate: its output is multiplied by the sigmoid of one more product of its input (Qwen Team 2024).
    """

    name: ClassVar = "shared_expert"
    norm: bool = False
    parallel: bool = True
    output_gate: bool = False

    def weights(self, config: Sizes) -> Parameters:
        yield from super().weights(config)
        if self.output_gate:
            yield from product("output_gate", 1, config.hidden_size, min_bits=32)
