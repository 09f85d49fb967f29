"""The state of one request on one model: on the target, or on the draft model."""

from __future__ import annotations

from typing import Any, cast

from specbeam.backends.contract import Backend, EncodingBackend
from specbeam.engine.prefixes import Prefix
from specbeam.engine.slots import Slots
from specbeam.tree import Nodes, Tree


class ModelState:
    """The slots of a request's tree in the model's cache, and counts of the passes the request took part in.

    Args:
        prompt_ids: the prompt's token ids. A model with an encoder keeps its output for them in the cache.
        new_tokens: the most tokens per text.
        texts: the number of texts that grow at once.
        guesses: the most guesses per round.
        prompt_length: the prompt's length in tokens of this model, if these are others.

    Attributes:
        most_rows: the most nodes whose logits are needed at once.
        passes: forward passes that the request took part in.
        answered: passes that completed the logits of a wish of the strategy. Other passes read parts of a prompt.
        seconds: the request's share of the time of its passes, by its share of their nodes.
        nodes: nodes evaluated for the request.
    """

    def __init__(
        self,
        backend: Backend[Any],
        tree: Tree,
        prompt_ids: list[int],
        new_tokens: int,
        texts: int,
        guesses: int,
        prompt_length: int = 0,
    ) -> None:
        self.backend = backend
        self.tree = tree
        self.most_rows = texts + guesses
        # Texts may share only the prompt. Guesses may last for two rounds.
        others = max(len(prompt_ids), tree.prompt_length, prompt_length) + 2 * guesses
        self._most_slots = others + new_tokens * texts
        self._least_slots = others + new_tokens
        self.passes = self.answered = self.nodes = 0
        self.seconds = 0.0
        self._source = None if backend.start_token_ids is None else prompt_ids
        self._slots: Slots | None = None
        self._peak_slots = self._reused_tokens = 0  # until the last close

    def open(self, kept: Prefix | None = None) -> None:
        """Take a cache: a new one, or a kept one that may be taken. A model with an encoder reads the prompt now."""
        kept = kept if kept is not None and self.may_take(kept) else None
        slots = Slots(self.tree, self.backend, self._most_slots, kept)
        if self._source is not None:
            cast(EncodingBackend[Any], self.backend).encode(slots.cache, self._source)
        self._slots = slots

    def may_take(self, kept: Prefix) -> bool:
        """Whether a kept cache is of this model, and holds no more than a text of full length needs.

        All slots of the cache count as the request's own, free slots included. So it holds no more than the engine has
        checked when the request was submitted.
        """
        return kept.backend is self.backend and kept.bytes <= self.least_bytes

    def close(self) -> None:
        """Give up the cache."""
        self._peak_slots, self._reused_tokens = self.peak_slots, self.reused_tokens
        self._slots = None

    def prefix(self, node: int | None, pending: Nodes) -> Prefix:
        """The evaluated beginning of the text down to a node, with the cache.

        Args:
            node: None for the longest text.
            pending: nodes of a pass that has not ended.
        """
        if node is None:
            node = int(self.tree.kept[self.tree.depths(self.tree.kept).argmax()])
        return self.slots.prefix(self.tree.path(node), pending)

    @property
    def is_open(self) -> bool:
        """Whether there is a cache."""
        return self._slots is not None

    @property
    def slots(self) -> Slots:
        """Where the nodes lie, while there is a cache."""
        assert self._slots is not None
        return self._slots

    @property
    def used_slots(self) -> int:
        """Slots in use."""
        return 0 if self._slots is None else self._slots.used

    @property
    def peak_slots(self) -> int:
        """The most slots that were in use at once."""
        return max(self._peak_slots, 0 if self._slots is None else self._slots.peak)

    @property
    def reused_tokens(self) -> int:
        """Tokens that an earlier request had evaluated."""
        return max(self._reused_tokens, 0 if self._slots is None else self._slots.reused)

    @property
    def held_bytes(self) -> int:
        """Bytes that the cache holds. Slots that were given back stay in it until they are used again."""
        return 0 if self._slots is None else self._bytes(self._slots.held)

    @property
    def surplus_bytes(self) -> int:
        """Bytes that the cache would not hold, had it not been taken over."""
        return 0 if self._slots is None else self._slots.surplus * self.backend.slot_bytes

    @property
    def needed_bytes(self) -> int:
        """Bytes that the cache needs for one more round."""
        return max(self.held_bytes, self._bytes(self.tree.live + self.most_rows))

    @property
    def least_bytes(self) -> int:
        """Bytes that the cache needs for one text of full length."""
        return self._least_slots * self.backend.slot_bytes

    def growth_bytes(self, nodes: Nodes) -> int:
        """Bytes by which a pass over these nodes makes the cache grow."""
        return self.slots.growth(nodes) * self.backend.slot_bytes

    def _bytes(self, slots: int) -> int:
        return (slots + len(self._source or ())) * self.backend.slot_bytes
