"""The state of one request on one model: on the target, or on the draft model."""

from __future__ import annotations

from typing import Any

import numpy as np

from specbeam.backends.contract import Backend, Segment
from specbeam.engine.runs import BLOCK_SLOTS
from specbeam.engine.slots import Slots
from specbeam.engine.store import EngineCache
from specbeam.tree import Nodes, Tree


class ModelState:
    """The slots of a request's tree in the model's store, and counts of the passes the request took part in.

    Args:
        prompt_ids: the prompt's token ids. A model with an encoder reads them before the first pass.
        new_tokens: the most tokens per text.
        texts: the number of texts that grow at once.
        guesses: the most guesses per round. Where slots are short, the request does without them.
        most_rows: the most nodes whose logits are needed at once.
        prompt_length: the prompt's length in tokens of this model, if these are others.
        most_nodes: the most nodes per pass.
        cache: the part of the model's store that the engine holds.
        shares: whether the request begins with tokens that others have read, and leaves its own to them.
        source: in place of the encoder's output.

    Attributes:
        most_rows: as given.
        passes: forward passes that the request took part in.
        answered: passes that completed the logits of a wish of the strategy. Other passes read parts of a prompt.
        seconds: the request's share of the time of its passes, by its share of their nodes.
        nodes: nodes evaluated for the request.
        source: the encoder's output for the prompt, or what was given. None until the encoder has read it.
        source_bytes: bytes that this output takes. A token of it takes as much as a slot, roughly.
    """

    def __init__(
        self,
        backend: Backend,
        tree: Tree,
        prompt_ids: list[int],
        new_tokens: int,
        texts: int,
        guesses: int,
        most_rows: int,
        prompt_length: int = 0,
        *,
        most_nodes: int,
        cache: EngineCache,
        shares: bool,
        source: Any = None,
    ) -> None:
        self.backend = backend
        self.tree = tree
        self.most_rows = most_rows
        self._most_nodes = texts + guesses  # of a round
        # Texts may share only the prompt. If they do not fit together, they are evaluated one after the other.
        shared = max(len(prompt_ids), tree.prompt_length, prompt_length) + (new_tokens if texts == 1 else 0)
        own = 0 if texts == 1 else new_tokens
        self._least_slots = min(shared, self._lasting(shared) + most_nodes) + own
        self.passes = self.answered = self.nodes = 0
        self.seconds = 0.0
        self.source = self._given_source = source
        self._encoder_prompt = None if backend.start_token_ids is None else prompt_ids
        self.source_bytes = len(self._encoder_prompt or ()) * backend.slot_bytes
        self._cache = cache
        # After another source, equal tokens have other keys and values.
        self._shares = shares and self._encoder_prompt is None and source is None
        self._slots: Slots | None = None
        self._peak_slots = self._paused_slots = 0  # until the last close, and at it
        self._answered_before = 0  # when it was last opened
        self._reused_tokens: int | None = None  # when it began; read again after a pause, it may find its own tokens

    def open(self) -> None:
        """Begin to hold slots."""
        self._slots = Slots(self.tree, self.backend, self._cache, self._shares)
        self._answered_before = self.answered

    def close(self) -> None:
        """Give up the slots."""
        self._peak_slots, self._paused_slots = self.peak_slots, self.used_slots or self._paused_slots
        self.source = self._given_source
        if self._slots is not None:
            if self._reused_tokens is None:
                self._reused_tokens = self._slots.reused
            self._slots.close()
            self._slots = None

    def lose(self, nodes: int) -> None:
        """A pass over some nodes showed that a slot may hold numbers that are not finite: all are to be read again.

        So are the slots of other requests that it began with.
        """
        self.passes += 1
        self.nodes += nodes
        self._shares = False
        self.close()
        self.open()

    @property
    def unread_source(self) -> list[int] | None:
        """Token ids that the encoder has to read before the next pass, if there are any."""
        return self._encoder_prompt if self.source is None else None

    def segment(self, nodes: Nodes, wanted: Nodes, vocab: int | None, ahead: int = 0) -> Segment:
        """The request's part of a pass over these nodes, or of it and of passes that go ``ahead``."""
        return self.slots.segment(nodes, wanted, vocab, self.source, ahead)

    def evaluated(self, nodes: Nodes, pending: Nodes, ahead: int = 0) -> None:
        """A pass over these nodes went well.

        Args:
            pending: the nodes that the strategy still waits for.
            ahead: how many further passes there were, over as many nodes each that the tree gets next.
        """
        self.passes += 1 + ahead
        self.nodes += len(nodes) * (1 + ahead)
        slots = self.slots
        if ahead:
            slots.place_ahead(ahead * len(nodes))
        slots.leave(pending)
        slots.free_unseen(pending)

    def leave_text(self, node: int | None, pending: Nodes) -> None:
        """Leave the evaluated beginning of the text down to a node to other requests.

        Args:
            node: None for the longest text.
            pending: nodes that may have a slot, but were not evaluated.
        """
        if self._shares:
            if node is None:
                node = int(self.tree.kept[self.tree.depths(self.tree.kept).argmax()])
            path = self.tree.path(node)
            self.slots.leave_text(path[~np.isin(path, pending)])

    @property
    def is_fresh(self) -> bool:
        """Whether no node of it was in a pass, and it may begin with tokens that others read."""
        return self._slots is not None and self._slots.is_fresh

    @property
    def is_reading(self) -> bool:
        """Whether it reads a text, as no pass has answered the strategy since it was opened."""
        return self.answered == self._answered_before

    @property
    def is_open(self) -> bool:
        """Whether it may hold slots."""
        return self._slots is not None

    @property
    def slots(self) -> Slots:
        """Where the nodes lie, while it is open."""
        assert self._slots is not None
        return self._slots

    @property
    def used_slots(self) -> int:
        """Slots in use, shared ones included."""
        return 0 if self._slots is None else self._slots.used

    @property
    def peak_slots(self) -> int:
        """The most slots that were in use at once."""
        return max(self._peak_slots, 0 if self._slots is None else self._slots.peak)

    @property
    def reused_tokens(self) -> int:
        """Tokens that another request had evaluated."""
        if self._reused_tokens is None:
            return 0 if self._slots is None else self._slots.reused
        return self._reused_tokens

    def round_bytes(self, pending: Nodes) -> int:
        """Bytes that it needs for one more round, beside the bytes that it holds.

        Args:
            pending: the nodes that it is to evaluate next. Other nodes of the tree may never be: deferred beams.
        """
        trunk = len(self.tree.trunk)
        lasting = self.tree.live - trunk + self._lasting(trunk)
        if evaluated := self.used_slots or self._paused_slots:
            lasting = min(lasting, evaluated + len(pending))
        return max(0, lasting + self._most_nodes - self.used_slots) * self.backend.slot_bytes

    def _lasting(self, trunk: int) -> int:
        """The most slots that a trunk of this length keeps beyond a pass."""
        return trunk if self.backend.window is None else min(trunk, self.backend.window + BLOCK_SLOTS)

    @property
    def least_bytes(self) -> int:
        """Bytes that it needs for one text of full length."""
        return self._least_slots * self.backend.slot_bytes

    def found_bytes(self) -> int:
        """Bytes of slots that other requests hold now, and that it would share."""
        if self._slots is not None or not self._shares:
            return 0
        return self._cache.shared(self.tree.tokens(self.tree.trunk[:-1])) * self.backend.slot_bytes

    def growth_bytes(self, nodes: Nodes) -> int:
        """Bytes of new slots that a pass over these nodes takes."""
        return self.slots.growth(nodes) * self.backend.slot_bytes
