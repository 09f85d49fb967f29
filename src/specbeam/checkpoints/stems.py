"""What comes before the first layer of a model, and says what the model reads: tokens or audio."""

from __future__ import annotations

from dataclasses import dataclass

from specbeam.checkpoints.parts.part import Parameter, Parameters, Sizes, check_numbers, norm, product, size

FILTER_FRAMES = 3
"""The frames that a convolution's filter covers."""


@dataclass(frozen=True, kw_only=True)
class TokenStem:
    """Each token has an embedding.

    Where layers read embeddings of their own (:class:`PerLayerEmbedding`), a token has one for each layer, too. A
    projection of the token's embedding is normed and added to these.

    Attributes:
        scale: factor of the embeddings.
        learned_positions: each position has an embedding, too, which is added to the token's.
    """

    scale: float = 1.0
    learned_positions: bool = False

    def __post_init__(self) -> None:
        check_numbers(self)

    def parameters(self, config: Sizes) -> Parameters:
        """Its parameters, in the order of packed weights."""
        yield "embedding.weight", Parameter((config.vocab_size, config.hidden_size), min_bits=8)
        if self.learned_positions:
            min_bits = 8 if config.encoder is None else 32  # a decoder with an encoder has few positions
            yield "positions.weight", Parameter((config.context_length, config.hidden_size), min_bits=min_bits)
        if config.per_layer_size is not None:
            rows = config.num_layers * config.per_layer_size
            yield "per_layer_embedding.weight", Parameter((config.vocab_size, rows), min_bits=8, mapped=True)
            yield from product("per_layer_projection", rows, config.hidden_size)
            yield from norm("per_layer_norm", config.per_layer_size, config)


@dataclass(frozen=True, kw_only=True)
class AudioStem:
    """Two convolutions over three frames of audio each make one position of two frames. Each position is embedded.

    Attributes:
        bands: mel bins of a frame.
    """

    bands: int

    def __post_init__(self) -> None:
        size("num_mel_bins", self.bands)

    def parameters(self, config: Sizes) -> Parameters:
        """Its parameters. The filters of a convolution are rows, frame by frame."""
        hidden = config.hidden_size
        yield from product("conv1", hidden, FILTER_FRAMES * self.bands, bias=True, min_bits=32)
        yield from product("conv2", hidden, FILTER_FRAMES * hidden, bias=True, min_bits=32)
        yield "positions.weight", Parameter((config.context_length, hidden), min_bits=32)


@dataclass(frozen=True, kw_only=True)
class FeatureStem:
    """A draft head reads a token, and the features of the token before it: hidden states of its target model.

    Attributes:
        layers: the hidden states that it reads, each by the number of layers before it. The number after that of all
            layers stands for the states after the last norm. None for three layers, as EAGLE-3 has them.
        feature_size: numbers of a feature.
        joins_embedding: its first product reads the normed embedding of the token beside the normed feature
            (multi-token prediction). Without that, the product reads the feature, and attention reads the embedding
            beside its own input (EAGLE-3).
        own_embedding: it has an embedding of its own. Others have the target's.
        scale: factor of the embeddings.
    """

    layers: tuple[int, ...] | None = None
    feature_size: int
    joins_embedding: bool
    own_embedding: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        size("feature_size", self.feature_size)
        check_numbers(self)

    def parameters(self, config: Sizes) -> Parameters:
        """Its parameters, in the order of packed weights."""
        hidden = config.hidden_size
        if self.own_embedding:
            yield "embedding.weight", Parameter((config.vocab_size, hidden), min_bits=8)
        yield from product("fc", hidden, self.feature_size + (hidden if self.joins_embedding else 0))
        yield from norm("embedding_norm", hidden, config)
        if self.joins_embedding:
            yield from norm("feature_norm", self.feature_size, config)

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The hidden states that it reads of a target with this many layers."""
        return (2, num_layers // 2, num_layers - 3) if self.layers is None else self.layers


Stem = TokenStem | AudioStem | FeatureStem
PLAIN_STEM = TokenStem()
"""Of most models: an embedding of each token alone."""
