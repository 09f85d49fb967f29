"""What a backend promises the engine, and the batch the two exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Cache(Protocol):
    """Keys and values of one token tree on one backend, in slots numbered from 0. Where they lie is its own affair."""

    capacity: int

    def reserve(self, slots: int) -> None:
        """Make room for at least so many slots; what is stored stays. May be tried again after it failed."""


@dataclass(frozen=True)
class Segment:
    """The nodes of one token tree that one pass evaluates.

    Attributes:
        cache: the tree's cache; it has room for ``length`` slots.
        tokens: token ids, int64 [n].
        positions: positions in the text, int64 [n].
        slots: where the nodes' keys and values go, int64 [n].
        length: the slots in use, those of this pass included, are below this.
        visible: bool [n, length], true where a node attends: its ancestors' slots and its own. None when all slots
            are visible to all of the nodes.
        wanted: which of the n nodes' logits are to be returned, int64 [w].
        vocab: those of so many first tokens are enough; None for all.
    """

    cache: Cache
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    length: int
    visible: NDArray[np.bool_] | None
    wanted: NDArray[np.int64]
    vocab: int | None = None


def logits_wanted(segments: list[Segment], vocab_size: int) -> int:
    """Of how many first tokens logits are enough for all segments."""
    return max(vocab_size if s.vocab is None else min(s.vocab, vocab_size) for s in segments)


class Backend(Protocol):
    """One loaded model on one device. It knows nothing of strategies, requests or trees."""

    name: str
    device: torch.device
    vocab_size: int
    context_length: int
    slot_bytes: int
    """Bytes of keys and values a slot takes."""
    has_threads: bool
    """Whether its passes run on threads of its own, not on PyTorch's."""
    start_token_ids: list[int] | None
    """What the texts of a model with an encoder begin with; None for others, whose texts begin with the prompt."""

    def new_cache(self, most: int) -> Cache:
        """An empty cache that will never need more than so many slots."""

    def forward(self, segments: list[Segment]) -> Tensor:
        """One pass over all nodes of all segments.

        Stores the nodes' keys and values, and returns the logits at the wanted nodes, float32 [sum of w, vocab_size]
        on the backend's device, in the order of the segments. Of tokens that no segment wants the last may be
        left out. Doing the same pass twice changes nothing.
        """

    def memory_for_caches(self) -> int:
        """Bytes the engine may fill with caches."""

    def peak_memory(self) -> int | None:
        """Most bytes held so far: device memory on a GPU, the process's memory on a CPU; None if unknown."""


class EncodingBackend(Backend, Protocol):
    """One whose model has an encoder."""

    def encode(self, cache: Any, source: list[int]) -> None:
        """Let a tree's cache hold what the model makes of the prompt, token ids; before its first pass."""
