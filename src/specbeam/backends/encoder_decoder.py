"""Encoder-decoder models of transformers (T5, Marian, ...): the encoder reads, the decoder is the tree."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from specbeam.backends.contract import Segment
from specbeam.backends.transformers import CacheOfPass, SlotCache, TransformersBackend


class SourceCache(SlotCache):
    """A tree's cache, and what its nodes need of the text the encoder has read.

    Attributes:
        states: what the encoder made of it, [1, tokens, features].
        keys, values: what each layer's cross attention makes of that, [1, heads, tokens, head_dim] each.
    """

    states: Tensor
    keys: list[Tensor]
    values: list[Tensor]


class EncoderDecoderBackend(TransformersBackend):
    """A loaded ``AutoModelForSeq2SeqLM``. The model is not changed, and may be used otherwise between passes.

    Such models take no positions: they count them. During a pass ours take their place, in the modules that turn them
    into embeddings (BART and its kin) or into biases of the attention (T5).

    Raises:
        SpecbeamError: a model that cannot be evaluated at the nodes of a tree.
    """

    def __init__(self, model: Any) -> None:
        decoder = model.get_decoder()
        self._embeds = getattr(decoder, "embed_positions", None)
        self._biases = [m for m in decoder.modules() if getattr(m, "has_relative_attention_bias", False)]
        config = model.generation_config
        start = config.decoder_start_token_id
        start = model.config.bos_token_id if start is None else start
        self.start_token_ids: list[int] | None = [start] if isinstance(start, int) else start
        super().__init__(model)

    def _check(self, config: Any, types: set[str]) -> None:
        reason = None
        if self.model.main_input_name != "input_ids":
            reason = f"its encoder reads {self.model.main_input_name}, not text"
        elif not self.model._supports_attention_backend and not self.model._supports_sdpa:
            reason = "its attention does not follow the mask it is given"
        elif not self._biases and not self._counts():
            reason = "its decoder's positions cannot be those of a tree"
        elif not self.start_token_ids:
            reason = "it has no decoder_start_token_id"
        self._refuse(reason)

    def _counts(self) -> bool:
        """Whether the decoder turns positions into embeddings in one of the ways known here."""
        parameters = [] if self._embeds is None else [*inspect.signature(self._embeds.forward).parameters]
        return "position_ids" in parameters or parameters[:2] == ["input_ids", "inputs_embeds"]

    def new_cache(self, most: int) -> SourceCache:
        return SourceCache(most)

    def _cache_to_measure(self) -> SourceCache:
        cache = self.new_cache(1)
        self.encode(cache, [0])
        return cache

    @torch.no_grad()
    def encode(self, cache: SourceCache, source: list[int]) -> None:
        ids = torch.tensor([source], device=self.device)
        cache.states = self.model.get_encoder()(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        # A pass over a token of no account makes the layers fill a cache of transformers' own.
        filled = EncoderDecoderCache(DynamicCache(), DynamicCache())
        self.model(
            decoder_input_ids=torch.zeros_like(ids[:, :1]),
            encoder_outputs=BaseModelOutput(cache.states),
            past_key_values=filled,
            use_cache=True,
        )
        layers = filled.cross_attention_cache.layers
        cache.keys, cache.values = [layer.keys for layer in layers], [layer.values for layer in layers]

    def _run(self, segments: list[Segment], keep: Tensor) -> Tensor:
        caches: list[Any] = [s.cache for s in segments]
        crossed = DynamicCache()
        for layer in range(len(caches[0].keys)):
            keys, values = [cache.keys[layer] for cache in caches], [cache.values[layer] for cache in caches]
            crossed.update(torch.cat(keys, dim=2), torch.cat(values, dim=2), layer)
        with self._at(segments):
            out = self.model(
                decoder_input_ids=self._row([s.tokens for s in segments]),
                decoder_attention_mask=self._masks(segments),
                encoder_outputs=BaseModelOutput(torch.cat([cache.states for cache in caches], dim=1)),
                attention_mask=self._sources(segments),
                past_key_values=EncoderDecoderCache(CacheOfPass(segments), crossed),
                use_cache=True,
            )
        return out.logits[0][keep]

    def _sources(self, segments: list[Segment]) -> Tensor | None:
        """What the nodes see of the texts that the encoder has read: their own."""
        if len(segments) == 1:
            return None
        nodes = [len(s.tokens) for s in segments]
        tokens = [s.cache.states.shape[1] for s in segments]  # type: ignore[attr-defined]
        own = np.arange(len(segments))
        return self._mask(np.repeat(own, nodes)[:, None] == np.repeat(own, tokens))

    @contextmanager
    def _at(self, segments: list[Segment]) -> Iterator[None]:
        """Put the nodes' positions in the place of those the model counts."""
        of_nodes = torch.from_numpy(np.concatenate([s.positions for s in segments])).to(self.device)
        known = [s.cache.note_positions(s) for s in segments]  # type: ignore[attr-defined]
        of_slots = torch.from_numpy(np.concatenate(known)).to(self.device)
        with ExitStack() as stack:
            if self._embeds is not None:
                hook = self._embeds.register_forward_hook(partial(_embed, of_nodes), with_kwargs=True)
                stack.callback(hook.remove)
            for attention in self._biases:
                distances = of_nodes[:, None] - of_slots
                attention.compute_bias = partial(_bias, attention.compute_bias, distances)
                stack.callback(delattr, attention, "compute_bias")
            yield


def _embed(positions: Tensor, module: Any, args: Any, kwargs: Any, output: Tensor) -> Tensor:
    """The embeddings at positions, int64 [n], of a module that would count them: a text that long has them all."""
    length = int(positions.max()) + 1
    parameters = inspect.signature(module.forward).parameters
    if "position_ids" in parameters:
        embeddings = module.forward(*args, **(kwargs | {"position_ids": positions}))
        return embeddings.view(1, len(positions), -1)
    token = 0 if module.padding_idx else 1  # any but padding, which is not counted
    text = torch.full((1, length), token, device=positions.device)
    return module.forward(text)[:, positions]


def _bias(compute: Any, distances: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """T5's bias [1, heads, n, slots] at distances, int64 [n, slots], from what it has for the last token of a text."""
    length = int(distances.max()) + 1
    if "past_seen_tokens" in inspect.signature(compute).parameters:
        last = compute(1, length, past_seen_tokens=length - 1)[0, :, -1]
    else:
        last = compute(length, length)[0, :, -1]
    return last.flip(-1)[:, distances.clamp(0, length - 1)][None]


def backend_of(model: Any) -> TransformersBackend:
    """The backend for a loaded model of transformers."""
    return EncoderDecoderBackend(model) if model.config.is_encoder_decoder else TransformersBackend(model)
