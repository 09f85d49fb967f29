"""The contract between a backend and the engine, and the batch they exchange."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from specbeam.backends import devices
from specbeam.checkpoints.parts.experts import ExpertUse
from specbeam.core.selection import AttentionProbe, Logits, NextBeams, Selection, SelectionRequest

NO_FEATURE = -1
"""In ``TreeBatch.features``: the parent's features are nowhere."""
Source = NDArray[np.int64] | NDArray[np.float32]
"""What an encoder reads: token ids, int64 [n], or features of audio, float32 [mel bins, frames]."""


@dataclass(slots=True)
class TreeBatch:
    """The nodes of one token tree that one pass evaluates.

    Keys and values lie in slots of the backend's KV cache. A node's ancestors are given by their slots, first the
    prefix that the sequences of the tree share, then the node's own suffix. Every node sees its ancestors and itself.

    Attributes:
        tokens: token ids, int64 [n].
        positions: positions in the sequence, int64 [n].
        slots: where the nodes' keys and values go, int64 [n].
        prefix: slots by position, int64 [t]. A node at a position p below t sees the first p + 1 of them. An entry is
            -1 where all layers have windows, and none of the nodes sees this position.
        suffixes: slots of a node's ancestors, and its own, at positions t, t + 1, ..., int64 [n, m]. Entries beyond its
            own position mean nothing. m is 0 if all nodes are on the prefix.
        wanted: the nodes whose logits are returned, as indices into the n nodes, int64 [w].
        vocab: only the logits of the first ``vocab`` tokens are needed; None for all tokens.
        source: the result of :meth:`Encoder.place` for the tree, or what was given to the engine instead. None for
            models without an encoder otherwise. Every node sees all of it.
        ahead: slots of the nodes of further passes (:class:`AheadBackend`), n for each pass, int64 [a].
        probe: heads of cross-attention whose scores the pass returns (``Backend.cross_heads``). None for none.
        features: for a draft head (``Backend.target``) where each node's parent has its features, int64 [n]: a slot of
            the target, ``NO_FEATURE``, or -2 - slot for a slot of the head, which then reads its own features. None for
            other models.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    prefix: NDArray[np.int64]
    suffixes: NDArray[np.int64]
    wanted: NDArray[np.int64]
    vocab: int | None = None
    source: Any = None
    ahead: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    probe: AttentionProbe | None = None
    features: NDArray[np.int64] | None = None


def logits_wanted(segments: list[TreeBatch], vocab_size: int) -> int:
    """The number of first tokens whose logits a pass has to compute."""
    return max(vocab_size if s.vocab is None else min(s.vocab, vocab_size) for s in segments)


class Backend(Protocol):
    """One loaded model on one device, with one KV cache. It knows nothing of strategies and trees.

    Its logits are of its own kind: rows that can be sliced and counted. The engine joins them by :meth:`join`, and
    hands them back to :meth:`choose`. Subclasses inherit the sizes of memory of their device.
    """

    name: str
    device: str
    """Its name: "cpu", "cuda:1"."""
    precision: str
    """The dtype of its weights, such as "float32", "int8", or "Q4_K_M" for the blocks of a file."""
    weights_digest: str | None = None
    """A digest of all bytes of its weights. None if there is none."""
    vocab_size: int
    context_length: int
    window: int | None
    """The longest window of attention in any layer, in tokens. None if a layer sees all tokens."""
    slot_bytes: int
    """Bytes of keys and values per slot."""
    expert_use: ExpertUse | None = None
    """What a pass reads of its experts. None for a model without experts."""
    has_threads: bool = False
    """Whether its passes run on its own threads, not on PyTorch's."""
    target: Backend | None = None
    """Of a draft head: the backend whose features it reads. That one keeps them in its slots, for every node of its
    passes since the head was made. A head gives the root of a tree no logits (-inf), as it has no parent."""
    encoder_reads: Literal["tokens", "audio"] | None = None
    """What its encoder reads (:class:`Encoder`): the prompt's tokens, or features of audio. None without an encoder."""
    start_token_ids: list[int] | None = None
    """The first tokens of every sequence of a model whose encoder reads the prompt. None for others, which begin with
    the prompt."""
    features_shape: tuple[int, int] | None = None
    """The mel bins and frames of the audio that its encoder reads. None for a model that reads no audio."""
    cross_heads: tuple[int, int] | None = None
    """The layers and heads of its cross-attention that a ``TreeBatch.probe`` may ask for. None if it shows none."""

    def reserve(self, slots: int) -> None:
        """Make room in the KV cache for at least this many slots, numbered from 0, and keep what is stored.

        It waits for a pass in another thread. After a failure it may be tried again.
        """

    def forward(self, segments: list[TreeBatch]) -> Logits:
        """One forward pass over all nodes of all segments. It stores the nodes' keys and values.

        Repeating a pass changes nothing.

        Returns:
            Logits at the wanted nodes, float32 [sum of w, v], in the order of the segments. v is at least the largest
            ``vocab`` of the segments, and at most vocab_size.
        """

    def choose(self, logits: Logits, requests: Sequence[tuple[slice, SelectionRequest]]) -> list[Selection]:
        """The selections that are requested of a pass's logits, [w, v]. All come to the CPU together.

        Without requests it waits for the logits.

        Args:
            requests: slices of the rows, and what to select from them.
        """

    def join(self, rows: Sequence[Logits]) -> Logits:
        """A copy of pieces of logits with equally many columns, one after another."""

    def array(self, logits: Logits) -> NDArray[np.float32]:
        """Logits as an array, float32 [n, v]."""

    def memory_for_caches(self) -> int:
        """Bytes the engine may fill with keys and values."""
        return devices.memory_for_caches(self.device)

    def peak_memory(self) -> int | None:
        """Most bytes held so far: device memory on a GPU, the process's memory on a CPU; None if unknown."""
        return devices.peak_memory(self.device)


