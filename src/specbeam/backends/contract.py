"""The contract between a backend and the engine, and the batch they exchange."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from specbeam.backends import devices
from specbeam.checkpoints.parts.experts import ExpertUse
from specbeam.core.selection import AttentionProbe, Logits, NextBeams, Selection, SelectionRequest

Source = NDArray[np.int64] | NDArray[np.float32]
"""What an encoder reads: token ids, int64 [n], or features of audio, float32 [mel bins, frames]."""


EMPTY_SLOT_BYTES = 1
"""What a slot counts with where a backend keeps everything in rows. So cached slots without rows are evicted, too."""
ROWS_AT_ONCE = 8
"""Rows of a part that reads the nodes of a pass elsewhere are taken and let go by this many: such rows are large."""
KEYS_AT_ONCE = 64
"""Other rows are keys and values, which should lie side by side."""
POINT_TOKENS = 256
"""Where resume points are cheap, there is one at each multiple of this position."""


class Lifetime(NamedTuple):
    """For how long nodes of a sequence read what some parts of a model keep of a position. It lies in a *row*.

    A node at position p reads the rows of the positions q of its path with ``p - reach < q <= p - lag`` for which
    ``q + 1`` is a multiple of ``every``. So a slot has a row only while later nodes may read it.

    Attributes:
        reach: how far back a node reads, its own position included.
        row_bytes: bytes of a row.
        every: the distance of the positions that have rows.
        lag: a row is made in the pass over the first node this far behind its position. 0 for a node's own row.
        in_pass: every node of a pass needs a row while it runs. Otherwise parts read the nodes of the pass elsewhere,
            and only what later passes read has a row.
    """

    reach: int
    row_bytes: int
    every: int = 1
    lag: int = 0
    in_pass: bool = True

    @property
    def at_once(self) -> int:
        """How many rows are taken and let go together."""
        return KEYS_AT_ONCE if self.in_pass else 1 if self.every > 1 else ROWS_AT_ONCE

    def rows(self, length: int, batch: int) -> int:
        """The maximum number of rows of one sequence of this length, evaluated in passes over this many nodes."""
        at_points = 0 if self.in_pass else (2 + batch // POINT_TOKENS) * self.reach
        last = self.reach + self.at_once + (batch if self.in_pass else self.reach) + at_points
        return min(length, last if self.every == 1 else last // self.every + 2)


@dataclass(slots=True)
class TreeBatch:
    """The nodes of one token tree that one pass evaluates.

    Keys and values lie in slots of the backend's KV cache. A node's ancestors are given by their slots, first the
    prefix that the sequences of the tree share, then the node's own suffix. Every node sees its ancestors and itself.

    Attributes:
        tokens: token ids, int64 [n].
        positions: positions in the sequence, int64 [n].
        slots: where the nodes' keys and values go, int64 [n].
        prefix: slots by position, int64 [t]. A node at a position p below t sees the first p + 1 of them. An entry may
            be -1 where no part reads a position.
        suffixes: slots of a node's ancestors, and its own, at positions t, t + 1, ..., int64 [n, m]. Entries beyond its
            own position mean nothing. m is 0 if all nodes are on the prefix.
        wanted: the nodes whose logits are returned, as indices into the n nodes, int64 [w].
        vocab: only the logits of the first ``vocab`` tokens are needed; None for all tokens.
        source: the result of :meth:`Encoder.place` for the tree, or what was given to the engine instead. None for
            models without an encoder otherwise. Every node sees all of it.
        ahead: slots of the nodes of further passes (:class:`AheadBackend`), n for each pass, int64 [a].
        probe: heads of cross-attention whose scores the pass returns (``Backend.cross_heads``). None for none.
        rows: for each of ``Backend.lifetimes`` the row of each slot, -1 for none, int32 [lifetimes, slots]. Without
            lifetimes, rows have the numbers of their slots.
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
    rows: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 0), np.int32))

    def in_rows(self) -> TreeBatch:
        """The same batch with rows in place of slots, for a backend that keeps everything in rows of one lifetime."""
        if not len(self.rows):
            return self
        (row,) = self.rows.astype(np.int64)
        places = {name: row[getattr(self, name)] for name in ("slots", "prefix", "suffixes", "ahead")}
        return replace(self, rows=self.rows[:0], **places)


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
    slot_bytes: int
    """Bytes per slot of the numbers that all later nodes may read, such as keys and values. At least 1."""
    lifetimes: tuple[Lifetime, ...] = ()
    """Of the numbers that near nodes alone read. A backend may keep these in slots, too: then it has no lifetimes."""
    expert_use: ExpertUse | None = None
    """What a pass reads of its experts. None for a model without experts."""
    has_threads: bool = False
    """Whether its passes run on its own threads, not on PyTorch's."""
    encoder_reads: Literal["tokens", "audio"] | None = None
    """What its encoder reads (:class:`Encoder`): the prompt's tokens, or features of audio. None without an encoder."""
    start_token_ids: list[int] | None = None
    """The first tokens of every sequence of a model whose encoder reads the prompt. None for others, which begin with
    the prompt."""
    features_shape: tuple[int, int] | None = None
    """The mel bins and frames of the audio that its encoder reads. None for a model that reads no audio."""
    cross_heads: tuple[int, int] | None = None
    """The layers and heads of its cross-attention that a ``TreeBatch.probe`` may ask for. None if it shows none."""

    def reserve(self, slots: int, rows: Sequence[int] = ()) -> None:
        """Make room in the KV cache for at least this many slots, numbered from 0, and keep what is stored.

        It waits for a pass in another thread. After a failure it may be tried again.

        Args:
            rows: how many of each lifetime. Without it as many as slots.
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


def token_bytes(backend: Backend) -> int:
    """Bytes of a token's slot with its row of each lifetime."""
    return backend.slot_bytes + sum(-(-one.row_bytes // one.every) for one in backend.lifetimes)


def kept_whole(size: int, window: int | None) -> tuple[int, tuple[Lifetime, ...]]:
    """``slot_bytes`` and ``lifetimes`` of a backend that keeps all of a token in one place.

    Args:
        size: bytes of that.
        window: the longest window of any layer. None if a layer sees all tokens.
    """
    return (size, ()) if window is None else (EMPTY_SLOT_BYTES, (Lifetime(window, size),))


def sequence_bytes(backend: Backend, length: int, batch: int) -> int:
    """Bytes that one sequence of this length takes at most, evaluated in passes over this many nodes."""
    rows = sum(one.rows(length, batch) * one.row_bytes for one in backend.lifetimes)
    return length * backend.slot_bytes + rows


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
