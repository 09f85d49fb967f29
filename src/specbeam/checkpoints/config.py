"""The configuration of a transformer, one class for all architectures and for encoders."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any

from specbeam.checkpoints.parts.attention import CrossAttention
from specbeam.checkpoints.parts.part import Memory, Part, check_numbers, size
from specbeam.checkpoints.parts.per_layer_embedding import PerLayerEmbedding
from specbeam.checkpoints.stems import PLAIN_STEM, AudioStem, Stem
from specbeam.errors import SpecbeamError

Layer = tuple[Part, ...]
"""The parts of a layer, in their order."""


@dataclass(frozen=True)
class Config:
    """A decoder, alone or with an encoder; or the encoder, all of whose positions see each other.

    Attributes:
        vocab_size: an encoder that reads audio has its decoder's.
        context_length: positions the model was trained for.
        norm: "rms" (RMSNorm), or "layer" (LayerNorm with a bias).
        final_norm: the hidden states after the last layer are normed.
        stem: what the model reads, and what the first layer gets of it.
        logits_scale: factor of the logits.
        logits_softcap: the scaled logits x become cap * tanh(x / cap); None for no cap.
        tied_head: the output matrix is the embedding. A draft head then has that of its target.
        head_size: the tokens that have logits, where a draft head has fewer than its vocabulary; None for all.
        encoder: cross-attention is to its output.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    context_length: int
    norm_eps: float
    norm: str = "rms"
    final_norm: bool = True
    stem: Stem = PLAIN_STEM
    logits_scale: float = 1.0
    logits_softcap: float | None = None
    tied_head: bool = False
    head_size: int | None = None
    encoder: Config | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "context_length"):
            size(name, getattr(self, name))
        check_numbers(self)
        if any(len({part.name for part in layer}) < len(layer) for layer in self.layers):
            raise SpecbeamError("the model's configuration has a layer with two parts of one kind")
        for layer in self.layers:
            if not layer:
                raise SpecbeamError("the model's configuration has a layer without parts")
        for number, layer in enumerate(self.layers):
            for before, part in zip((None, *layer), layer, strict=False):
                part.check(self, before, self.layers[:number])

    @property
    def features_shape(self) -> tuple[int, int] | None:
        """The mel bins and frames of the audio that the encoder reads; None without such an encoder."""
        if self.encoder is None or not isinstance(self.encoder.stem, AudioStem):
            return None
        return self.encoder.stem.bands, 2 * self.encoder.context_length

    @property
    def cross_heads(self) -> tuple[int, int] | None:
        """The layers of the decoder and their heads that attend to an encoder's output; None without an encoder."""
        heads = [part.num_heads for part in self.parts if isinstance(part, CrossAttention)]
        return (self.num_layers, heads[0]) if heads else None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def per_layer_size(self) -> int | None:
        """The size of the embeddings that each layer has of its own; None without such embeddings."""
        return next((part.size for part in self.parts if isinstance(part, PerLayerEmbedding)), None)

    @property
    def parts(self) -> Iterator[Part]:
        """The parts of all layers, in their order."""
        return (part for layer in self.layers for part in layer)

    @property
    def memories(self) -> list[Memory]:
        """What each part that keeps something of a token keeps, in their order."""
        memories = (part.memory(self) for part in self.parts)
        return [memory for memory in memories if memory.numbers]

    @property
    def window(self) -> int | None:
        """How far back the farthest part reads. None if a part reads all positions."""
        reaches = [memory.reach for memory in self.memories]
        return max((reach for reach in reaches if reach is not None), default=None) if None not in reaches else None


def layer_count(number: Any, tensors: Sized) -> int:
    """The number of layers. Refuses a number above the number of tensors, before any layer is made."""
    if size("num_layers", number) > len(tensors):
        raise SpecbeamError(
            f"the model's configuration says {number} layers, but there are only {len(tensors)} tensors"
        )
    return int(number)
