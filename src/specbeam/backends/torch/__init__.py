"""The ``torch`` backend: our own transformer on any device PyTorch has. The reference for the other backends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from math import prod
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbeam.backends.contract import Source, TreeBatch, logits_wanted
from specbeam.backends.devices import choose_device, choose_dtype
from specbeam.backends.torch.cache import KeyValues, index, last_slots, seen_by
from specbeam.backends.torch.parts.part import TreeSegment
from specbeam.backends.torch.sampling import TensorBackend
from specbeam.backends.torch.tensors import are_finite, digest_of, to_device
from specbeam.backends.torch.transformer import Transformer
from specbeam.checkpoints.checkpoint import Checkpoint, Piece, read_all
from specbeam.checkpoints.description import description
from specbeam.checkpoints.parameters import expert_use, not_finite, parameters
from specbeam.errors import SpecbeamError

PIECE_ELEMENTS = 1 << 20
"""Elements read at once: they stay in a processor's cache while they are dequantized."""


class TorchBackend(TensorBackend):
    """A checkpoint loaded into a :class:`Transformer`.

    Args:
        device: "auto" (the first CUDA device if there is one, else the CPU) or a PyTorch device.
        dtype: "float32", "bfloat16", "float16", or "auto". That is float32 on a CPU, elsewhere the checkpoint's own
            half precision, or bfloat16.

    Raises:
        SpecbeamError: no such device or dtype, or a checkpoint that cannot be loaded.
    """

    name = "torch"
    encoder_batch = 1
    sources_in_slots = True

    def __init__(self, checkpoint: Checkpoint, device: str = "auto", dtype: str = "auto") -> None:
        self.device = choose_device(device)
        self.precision = choose_dtype(dtype, self.device, checkpoint.dtype)
        self.dtype: torch.dtype = getattr(torch, self.precision)
        self._checkpoint = checkpoint
        config = checkpoint.config
        self.vocab_size = config.vocab_size
        self.context_length = config.context_length
        self.window = config.window
        self.expert_use = expert_use(config)
        self.features_shape = config.features_shape
        self.cross_heads = config.cross_heads
        if (encoder := config.encoder) is not None:
            self.encoder_reads = "audio"
            self.encoder_layers, self.encoder_size = encoder.num_layers, encoder.hidden_size
        with torch.device("meta"):
            self.model = Transformer(config)
        load_weights(self.model, checkpoint, self.device, self.dtype)
        self._store = self.new_store()
        self._one_pass = Lock()  # the KV cache may move when it grows
        self.slot_bytes = self._store.slot_bytes

    def new_store(self) -> KeyValues:
        """An empty KV cache for this model."""
        return KeyValues((part.kept for part in self.model.parts if part.kept), self.dtype, self.device)

    def reserve(self, slots: int) -> None:
        with self._one_pass:
            self._store.reserve(slots)

    def positions(self, source: Source) -> int:
        return source.shape[1] // 2

    @cached_property
    def encoder_digest(self) -> str:
        """Of its encoder's configuration and weights."""
        encoder, config = self.model.encoder, self.model.config.encoder
        assert encoder is not None
        assert config is not None
        return digest_of(encoder, description(config))

    @torch.inference_mode()
    def encode(self, sources: Sequence[Source], layers: range, begun: Sequence[Tensor] | None) -> list[Tensor]:
        """What some layers make of each source, after those before them, [positions, features]."""
        encoder = self.model.encoder
        assert encoder is not None
        if begun is None:
            begun = [encoder.begin(to_device(source, self.device).to(self.dtype)) for source in sources]
        return [encoder(x, layers) for x in begun]

    @torch.inference_mode()
    def place(self, states: Sequence[Tensor], slots: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
        """Let slots hold the keys and values of the encoder's output. Returns the slots."""
        with self._one_pass:
            for one, own in zip(states, slots, strict=True):
                self.model.place(one, self._store, index(own, self.device))
        return [*slots]

    @torch.inference_mode()
    def forward(self, segments: list[TreeBatch]) -> Tensor:
        tokens = np.concatenate([s.tokens for s in segments])
        positions = np.concatenate([s.positions for s in segments])
        starts = np.cumsum([0, *(len(s.tokens) for s in segments)])
        wanted = np.concatenate([start + s.wanted for start, s in zip(starts, segments, strict=False)])
        inputs = [to_device(array, self.device) for array in (tokens, positions, wanted)]
        vocab = logits_wanted(segments, self.vocab_size)
        with self._one_pass:
            parts = [self._part(s, start) for s, start in zip(segments, starts.tolist(), strict=False)]
            return self.model(inputs[0], inputs[1], parts, inputs[2], vocab, self._looked_up(tokens)).float()

    def _looked_up(self, tokens: NDArray[np.int64]) -> Tensor | None:
        """The embeddings that tokens have for all layers, from the checkpoint's file; None if they have none."""
        if self.model.config.per_layer_size is None:
            return None
        (source,) = self._checkpoint.sources("per_layer_embedding.weight")
        different, places = np.unique(tokens, return_inverse=True)
        rows = torch.from_numpy(np.ascontiguousarray(self._checkpoint.rows(source, different)[places]))
        return rows.to(self.device, self.dtype)

    def _part(self, segment: TreeBatch, start: int) -> TreeSegment:
        """A segment whose nodes begin at a row of the batch."""
        seen = seen_by(segment)
        masks = {window: seen.near(segment.positions, window) for window in self.model.windows}
        return TreeSegment(
            self._store,
            rows=slice(start, start + len(segment.tokens)),
            slots=index(segment.slots, self.device),
            seen=index(seen.slots, self.device),
            visible={w: None if mask is None else to_device(mask, self.device) for w, mask in masks.items()},
            last={reach: to_device(last_slots(segment, reach), self.device) for reach in self.model.reaches},
            source=None if segment.source is None else index(segment.source, self.device),
            probe=None if segment.probe is None else (segment.probe, segment.positions),
        )


def load_weights(model: Transformer, checkpoint: Checkpoint, device: str, dtype: torch.dtype) -> None:
    """Fill a model that lies on the meta device with the tensors of a checkpoint.

    The parameters are made in their dtype on their device and filled piece by piece. So memory holds them and a few
    pieces, never a second copy.

    Raises:
        SpecbeamError: a tensor is missing, unknown or has another shape than the configuration asks for, or its weights
            are not finite.
    """
    checkpoint.check_tensors(parameters(checkpoint.config))
    model.to(dtype).to_empty(device=device)
    model.frequencies = {rope: frequencies.to(device) for rope, frequencies in model.frequencies.items()}
    pieces = [piece for name, p in model.named_parameters() for piece in _pieces(checkpoint, name, p.data)]
    read_all(pieces, "loading weights")


def _pieces(checkpoint: Checkpoint, name: str, parameter: Tensor) -> Iterator[Piece]:
    """Jobs that each fill some rows of a parameter."""
    row = 0
    if parameter.ndim == 3:  # the matrices of experts, one below the other
        parameter = parameter.flatten(0, 1)
    for source in checkpoint.sources(name):
        shape = checkpoint.shape(source)
        rows = prod(shape[:-1]) if len(shape) == 3 else shape[0]
        step = max(1, PIECE_ELEMENTS // prod(parameter.shape[1:]))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            target = parameter[row + start : row + stop]

            def fill(source: str = source, start: int = start, stop: int = stop, target: Tensor = target) -> None:
                weights = torch.from_numpy(np.ascontiguousarray(checkpoint.read(source, start, stop)))
                target.copy_(weights)
                if are_finite(target):
                    return
                if are_finite(weights):
                    name = str(target.dtype).removeprefix("torch.")
                    raise SpecbeamError(
                        f"{checkpoint.path}: tensor {source} has weights of up to {weights.abs().max():.3g}, too "
                        f"large for {name}: load it with dtype='bfloat16' or 'float32'",
                        option="dtype",
                    )
                raise not_finite(*checkpoint.place(source))

            yield target.numel(), fill
        row += rows
