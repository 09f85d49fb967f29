"""How probable all tokens together are that a constraint allows, after each node of a sequence."""

from __future__ import annotations

from specbeam.decoding import Selection, SelectionRequest
from specbeam.decoding.alternatives import MIN_FORGOTTEN_ROWS
from specbeam.tree import Nodes, Tree


class AllowedMass:
    """Keeps the log-probability of the allowed tokens after each evaluated node, for as long as the node lives.

    The probabilities are the model's own, at temperature 1. They belong to nodes and not to steps, as the likeliest
    tokens do in :class:`specbeam.decoding.alternatives.Alternatives`.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._masses: dict[int, float] = {}
        self._max_masses = MIN_FORGOTTEN_ROWS

    def selection_request(self, own: SelectionRequest) -> SelectionRequest:
        """The request at nodes, from the strategy's own there: its masks and bans, and no other changes."""
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

    def add(self, nodes: Nodes, selection: Selection) -> None:
        """Take in the selection at nodes, int64 [n]."""
        assert selection.totals is not None
        self._masses.update(zip(nodes.tolist(), selection.totals.tolist(), strict=True))
        if len(self._masses) > self._max_masses:
            lives = self._tree.live_among([*self._masses])
            self._masses = {
                node: mass for (node, mass), alive in zip(self._masses.items(), lives, strict=True) if alive
            }
            self._max_masses = max(2 * len(self._masses), MIN_FORGOTTEN_ROWS)

    def after(self, node: int) -> float:
        """The log-probability of the allowed tokens after a live node; 0 after one that was not evaluated."""
        return self._masses.get(node, 0.0)
