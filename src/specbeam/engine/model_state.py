"""The state of one request on one model: on the target, or on the draft model."""

from __future__ import annotations

from typing import Any, cast

from specbeam.backends.contract import Backend, EncodingBackend
from specbeam.engine.slots import Slots
from specbeam.tree import Tree


class ModelState:
    """The slots of a request's tree in the model's cache, and counts of the passes the request took part in.

    Args:
        most_slots: the most cache slots that the request may need.

    Attributes:
        passes: forward passes that the request took part in.
        answered: passes that completed the logits of a wish of the strategy. Other passes read parts of a prompt.
        seconds: the request's share of the time of its passes, by its share of their nodes.
        nodes: nodes evaluated for the request.
    """

    def __init__(self, backend: Backend[Any], tree: Tree, most_slots: int) -> None:
        self.backend = backend
        self.tree = tree
        self.most_slots = most_slots
        self.passes = self.answered = self.nodes = 0
        self.seconds = 0.0
        self._slots: Slots | None = None

    def open(self, prompt_ids: list[int]) -> None:
        """Take a cache. A model with an encoder reads the prompt now."""
        self._slots = Slots(self.tree, self.backend, self.most_slots)
        if self.backend.start_token_ids is not None:
            cast(EncodingBackend[Any], self.backend).encode(self._slots.cache, prompt_ids)

    def close(self) -> None:
        """Give up the cache."""
        self._slots = None

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
        return 0 if self._slots is None else self._slots.peak
