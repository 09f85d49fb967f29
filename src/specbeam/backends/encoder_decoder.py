"""Encoder-decoder models of transformers (T5, Marian, Whisper, ...): the encoder reads, the decoder is the tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from specbeam.backends.compat import DecoderPositions
from specbeam.backends.contract import TreeBatch
from specbeam.backends.torch.cache import Seen
from specbeam.backends.torch.digest import digest_of
from specbeam.backends.torch.transfer import to_device
from specbeam.backends.transformers import CausalBackend, PassCache, TransformersBackend
from specbeam.system.interrupts import HeldInterrupts

MAX_ENCODED_TOKENS = 8192
"""Tokens that the encoder reads together, padding included. A longer prompt is read alone."""


@dataclass(frozen=True, eq=False)
class Source:
    """A prompt, or sound, that the encoder has read.

    Attributes:
        states: the encoder's output, [1, tokens, features].
        keys, values: the keys and values of each layer's cross-attention, [1, heads, tokens, head_dim] each.
    """

    states: Tensor
    keys: list[Tensor]
    values: list[Tensor]


class EncoderDecoderBackend(TransformersBackend):
    """A loaded ``AutoModelForSeq2SeqLM``.

    The decoders of such models count positions. :class:`specbeam.backends.compat.DecoderPositions` replaces them
    during a pass.
    """

    def __init__(self, model: Any) -> None:
        self._decoder = model.get_decoder()
        self._positions = DecoderPositions(self._decoder)
        if model.config.model_type == "whisper":
            positions = model.config.max_source_positions
            self.features_shape = model.config.num_mel_bins, 2 * positions
            self.states_shape, self.encoder_layers = (positions, model.config.d_model), 1
        start = model.generation_config.decoder_start_token_id
        start = model.generation_config.bos_token_id if start is None else start
        self.start_token_ids: list[int] | None = [start] if isinstance(start, int) else start
        if self.features_shape is not None:  # a transcript begins with the prompt
            self.start_token_ids = None
        super().__init__(model)

    def _obstacle(self, config: Any, layer_types: set[str]) -> str | None:
        reads_sound = self.features_shape is not None
        if self.model.main_input_name != "input_ids" and not reads_sound:
            return f"its encoder reads {self.model.main_input_name}, not text"
        if not self.model._supports_attention_backend and not self.model._supports_sdpa:
            return "its attention does not follow the mask it is given"
        if not self._positions.can_be_given:
            return "its decoder's positions cannot be those of a tree"
        if not (self.start_token_ids or reads_sound):
            return "it has no decoder_start_token_id"
        return None

    def _source_to_measure(self) -> Source:
        if self.features_shape is not None:
            return self.place(self.states(np.zeros(self.features_shape, np.float32)))
        (source,) = self.encode([[0]])
        return source

    def source_slots(self, source: Any) -> int:
        return 0

    @torch.no_grad()
    def encode(self, sources: Sequence[Any], slots: Sequence[NDArray[np.int64]] = ()) -> list[Source]:
        found: dict[int, Source] = {}
        with self._one_pass:
            for numbers in _of_like_length(sources):
                together = [sources[number] for number in numbers]
                states = self._states_of(together)
                read = [of[: len(source)] for of, source in zip(states, together, strict=True)]
                found.update(zip(numbers, self._attended(read), strict=True))
        return [found[number] for number in range(len(sources))]

    def attended(self, states: list[Tensor]) -> list[Source]:
        """Prompts as the encoder has read them, from its output for each of them, [tokens, features]."""
        with self._one_pass:
            return self._attended(states)

    @cached_property
    def encoder_digest(self) -> str:
        """Of its encoder's settings and weights."""
        config = self.model.config
        names = ("encoder_attention_heads", "activation_function", "scale_embedding")
        about = " ".join(f"{name}={getattr(config, name, None)}" for name in names)
        return digest_of(self.model.get_encoder(), about)

    @torch.no_grad()
    def states(self, features: NDArray[np.float32]) -> Tensor:
        """The encoder's output for features of sound [bands, frames], [positions, features]."""
        read = to_device(features[None], self.device).to(self.dtype)
        with self._one_pass:
            states: Tensor = self.model.get_encoder()(read).last_hidden_state[0]
        return states

    def states_after(self, features: NDArray[np.float32], layers: range, begun: None) -> Tensor:
        """All of the encoder's output: transformers runs all layers at once."""
        return self.states(features)

    @torch.no_grad()
    def place(self, states: Tensor, slots: NDArray[np.int64] | None = None) -> Source:
        """Sound as the encoder has read it, from its output [positions, features]. It takes no slots."""
        return self.attended([states])[0]

    def _states_of(self, sources: list[list[int]]) -> Tensor:
        """The encoder's output for some prompts, [prompts, tokens of the longest, features]."""
        ids = pad_sequence([torch.tensor(source) for source in sources], batch_first=True)
        lengths = torch.tensor([len(source) for source in sources])
        is_read = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        encoder = self.model.get_encoder()
        states: Tensor = encoder(
            input_ids=ids.to(self.device), attention_mask=is_read.to(self.device)
        ).last_hidden_state
        return states

    def _attended(self, prompts: list[Tensor]) -> list[Source]:
        states = pad_sequence(prompts, batch_first=True)
        # Run one dummy token to fill transformers' cross-attention cache.
        filled = EncoderDecoderCache(DynamicCache(), DynamicCache())
        self.model(
            decoder_input_ids=torch.zeros((len(prompts), 1), dtype=torch.long, device=self.device),
            encoder_outputs=BaseModelOutput(states),
            use_cache=True,
            **{self._cache_argument: filled},
        )
        layers = filled.cross_attention_cache.layers

        def own(padded: Tensor, row: int, dim: int) -> Tensor:
            """One prompt's part of the output, [1, ...]. A view would keep the whole output in memory."""
            return padded[row : row + 1].narrow(dim, 0, len(prompts[row])).clone()

        return [
            Source(
                own(states, row, 1),
                [own(layer.keys, row, 2) for layer in layers],
                [own(layer.values, row, 2) for layer in layers],
            )
            for row in range(len(prompts))
        ]

    def _run(self, segments: list[TreeBatch], views: list[Seen], keep: Tensor) -> Tensor:
        if self.features_shape is not None and len(segments) > 1:  # its cross-attention takes no mask
            return self._one_by_one(segments, views, keep)
        sources: list[Source] = [s.source for s in segments]
        crossed = DynamicCache()
        for layer in range(len(sources[0].keys)):
            keys, values = [source.keys[layer] for source in sources], [source.values[layer] for source in sources]
            crossed.update(torch.cat(keys, dim=2), torch.cat(values, dim=2), layer)
        of_nodes = to_device(np.concatenate([s.positions for s in segments]), self.device)
        of_slots = to_device(np.concatenate([seen.positions for seen in views]), self.device)
        interrupts = HeldInterrupts()  # no interrupt leaves the positions of this pass in the model
        with interrupts, self._positions.given(of_nodes, of_slots), interrupts.released():
            out = self.model(
                decoder_input_ids=self._row([s.tokens for s in segments]),
                decoder_attention_mask=self._masks(segments, views),
                encoder_outputs=BaseModelOutput(torch.cat([source.states for source in sources], dim=1)),
                attention_mask=self._source_mask(segments),
                use_cache=True,
                **{self._cache_argument: EncoderDecoderCache(PassCache(self._store, segments, views), crossed)},
            )
        return out.logits[0][keep]

    def _one_by_one(self, segments: list[TreeBatch], views: list[Seen], keep: Tensor) -> Tensor:
        starts = np.cumsum([0, *(len(s.tokens) for s in segments)]).tolist()
        logits = []
        for segment, seen, start, end in zip(segments, views, starts, starts[1:], strict=False):
            own = keep[(keep >= start) & (keep < end)] - start
            logits.append(self._run([segment], [seen], own))
        return torch.cat(logits)

    def _source_mask(self, segments: list[TreeBatch]) -> Tensor | None:
        """Each node sees the source of its own tree. None if there is only one tree."""
        if len(segments) == 1:
            return None
        nodes = [len(s.tokens) for s in segments]
        tokens = [s.source.states.shape[1] for s in segments]
        trees = np.arange(len(segments))
        return self._mask(np.repeat(trees, nodes)[:, None] == np.repeat(trees, tokens))


def _of_like_length(sources: Sequence[list[int]]) -> list[list[int]]:
    """The numbers of prompts, in groups that the encoder reads together. Padding at most doubles a group's tokens."""
    groups: list[list[int]] = []
    for number in sorted(range(len(sources)), key=lambda number: -len(sources[number])):
        length = len(sources[number])
        if groups:
            longest = len(sources[groups[-1][0]])
            if 2 * length >= longest and (len(groups[-1]) + 1) * longest <= MAX_ENCODED_TOKENS:
                groups[-1].append(number)
                continue
        groups.append([number])
    return groups


def backend_of(model: Any) -> CausalBackend | EncoderDecoderBackend:
    """The backend for a loaded model of transformers.

    Raises:
        SpecbeamError: a model that cannot be evaluated at the nodes of a tree.
    """
    return EncoderDecoderBackend(model) if model.config.is_encoder_decoder else CausalBackend(model)
