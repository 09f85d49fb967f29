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

from specbeam.backends.contract import Source, TreeBatch
from specbeam.backends.torch.cache import Seen
from specbeam.backends.torch.tensors import digest_of, to_device
from specbeam.backends.transformers import CausalBackend, PassCache, TransformersBackend
from specbeam.backends.transformers.compat import DecoderPositions
from specbeam.system.interrupts import HeldInterrupts

MAX_ENCODED_TOKENS = 8192
"""Tokens that an encoder of text reads together, padding included."""
AUDIO_SETTINGS = ("encoder_attention_heads", "activation_function", "scale_embedding")
"""The settings of Whisper's encoder that its weights do not show."""


@dataclass(frozen=True, eq=False)
class EncodedSource:
    """A prompt, or audio, that the encoder has read.

    Attributes:
        states: the encoder's output, [1, tokens, features].
        keys, values: the keys and values of each layer's cross-attention, [1, heads, tokens, head_dim] each.
    """

    states: Tensor
    keys: list[Tensor]
    values: list[Tensor]


class EncoderDecoderBackend(TransformersBackend):
    """A loaded ``AutoModelForSeq2SeqLM``.

    The decoders of such models count positions. :class:`DecoderPositions` replaces them during a pass.
    """

    encoder_layers = 1  # transformers runs all of them at once
    encoder_batch = MAX_ENCODED_TOKENS
    sources_in_slots = False

    def __init__(self, model: Any) -> None:
        self._decoder = model.get_decoder()
        self._positions = DecoderPositions(self._decoder)
        if model.config.model_type == "whisper":
            self.encoder_reads = "audio"  # a transcript begins with the prompt
            self.encoder_batch = 1
            self.features_shape = model.config.num_mel_bins, 2 * model.config.max_source_positions
        else:
            self.encoder_reads = "tokens"
            start = model.generation_config.decoder_start_token_id
            start = model.generation_config.bos_token_id if start is None else start
            self.start_token_ids = [start] if isinstance(start, int) else start
        super().__init__(model)
        self.encoder_size = model.get_input_embeddings().weight.shape[1]

    def _obstacle(self, config: Any, layer_types: set[str]) -> str | None:
        reads_audio = self.encoder_reads == "audio"
        if self.model.main_input_name != "input_ids" and not reads_audio:
            return f"its encoder reads {self.model.main_input_name}, not text"
        if not self.model._supports_attention_backend and not self.model._supports_sdpa:
            return "its attention does not follow the mask it is given"
        if not self._positions.can_be_given:
            return "its decoder's positions cannot be those of a tree"
        if not (self.start_token_ids or reads_audio):
            return "it has no decoder_start_token_id"
        return None

    def _source_to_measure(self) -> EncodedSource:
        shape = self.features_shape
        nothing = np.zeros(1, np.int64) if shape is None else np.zeros(shape, np.float32)
        (source,) = self.place(self.encode([nothing], range(1), None))
        return source

    @cached_property
    def encoder_digest(self) -> str:
        """Of its encoder's settings and weights."""
        config = self.model.config.to_dict()
        if self.features_shape is None:  # other settings that differ may be the encoder's
            names = sorted(name for name in config if not name.startswith(("_", "decoder", "num_decoder")))
        else:
            names = [*AUDIO_SETTINGS]
        return digest_of(self.model.get_encoder(), " ".join(f"{name}={config.get(name)}" for name in names))

    def positions(self, source: Source) -> int:
        return len(source) if source.ndim == 1 else source.shape[1] // 2

    @torch.no_grad()
    def encode(self, sources: Sequence[Source], layers: range, begun: Sequence[Tensor] | None) -> list[Tensor]:
        """The encoder's output for each source, [positions, features]. Prompts are padded to the longest of them."""
        if self.features_shape is not None:
            inputs = [to_device(np.stack(sources), self.device).to(self.dtype)]
        else:
            ids = pad_sequence([torch.from_numpy(source) for source in sources], batch_first=True)
            lengths = torch.tensor([len(source) for source in sources])
            is_read = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
            inputs = [ids.to(self.device), is_read.to(self.device)]
        with self._one_pass:
            states: Tensor = self.model.get_encoder()(*inputs).last_hidden_state
        # A view would keep the output for all sources in memory.
        return [of[: self.positions(source)].clone() for of, source in zip(states, sources, strict=True)]

    @torch.no_grad()
    def place(self, states: Sequence[Tensor], slots: Sequence[NDArray[np.int64]] = ()) -> list[EncodedSource]:
        """What the cross-attention of each layer reads of the encoder's output for sources. It takes no slots."""
        padded = pad_sequence([*states], batch_first=True)
        # Run one dummy token to fill transformers' cross-attention cache.
        filled = EncoderDecoderCache(DynamicCache(), DynamicCache())
        with self._one_pass:
            self.model(
                decoder_input_ids=torch.zeros((len(states), 1), dtype=torch.long, device=self.device),
                encoder_outputs=BaseModelOutput(padded),
                use_cache=True,
                **{self._cache_argument: filled},
            )
        layers = filled.cross_attention_cache.layers

        def of(row: int, tensors: Sequence[Tensor]) -> list[Tensor]:
            """The part of one source, [1, heads, tokens, head_dim] each. Views would keep all sources in memory."""
            return [tensor[row : row + 1, :, : len(states[row])].clone() for tensor in tensors]

        keys, values = [layer.keys for layer in layers], [layer.values for layer in layers]
        return [EncodedSource(own[None], of(row, keys), of(row, values)) for row, own in enumerate(states)]

    def _run(self, segments: list[TreeBatch], views: list[Seen], keep: Tensor) -> Tensor:
        if self.features_shape is not None and len(segments) > 1:  # its cross-attention takes no mask
            return self._one_by_one(segments, views, keep)
        sources: list[EncodedSource] = [s.source for s in segments]
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
            wanted = keep[(keep >= start) & (keep < end)] - start
            logits.append(self._run([segment], [seen], wanted))
        return torch.cat(logits)

    def _source_mask(self, segments: list[TreeBatch]) -> Tensor | None:
        """Each node sees the source of its own tree. None if there is only one tree."""
        if len(segments) == 1:
            return None
        nodes = [len(s.tokens) for s in segments]
        tokens = [s.source.states.shape[1] for s in segments]
        trees = np.arange(len(segments))
        return self._mask(np.repeat(trees, nodes)[:, None] == np.repeat(trees, tokens))


def backend_of(model: Any) -> CausalBackend | EncoderDecoderBackend:
    """The backend for a loaded model of transformers.

    Raises:
        SpecbeamError: a model that cannot be evaluated at the nodes of a tree.
    """
    return EncoderDecoderBackend(model) if model.config.is_encoder_decoder else CausalBackend(model)
