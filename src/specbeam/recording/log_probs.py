"""Per-node log-probabilities of the model, beside the selections that the strategy asks for.

They are the model's own, at temperature 1, and belong to nodes and not to steps. So it makes no difference which method
evaluated a node, or whether it was a draft token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Generic, TypeVar

from specbeam.core.selection import Selection, SelectionRequest
from specbeam.core.tree import Nodes, Tree

V = TypeVar("V")

MIN_FORGOTTEN = 64
"""Look for dead nodes only after this many new ones, or after as many as were alive at the last look."""


class NodeLogProbs(ABC, Generic[V]):
    """A value for each evaluated node, for as long as the node lives.

    Args:
        default: the value of a node that was not evaluated: a custom strategy may add tokens without any logits.
    """

    def __init__(self, tree: Tree, default: V) -> None:
        self._tree = tree
        self._default = default
        self._values: dict[int, V] = {}
        self._max_values = MIN_FORGOTTEN

    @abstractmethod
    def selection_request(self, own: SelectionRequest | None) -> SelectionRequest | None:
        """The request at nodes, beside the strategy's own there; None if there can be none."""

    @abstractmethod
    def values(self, selection: Selection) -> Iterable[V]:
        """The values of the nodes of a selection."""

    def add(self, nodes: Nodes, selection: Selection) -> None:
        """Take in the selection at nodes, int64 [n]."""
        self._values.update(zip(nodes.tolist(), self.values(selection), strict=True))
        if len(self._values) > self._max_values:
            self._values = {node: value for node, value in self._values.items() if self._tree.is_live(node)}
            self._max_values = max(2 * len(self._values), MIN_FORGOTTEN)

    def after(self, node: int) -> V:
        """The value of a live node."""
        return self._values.get(node, self._default)


class Alternatives(NodeLogProbs[dict[int, float]]):
    """The log-probabilities of the k likeliest tokens after each node, by token id, the likeliest first."""

    def __init__(self, tree: Tree, k: int) -> None:
        super().__init__(tree, {})
        self._request = SelectionRequest(top=k)

    def selection_request(self, own: SelectionRequest | None) -> SelectionRequest:
        return self._request

    def values(self, selection: Selection) -> Iterable[dict[int, float]]:
        rows = zip(selection.tokens.tolist(), selection.log_probs.tolist(), strict=True)
        return (dict(zip(*row, strict=True)) for row in rows)


class AllowedMass(NodeLogProbs[float]):
    """The log-probability of all tokens together that a constraint allows after each node."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(tree, 0.0)

    def selection_request(self, own: SelectionRequest | None) -> SelectionRequest | None:
        """The strategy's own masks and bans, and no other changes."""
        if own is None:
            return None
        return SelectionRequest(
            top=0,
            vocab=own.vocab,
            normalize=True,
            edits=tuple(edit for edit in own.edits if edit.kind == "ban"),
            allowed=own.allowed,
            one_of=own.one_of,
            together=own.together,
            total=True,
        )

    def values(self, selection: Selection) -> Iterable[float]:
        assert selection.totals is not None
        values: list[float] = selection.totals.tolist()
        return values
