"""The ``torch`` backend: our own transformer on any device PyTorch has. The reference for the other backends."""

from __future__ import annotations

from threading import Lock

import numpy as np
import torch
from torch import Tensor

from specbeam.backends.contract import Backend, Segment, logits_wanted
from specbeam.backends.devices import choose_device, choose_dtype
from specbeam.backends.torch.cache import KeyValues, index, seen_by
from specbeam.backends.torch.transformer import Transformer, TreeSegment
from specbeam.backends.torch.weights import load_weights
from specbeam.checkpoints.checkpoint import Checkpoint
from specbeam.selection.transfer import to_device


class TorchBackend(Backend):
    """A checkpoint loaded into a :class:`Transformer`.

    Args:
        device: "auto" (the first CUDA device if there is one, else the CPU) or a PyTorch device.
        dtype: "float32", "bfloat16", "float16", or "auto". That is float32 on a CPU, elsewhere the checkpoint's own
            half precision, or bfloat16.

    Raises:
        SpecbeamError: no such device or dtype, or a checkpoint that cannot be loaded.
    """

    name = "torch"

    def __init__(self, checkpoint: Checkpoint, device: str = "auto", dtype: str = "auto") -> None:
        self.device = choose_device(device)
        self.dtype = choose_dtype(dtype, self.device, checkpoint.dtype)
        self.precision = str(self.dtype).removeprefix("torch.")
        config = checkpoint.config
        self.vocab_size = config.vocab_size
        self.context_length = config.context_length
        self.window = config.window
        with torch.device("meta"):
            self.model = Transformer(config)
        load_weights(self.model, checkpoint, self.device, self.dtype)
        self._windows = {layer.window for layer in config.layers}
        self._store = self.new_store()
        self._one_pass = Lock()  # the KV cache may move when it grows
        self.slot_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.dtype.itemsize

    def new_store(self) -> KeyValues:
        """An empty KV cache for this model."""
        config = self.model.config
        return KeyValues(config.num_layers, config.num_kv_heads, config.head_dim, self.dtype, self.device)

    def reserve(self, slots: int) -> None:
        with self._one_pass:
            self._store.reserve(slots)

    @torch.inference_mode()
    def forward(self, segments: list[Segment]) -> Tensor:
        tokens = np.concatenate([s.tokens for s in segments])
        positions = np.concatenate([s.positions for s in segments])
        starts = np.cumsum([0, *(len(s.tokens) for s in segments)])
        wanted = np.concatenate([start + s.wanted for start, s in zip(starts, segments, strict=False)])
        inputs = [to_device(array, self.device) for array in (tokens, positions, wanted)]
        vocab = logits_wanted(segments, self.vocab_size)
        with self._one_pass:
            parts = [self._part(s, start) for s, start in zip(segments, starts.tolist(), strict=False)]
            return self.model(inputs[0], inputs[1], parts, inputs[2], vocab).float()

    def _part(self, segment: Segment, start: int) -> TreeSegment:
        """A segment whose nodes begin at a row of the batch."""
        seen = seen_by(segment)
        masks = {window: seen.near(segment.positions, window) for window in self._windows}
        return TreeSegment(
            self._store,
            rows=slice(start, start + len(segment.tokens)),
            slots=index(segment.slots, self.device),
            seen=index(seen.slots, self.device),
            visible={w: None if mask is None else to_device(mask, self.device) for w, mask in masks.items()},
        )
