"""The ``torch`` backend: our own transformer on any device PyTorch has. The reference for the other backends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specbeam.backends.contract import Segment, logits_wanted
from specbeam.backends.devices import choose_device, choose_dtype, memory_for_caches, peak_memory
from specbeam.backends.torch.cache import TreeCache
from specbeam.backends.torch.transformer import Transformer, TreeSegment
from specbeam.backends.torch.weights import load_weights
from specbeam.checkpoints.checkpoint import Checkpoint
from specbeam.selection import Answer, Wish, choose


class TorchBackend:
    """A checkpoint loaded into a :class:`Transformer`.

    Args:
        device: "auto" (the first CUDA device if there is one, else the CPU) or a PyTorch device.
        dtype: "float32", "bfloat16", "float16", or "auto". That is float32 on a CPU, elsewhere the checkpoint's own
            half precision, or bfloat16.

    Raises:
        SpecbeamError: no such device or dtype, or a checkpoint that cannot be loaded.
    """

    name = "torch"
    has_threads = False
    start_token_ids: list[int] | None = None

    def __init__(self, checkpoint: Checkpoint, device: str = "auto", dtype: str = "auto") -> None:
        self.device = choose_device(device)
        self.dtype = choose_dtype(dtype, self.device, checkpoint.dtype)
        self.precision = str(self.dtype).removeprefix("torch.")
        config = checkpoint.config
        self.vocab_size = config.vocab_size
        self.context_length = config.context_length
        with torch.device("meta"):
            self.model = Transformer(config)
        load_weights(self.model, checkpoint, self.device, self.dtype)
        self._windows = {layer.window for layer in config.layers}
        self._cache_shape = (config.num_layers, config.num_kv_heads, config.head_dim)
        self.slot_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.dtype.itemsize

    def new_cache(self, most: int) -> TreeCache:
        return TreeCache(*self._cache_shape, most=most, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def forward(self, segments: list[Segment[TreeCache]]) -> Tensor:
        tokens = np.concatenate([s.tokens for s in segments])
        positions = np.concatenate([s.positions for s in segments])
        starts = np.cumsum([0, *(len(s.tokens) for s in segments)])
        wanted = np.concatenate([start + s.wanted for start, s in zip(starts, segments, strict=False)])
        parts = [
            TreeSegment(
                cache=s.cache,
                rows=slice(start, start + len(s.tokens)),
                slots=self._index(s.slots),
                length=s.length,
                visible=self._visible(s),
            )
            for start, s in zip(starts.tolist(), segments, strict=False)
        ]
        to_device = [torch.from_numpy(array).to(self.device) for array in (tokens, positions, wanted)]
        vocab = logits_wanted(segments, self.vocab_size)
        return self.model(to_device[0], to_device[1], parts, to_device[2], vocab).float()

    def _visible(self, segment: Segment[TreeCache]) -> dict[int | None, Tensor | None]:
        """The slots that the nodes see, by the window of a layer."""
        masks = dict.fromkeys(self._windows, segment.visible)
        if any(self._windows):
            positions = segment.cache.note_positions(segment)
            distance = segment.positions[:, None] - positions
            for window in filter(None, self._windows):
                if (distance >= window).any():
                    near = distance < window
                    masks[window] = near if segment.visible is None else near & segment.visible
        return {w: None if mask is None else torch.from_numpy(mask).to(self.device) for w, mask in masks.items()}

    def _index(self, slots: np.ndarray) -> slice | Tensor:
        first = int(slots[0])
        if (np.diff(slots) == 1).all():
            return slice(first, first + len(slots))
        return torch.from_numpy(slots).to(self.device)

    @torch.inference_mode()
    def choose(self, logits: Tensor, wishes: Sequence[tuple[slice, Wish]]) -> list[Answer]:
        return choose(logits, wishes)

    def memory_for_caches(self) -> int:
        return memory_for_caches(self.device)

    def peak_memory(self) -> int | None:
        return peak_memory(self.device)
