"""The contract between a backend and the engine, and the batch they exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbeam.selection import Answer, Wish


class Cache(Protocol):
    """Keys and values of one token tree on one backend, in slots numbered from 0. The backend chooses the layout."""

    capacity: int
    most: int
    """The most slots that will ever be needed. A request that takes over the cache of another may raise it."""

    def reserve(self, slots: int) -> None:
        """Make room for at least this many slots, and keep the stored ones. After a failure it may be tried again."""


C = TypeVar("C", bound=Cache)
C_co = TypeVar("C_co", bound=Cache, covariant=True)


@dataclass(frozen=True)
class Segment(Generic[C_co]):
    """The nodes of one token tree that one pass evaluates.

    Attributes:
        cache: the tree's cache, with room for ``length`` slots.
        tokens: token ids, int64 [n].
        positions: positions in the text, int64 [n].
        slots: where the nodes' keys and values go, int64 [n].
        length: all slots in use are below it, the slots of this pass included.
        visible: bool [n, length], true where a node attends: the slots of its ancestors and its own. None if every
            node sees every slot.
        wanted: the nodes whose logits are returned, as indices into the n nodes, int64 [w].
        vocab: only the logits of the first ``vocab`` tokens are needed; None for all tokens.
    """

    cache: C_co
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    length: int
    visible: NDArray[np.bool_] | None
    wanted: NDArray[np.int64]
    vocab: int | None = None


def logits_wanted(segments: list[Segment[C]], vocab_size: int) -> int:
    """The number of first tokens whose logits a pass has to compute."""
    return max(vocab_size if s.vocab is None else min(s.vocab, vocab_size) for s in segments)


class Backend(Protocol[C]):
    """One loaded model on one device, with caches of one kind. It knows nothing of strategies, requests or trees."""

    name: str
    device: torch.device
    precision: str
    """The number type of its weights, such as "float32", "int8", or "Q4_K_M" for the blocks of a file."""
    vocab_size: int
    context_length: int
    slot_bytes: int
    """Bytes of keys and values per slot."""
    has_threads: bool
    """Whether its passes run on its own threads, not on PyTorch's."""
    start_token_ids: list[int] | None
    """The first tokens of every text of a model with an encoder. None for others: their texts begin with the prompt."""

    def new_cache(self, most: int) -> C:
        """An empty cache that will never need more than ``most`` slots."""

    def forward(self, segments: list[Segment[C]]) -> Tensor:
        """One pass over all nodes of all segments. It stores the nodes' keys and values.

        Repeating a pass changes nothing.

        Returns:
            Logits at the wanted nodes, float32 [sum of w, v] on the backend's device, in the order of the segments. v
            is at least the largest ``vocab`` of the segments, and at most vocab_size.
        """

    def choose(self, logits: Tensor, wishes: Sequence[tuple[slice, Wish]]) -> list[Answer]:
        """Answer the wishes of a pass about its logits, float32 [w, v]. All answers come to the CPU together.

        Args:
            wishes: slices of the rows, and what to answer about them. They have no functions: these are the engine's.
        """

    def memory_for_caches(self) -> int:
        """Bytes the engine may fill with caches."""

    def peak_memory(self) -> int | None:
        """Most bytes held so far: device memory on a GPU, the process's memory on a CPU; None if unknown."""


class EncodingBackend(Backend[C], Protocol[C]):
    """A backend whose model has an encoder."""

    def encode(self, cache: C, source: list[int]) -> None:
        """Run the encoder over the prompt and keep its output in a tree's cache, before the first pass.

        Args:
            source: the prompt's token ids.
        """