class AheadBackend(Backend, Protocol):
    """A backend that can go on by itself where each next node is the token that was chosen."""

    passes_at_once: int
    """The maximum number of passes that it goes on before the engine looks. Beams reserve slots for all of them."""

    def forward_ahead(
        self,
        segments: list[TreeBatch],
        requests: Sequence[SelectionRequest],
        beams: Sequence[NextBeams | None],
        passes: int,
        ends: Collection[int],
        halt: NDArray[np.int32],
    ) -> list[Selection]:
        """Passes over one node, or beams, of each of several trees. Each is over the tokens that the one before chose.

        All is as if :meth:`forward` and :meth:`choose` were called for each pass. Fewer passes than asked for are
        allowed.

        Args:
            segments: of one node each, or of beams at one position. They have the slots of the nodes to come, too.
            requests: for each segment, about its nodes. The positions of their noise grow by one per pass.
            beams: for each segment, how its nodes go on as beams. None for one node with a request for one token
                (``top=1``): it goes on by this token. Requests for beams ask for more tokens than there are beams.
            passes: the maximum number, at least 1. A pass is the last one if the strategy has to look at its selection.
            ends: token ids. The pass that chooses one of them is the last.
            halt: int32 [1]. Any thread may change it from 0. Then the pass that runs is the last.

        Returns:
            For each segment a selection with the rows of each pass. It has the logits of the last pass alone.
        """


class Encoder(Backend, Protocol):
    """A backend whose model has an encoder. Its work has two steps, so that several trees share the first."""

    encoder_layers: int
    """Into how many parts a pass of the encoder can be divided."""
    encoder_size: int
    """The features of each position of its output."""
    encoder_batch: int
    """The maximum number of positions that a pass over several sources should have, padding included. A source that is
    longer is read alone. 1 if each source is."""
    sources_in_slots: bool
    """Whether slots of the KV cache hold its output, one for each position. Elsewhere it takes about as much memory."""

    @property
    def encoder_digest(self) -> str:
        """A digest of the encoder: its configuration, all bytes of its weights as the backend has them, and their
        dtypes. Backends of one class on one device whose digests are equal give equal states."""

    def positions(self, source: Source) -> int:
        """The positions of the encoder's output for a source."""

    def encode(self, sources: Sequence[Source], layers: range, begun: Sequence[Any] | None) -> list[Any]:
        """Run some layers of the encoder over sources. Other passes may come before the next layers.

        No bit depends on the parts. Where a node's logits depend on no other tree of a pass, states depend on no other
        source.

        Args:
            sources: token ids of any lengths, or features of audio of ``features_shape``.
            layers: to run, of ``encoder_layers``.
            begun: what the layers before gave for each source. None before the first layer.

        Returns:
            For each source, what the next layers take as ``begun``; after the last layer the encoder's output.
        """

    def place(self, states: Sequence[Any], slots: Sequence[NDArray[np.int64]]) -> list[Any]:
        """Keys and values of the encoder's output for sources.

        Args:
            states: the output for each of them.
            slots: where the keys and values of each go, int64 [``positions``]. Empty without ``sources_in_slots``.

        Returns:
            The ``source`` of each tree's segments.
        """
