"""The part of a layer that reads the layer's own embeddings of tokens (Gemma 3n; Gemma Team 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from specbeam.checkpoints.parts.part import Parameters, Part, Sizes, product, size
from specbeam.errors import SpecbeamError


@dataclass(frozen=True, kw_only=True)
class PerLayerEmbedding(Part):
    """The activation of one product gates what the stem has made of the token for this layer, and one more product.

    Attributes:
        size: of an embedding.
        activation: as of an :class:`MLP`.
    """

    name: ClassVar = "per_layer_embedding"
    size: int
    activation: str = "silu"

    def __post_init__(self) -> None:
        super().__post_init__()
        size("hidden_size_per_layer_input", self.size)

    def check(self, config: Sizes, before: Part | None, earlier: Sequence[tuple[Part, ...]]) -> None:
        super().check(config, before, earlier)
        if config.per_layer_size != self.size:
            raise SpecbeamError(
                f"the model's configuration has layers that read embeddings of {config.per_layer_size} numbers, and "
                f"others that read {self.size}"
            )

    def weights(self, config: Sizes) -> Parameters:
        yield from product("gate", self.size, config.hidden_size)
        yield from product("projection", config.hidden_size, self.size)
