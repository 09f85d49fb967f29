"""A request on one model, target or draft: its slots, its need of memory, and its passes."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from specbeam.backends.contract import Backend, Encoder
from specbeam.cache.budget import Budget
from specbeam.cache.pool import BLOCK_SLOTS
from specbeam.cache.prefixes import NO_SLOTS, Ints
from specbeam.cache.slots import NOWHERE, Slots
from specbeam.core.tree import NO_NODES, Nodes, Tree
from specbeam.decoding.setup import Setup
from specbeam.engine.shared_source import SharedSource


class ModelState:
    """A request on one model.

    Args:
        budget: of the engine.
        draft_tokens: the maximum number per round. Where slots are short, the request does without them.
        max_rows: the maximum number of nodes whose logits are needed at once.
        shared_source: what the encoder reads before the first pass. None without an encoder.
        source: in place of the encoder's output.
        read: of a draft head, the request's state on the target, whose features it reads.

    Attributes:
        slots: of its tree.
        min_bytes: bytes that it needs for one sequence of full length.
        passes: forward passes that the request took part in.
        completed: passes that gave the strategy its selection. Other passes prefill parts of a prompt.
        seconds: the request's share of the time of its passes, by its share of their nodes.
        nodes: nodes evaluated for the request.
        source: the encoder's output, placed, or what was given. None until the encoder has read the source.
        source_bytes: bytes that this output takes beside the slots. A token of it takes as much as a slot, roughly.
    """

    def __init__(
        self,
        budget: Budget,
        setup: Setup,
        backend: Backend,
        tree: Tree,
        draft_tokens: int,
        max_rows: int,
        shared_source: SharedSource | None,
        source: Any = None,
        read: ModelState | None = None,
    ) -> None:
        self.backend = backend
        self.read = read
        self._drafted = NO_NODES  # that were evaluated with features of the head itself
        self.tree = tree
        self.max_rows = max_rows
        self.passes = self.completed = self.nodes = 0
        self.seconds = 0.0
        self.source = self._given_source = source
        self._shared_source = shared_source
        cache, positions, slots = budget.cache_of(backend), 0, 0
        if shared_source is not None:
            encoder = cast(Encoder, backend)
            positions = encoder.positions(shared_source.source)
            slots = positions if encoder.sources_in_slots and source is None else 0
        # A sequence of as many positions, of which only the slots are used.
        self._source_slots = Slots(Tree([0] * slots), backend, cache) if slots else None
        self.source_bytes = (positions - slots) * backend.slot_bytes
        # After another source, equal tokens have other keys and values.
        shares = setup.options.share_prefix and shared_source is None and source is None
        self.slots = Slots(tree, backend, cache, shares)
        sequences, new_tokens = setup.options.num_texts, setup.stop.max_length - setup.tree.prompt_length
        self._max_nodes = sequences + draft_tokens  # of a round
        # Sequences may share only the prompt. If they do not fit together, they are evaluated one after the other.
        shared = max(setup.tree.prompt_length, tree.prompt_length) + (new_tokens if sequences == 1 else 0)
        own = 0 if sequences == 1 else new_tokens
        lasting = min(shared, self._lasting(shared) + budget.max_batch_tokens)
        self.min_bytes = (lasting + own + slots) * backend.slot_bytes
        self._used_before = self._completed_before = 0  # it was closed

    def close(self) -> None:
        """Free the slots. It may begin again, and then recomputes the nodes that it needs."""
        self._used_before = self.slots.used or self._used_before
        self._completed_before = self.completed
        self.source = self._given_source
        self._drafted = NO_NODES
        self.slots.close()
        if self._source_slots is not None:
            self._source_slots.close()

    def lose(self, nodes: int) -> None:
        """A pass over some nodes showed that a slot may hold numbers that are not finite: all are to be recomputed.

        So is the prefix that it shared with other requests.
        """
        self.passes += 1
        self.nodes += nodes
        self.slots.shares = False
        self.close()

    def features(self, nodes: Nodes) -> Ints | None:
        """Where a draft head finds the features of the parents of nodes (``TreeBatch.features``). None for a model.

        The features of draft tokens are the head's own, as the target has not evaluated them.
        """
        if self.read is None:
            return None
        parents = np.maximum(self.tree.parents(nodes), 0)
        theirs, own = self.read.slots.at(parents), self.slots.at(parents)
        self._drafted = np.union1d(self._drafted, nodes[theirs == NOWHERE])
        return np.where(theirs == NOWHERE, -2 - own, theirs)

    def forget_drafted(self) -> None:
        """Free the slots of nodes that read the head's own features.

        Accepted ones are evaluated again, with features of the target.
        """
        if len(self._drafted):
            self.slots.free(self._drafted)
            self._drafted = NO_NODES

    @property
    def unread_source(self) -> SharedSource | None:
        """What the encoder has to read before the next pass. None for nothing."""
        return self._shared_source if self.source is None else None

    def place_source(self) -> Ints:
        """Give the encoder's output slots, int64 [n]. It gets none where the backend keeps it elsewhere."""
        if (own := self._source_slots) is None:
            return NO_SLOTS
        return own.tree_batch(own.prepare(own.tree.prefix), NO_NODES).slots

    @property
    def used(self) -> int:
        """Slots in use, of the tree and of the encoder's output."""
        return self.slots.used + (0 if self._source_slots is None else self._source_slots.used)

    @property
    def peak(self) -> int:
        """The maximum number of slots that were in use at once."""
        return self.slots.peak + (0 if self._source_slots is None else self._source_slots.peak)

    @property
    def source_growth(self) -> int:
        """The slots that the encoder's output still needs."""
        return 0 if (own := self._source_slots) is None else own.tree.prefix_length - own.used

    @property
    def is_prefilling(self) -> bool:
        """Whether it prefills or recomputes: no pass since it began has given the strategy a selection."""
        return self.completed == self._completed_before

    def evaluated(self, nodes: Nodes, pending: Nodes, ahead: int) -> None:
        """A pass over these nodes went well.

        Args:
            pending: the nodes that the strategy still waits for.
            ahead: how many further passes there were, over as many nodes each that the tree gets next.
        """
        self.passes += 1 + ahead
        self.nodes += len(nodes) * (1 + ahead)
        self.slots.evaluated(pending, ahead * len(nodes))

    def next_bytes(self, pending: Nodes) -> int:
        """Bytes that it needs for one more iteration, beside the bytes that it holds.

        Args:
            pending: the nodes that it is to evaluate next. Other nodes of the tree may never be: deferred beams.
        """
        prefix, used = self.tree.prefix_length, self.slots.used
        new = max(0, int(pending[-1]) + 1 - len(self.tree)) if len(pending) else 0  # nodes that the tree gets later
        lasting = self.tree.live + new - prefix + self._lasting(prefix)
        if evaluated := used or self._used_before:
            lasting = min(lasting, evaluated + len(pending))
        return (max(0, lasting + self._max_nodes - used) + self.source_growth) * self.backend.slot_bytes

    def _lasting(self, prefix: int) -> int:
        """The maximum number of slots that a shared prefix of this length keeps beyond a pass."""
        return prefix if self.backend.window is None else min(prefix, self.backend.window + BLOCK_SLOTS)
