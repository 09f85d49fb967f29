"""The likeliest tokens after each node of a sequence: the alternatives to the tokens that were chosen."""

from __future__ import annotations

from specbeam.decoding import Selection, SelectionRequest
from specbeam.tree import Nodes, Tree

MIN_FORGOTTEN_ROWS = 64
"""Look for dead nodes only after this many new ones, or after as many as were alive at the last look."""


class Alternatives:
    """Keeps the k likeliest tokens after each evaluated node, for as long as the node lives.

    The probabilities are the model's own, before processors and warpers. They belong to nodes and not to steps, so it
    makes no difference which method evaluated a node, or whether it was a draft token.
    """

    def __init__(self, tree: Tree, k: int) -> None:
        self._tree = tree
        self._k = k
        self._rows: dict[int, dict[int, float]] = {}
        self._max_rows = MIN_FORGOTTEN_ROWS

    @property
    def selection_request(self) -> SelectionRequest:
        """The request at each node."""
        return SelectionRequest(top=self._k)

    def add(self, nodes: Nodes, selection: Selection) -> None:
        """Take in the selection at nodes, int64 [n]."""
        for node, *row in zip(nodes.tolist(), selection.tokens.tolist(), selection.log_probs.tolist(), strict=True):
            self._rows[node] = dict(zip(*row, strict=True))
        if len(self._rows) > self._max_rows:
            lives = self._tree.live_among([*self._rows])
            self._rows = {node: row for (node, row), alive in zip(self._rows.items(), lives, strict=True) if alive}
            self._max_rows = max(2 * len(self._rows), MIN_FORGOTTEN_ROWS)

    def after(self, node: int) -> dict[int, float]:
        """The log-probabilities of the k likeliest tokens after a live node, the likeliest first.

        Empty after a node that was not evaluated: a strategy of the caller may add tokens without the model's logits.
        """
        return self._rows.get(node, {})
