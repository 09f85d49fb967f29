"""The rows of logits that a strategy waits for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from specbeam.core.selection import Logits
from specbeam.core.tree import Nodes

Join = Callable[[list[Logits]], Logits]
""":meth:`specbeam.backends.contract.Backend.join`"""


class WantedRows:
    """The nodes at which a strategy wants logits, and the rows that have come.

    Rows come in the ascending order of their nodes. Where memory is short, the nodes are evaluated in parts.

    Attributes:
        nodes: in the strategy's order, int64 [n]. They may repeat.
        ascending: each of them once, int64 [m].
        in_order: whether both are the same.
        part: the nodes that are evaluated now, int64 [p].
    """

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = np.asarray(nodes, dtype=np.int64)
        given = self.nodes.tolist()
        ascending = sorted({*given})
        self.in_order = given == ascending
        self.ascending = self.part = self.nodes if self.in_order else np.array(ascending, dtype=np.int64)
        self._received: list[Logits] = []

    def restart(self) -> None:
        """Drop the rows that have come."""
        self._received = []

    @property
    def rest(self) -> Nodes:
        """The nodes whose rows have not come."""
        return self.ascending[sum(map(len, self._received)) :]

    @property
    def is_whole(self) -> bool:
        """Whether the part is all nodes."""
        return not self._received and len(self.part) == len(self.ascending)

    @property
    def is_last_part(self) -> bool:
        """Whether no node comes after the part."""
        return bool(self.part[-1] == self.ascending[-1])

    def among(self, nodes: Nodes) -> NDArray[np.int64]:
        """The places of the part's nodes among some nodes of a pass, ascending."""
        first, end = self.part.searchsorted((nodes[0], nodes[-1] + 1))
        return nodes.searchsorted(self.part[first:end])

    def add(self, logits: Logits, join: Join) -> None:
        """Take some rows, [k, vocab]. The others come later."""
        if len(logits):  # a view would keep the logits of the whole pass
            self._received.append(join([logits]))

    def complete(self, logits: Logits, join: Join) -> Logits:
        """The rows in the strategy's order, [n, vocab], with the last ones that have come."""
        logits = join([*self._received, logits]) if self._received else logits
        self._received = []
        if self.in_order:
            return logits
        return join([logits[row : row + 1] for row in self.ascending.searchsorted(self.nodes).tolist()])
