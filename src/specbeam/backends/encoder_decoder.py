"""Encoder-decoder models of transformers (T5, Marian, ...): the encoder reads, the decoder is the tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from specbeam.backends.contract import Segment
from specbeam.backends.transformers import CausalBackend, PassCache, SlotCache, TransformersBackend
from specbeam.compat import DecoderPositions


class SourceCache(SlotCache):
    """A tree's cache, with the encoder's output for the text that it has read.

    Attributes:
        states: the encoder's output, [1, tokens, features].
        keys, values: the keys and values of each layer's cross-attention, [1, heads, tokens, head_dim] each.
    """

    states: Tensor
    keys: list[Tensor]
    values: list[Tensor]


class EncoderDecoderBackend(TransformersBackend[SourceCache]):
    """A loaded ``AutoModelForSeq2SeqLM``.

    The decoders of such models count positions. :class:`specbeam.compat.DecoderPositions` replaces them
    during a pass.
    """

    def __init__(self, model: Any) -> None:
        self._decoder = model.get_decoder()
        self._positions = DecoderPositions(self._decoder)
        start = model.generation_config.decoder_start_token_id
        start = model.config.bos_token_id if start is None else start
        self.start_token_ids: list[int] | None = [start] if isinstance(start, int) else start
        super().__init__(model)

    def _obstacle(self, config: Any, layer_types: set[str]) -> str | None:
        if self.model.main_input_name != "input_ids":
            return f"its encoder reads {self.model.main_input_name}, not text"
        if not self.model._supports_attention_backend and not self.model._supports_sdpa:
            return "its attention does not follow the mask it is given"
        if not self._positions.can_be_given:
            return "its decoder's positions cannot be those of a tree"
        if not self.start_token_ids:
            return "it has no decoder_start_token_id"
        return None

    def new_cache(self, most: int) -> SourceCache:
        return SourceCache(most)

    def _cache_to_measure(self) -> SourceCache:
        cache = self.new_cache(1)
        self.encode(cache, [0])
        return cache

    @torch.no_grad()
    def encode(self, cache: SourceCache, source: list[int]) -> None:
        ids = torch.tensor([source], device=self.device)
        read = self.model.get_encoder()(input_ids=ids, attention_mask=torch.ones_like(ids))
        self._attend_to(cache, read.last_hidden_state)

    def _attend_to(self, cache: SourceCache, states: Tensor) -> None:
        """Keep the encoder's output, [1, tokens, features], with its keys and values for cross-attention."""
        cache.states = states
        # Run one dummy token to fill transformers' cross-attention cache.
        filled = EncoderDecoderCache(DynamicCache(), DynamicCache())
        self.model(
            decoder_input_ids=torch.zeros((1, 1), dtype=torch.long, device=self.device),
            encoder_outputs=BaseModelOutput(cache.states),
            past_key_values=filled,
            use_cache=True,
        )
        layers = filled.cross_attention_cache.layers
        cache.keys, cache.values = [layer.keys for layer in layers], [layer.values for layer in layers]

    def _run(self, segments: list[Segment[SourceCache]], keep: Tensor) -> Tensor:
        caches = [s.cache for s in segments]
        crossed = DynamicCache()
        for layer in range(len(caches[0].keys)):
            keys, values = [cache.keys[layer] for cache in caches], [cache.values[layer] for cache in caches]
            crossed.update(torch.cat(keys, dim=2), torch.cat(values, dim=2), layer)
        of_nodes = torch.from_numpy(np.concatenate([s.positions for s in segments])).to(self.device)
        of_slots = torch.from_numpy(np.concatenate([s.cache.note_positions(s) for s in segments])).to(self.device)
        with self._positions.given(of_nodes, of_slots):
            out = self.model(
                decoder_input_ids=self._row([s.tokens for s in segments]),
                decoder_attention_mask=self._masks(segments),
                encoder_outputs=BaseModelOutput(torch.cat([cache.states for cache in caches], dim=1)),
                attention_mask=self._source_mask(segments),
                past_key_values=EncoderDecoderCache(PassCache(segments), crossed),
                use_cache=True,
            )
        return out.logits[0][keep]

    def _source_mask(self, segments: list[Segment[SourceCache]]) -> Tensor | None:
        """Each node sees the source text of its own tree. None if there is only one tree."""
        if len(segments) == 1:
            return None
        nodes = [len(s.tokens) for s in segments]
        tokens = [s.cache.states.shape[1] for s in segments]
        trees = np.arange(len(segments))
        return self._mask(np.repeat(trees, nodes)[:, None] == np.repeat(trees, tokens))


class EncodedBackend(EncoderDecoderBackend):
    """The same for source texts that the encoder has read already.

    Args:
        start_token_ids: the tokens that each text begins with.
        states: the encoder's output for each source text, [tokens, features] by its token ids.
    """

    def __init__(self, model: Any, start_token_ids: list[int], states: Mapping[tuple[int, ...], Tensor]) -> None:
        self._states = states
        super().__init__(model)
        self.start_token_ids = start_token_ids

    @torch.no_grad()
    def encode(self, cache: SourceCache, source: list[int]) -> None:
        states = self._states.get(tuple(source))
        if states is None:  # the token that a slot is measured with
            super().encode(cache, source)
        else:
            self._attend_to(cache, states[None])


def backend_of(model: Any) -> CausalBackend | EncoderDecoderBackend:
    """The backend for a loaded model of transformers.

    Raises:
        SpecbeamError: a model that cannot be evaluated at the nodes of a tree.
    """
    return EncoderDecoderBackend(model) if model.config.is_encoder_decoder else CausalBackend(model)
