"""The gated short convolution of LFM2 (Liquid AI 2025), which stands in place of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specbeam.checkpoints.parts.part import Memory, Parameter, Parameters, Part, Sizes, product, size

MAX_KERNEL_SIZE = 16
"""The most positions that a filter may cover. It is a few in all models."""


@dataclass(frozen=True, kw_only=True)
class ShortConvolution(Part):
    """A convolution over the last positions, feature by feature, between two gates.

    One product of a node's hidden states h makes b, c and x. The node keeps b * x. Its output is the product of
    c * (the sum over the last positions of filter * what their nodes keep).

    Attributes:
        kernel_size: the positions that a filter covers, the node's own included.
    """

    name: ClassVar = "short_convolution"
    kernel_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        size("kernel_size", self.kernel_size, MAX_KERNEL_SIZE)

    def memory(self, config: Sizes) -> Memory:
        return Memory(config.hidden_size, self.kernel_size)

    def weights(self, config: Sizes) -> Parameters:
        hidden = config.hidden_size
        yield from product("input", 3 * hidden, hidden)
        yield "filter.weight", Parameter((hidden, self.kernel_size), min_bits=32)
        yield from product("output", hidden, hidden)
