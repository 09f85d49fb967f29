"""The token tree: every decoding method is a walk over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Nodes = NDArray[np.int64]


class Tree:
    """Tokens with parents. A node is a number; a parent's number is smaller than its children's.

    The nodes that are still of use are *live*: those kept last, their ancestors, and whatever was added since. The
    live nodes begin with the *trunk*, the path from the root that all of them share: at first the prompt, then also
    what every surviving hypothesis agrees on. Text on the trunk can no longer change, so it can be streamed.

    Attributes:
        prompt_length: number of prompt tokens; they are nodes 0 to prompt_length - 1.
        dropped: nodes that were let go and whose memory has not been taken back yet (the engine empties this).
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        n = self.prompt_length = len(prompt)
        self._size = n
        self._tokens = np.array(prompt, dtype=np.int64)
        self._parents = np.arange(-1, n - 1, dtype=np.int64)
        self._depths = np.arange(n, dtype=np.int64)
        self._scores = np.zeros(n)
        self._trunk = np.arange(n, dtype=np.int64)  # the trunk's node at each depth
        self._trunk_length = n
        self._branches: Nodes = np.empty(0, dtype=np.int64)  # live nodes beyond the trunk, ascending
        self.dropped: list[Nodes] = []

    def __len__(self) -> int:
        """How many nodes there have ever been."""
        return self._size

    @property
    def tip(self) -> int:
        """The last node of the trunk."""
        return int(self._trunk[self._trunk_length - 1])

    @property
    def trunk(self) -> Nodes:
        """The trunk's nodes from the root on."""
        return self._trunk[: self._trunk_length]

    @property
    def live(self) -> int:
        """How many nodes are live."""
        return self._trunk_length + len(self._branches)

    def tokens(self, nodes: Any) -> Nodes:
        """Token ids of nodes, int64, in the nodes' shape."""
        return self._tokens[nodes]

    def parents(self, nodes: Any) -> Nodes:
        """Parents of nodes, -1 for the root's."""
        return self._parents[nodes]

    def depths(self, nodes: Any) -> Nodes:
        """Positions of nodes in their text, 0 for the root."""
        return self._depths[nodes]

    def scores(self, nodes: Any) -> NDArray[np.float64]:
        """Sums of the log-probabilities of the generated tokens down to these nodes."""
        return self._scores[nodes]

    def add(self, parents: Any, tokens: Any, log_probs: Any = 0.0) -> Nodes:
        """Add one child a parent and return the new nodes.

        Args:
            parents: nodes, int [n]. Each is the trunk's tip or beyond it, and live.
            tokens: token ids, int [n].
            log_probs: the tokens' log-probabilities given what precedes them, float [n].
        """
        parents = np.atleast_1d(np.asarray(parents, dtype=np.int64))
        start, end = self._size, self._size + len(parents)
        if end > len(self._tokens):
            self._grow(end)
        self._tokens[start:end] = tokens
        self._parents[start:end] = parents
        self._depths[start:end] = self._depths[parents] + 1
        self._scores[start:end] = self._scores[parents] + log_probs
        self._size = end
        nodes = np.arange(start, end, dtype=np.int64)
        self._branches = np.concatenate([self._branches, nodes])
        return nodes

    def keep(self, nodes: Any) -> None:
        """Drop every node that is neither one of these nor an ancestor of one; advance the trunk."""
        kept = np.zeros(len(self._branches), dtype=bool)
        climbing = np.unique(np.asarray(nodes, dtype=np.int64))
        shallowest = int(self._depths[climbing].min())
        trunk_depth = self._trunk_length - 1
        while True:
            depths = self._depths[climbing]
            on_trunk = depths <= trunk_depth
            at = np.searchsorted(self._branches, climbing[~on_trunk])
            expected = np.concatenate([self._trunk[depths[on_trunk]], self._branches[at[at < len(self._branches)]]])
            climbing = np.concatenate([climbing[on_trunk], climbing[~on_trunk]])
            if not np.array_equal(expected, climbing):
                raise ValueError(f"nodes {climbing.tolist()} are not all live")
            climbing = climbing[on_trunk.sum() :]
            if not len(climbing):
                break
            kept[at] = True
            climbing = np.unique(self._parents[climbing])
        if not kept.all():
            self.dropped.append(self._branches[~kept])
            self._branches = self._branches[kept]
        self._advance(shallowest)

    def _advance(self, shallowest: int) -> None:
        """Move onto the trunk what all live nodes share.

        The only live node at its depth is shared, unless a kept node is shallower and so ends before it.
        """
        depths = self._depths[self._branches]
        order = np.argsort(depths, kind="stable")
        depths, nodes = depths[order], self._branches[order]
        shared = (depths <= shallowest) & np.append(depths[1:] > depths[:-1], True)[: len(depths)]
        alone = len(shared) if shared.all() else int(shared.argmin())
        if alone == 0:
            return
        length = self._trunk_length + alone
        if length > len(self._trunk):
            self._trunk = np.resize(self._trunk, 2 * length)
        self._trunk[self._trunk_length : length] = nodes[:alone]
        self._trunk_length = length
        self._branches = np.sort(nodes[alone:])

    def path(self, node: int) -> Nodes:
        """The nodes from the root down to a live node."""
        above: list[int] = []
        trunk_depth = self._trunk_length - 1
        while self._depths[node] > trunk_depth:
            above.append(node)
            node = int(self._parents[node])
        return np.concatenate([self._trunk[: self._depths[node] + 1], np.array(above[::-1], dtype=np.int64)])

    def new_tokens(self, node: int) -> list[int]:
        """The generated token ids from the end of the prompt down to a live node."""
        tokens: list[int] = self._tokens[self.path(node)[self.prompt_length :]].tolist()
        return tokens

    def _grow(self, size: int) -> None:
        room = max(2 * len(self._tokens), size, 64)
        for name in ("_tokens", "_parents", "_depths", "_scores"):
            old = getattr(self, name)
            new = np.empty(room, dtype=old.dtype)
            new[: self._size] = old[: self._size]
            setattr(self, name, new)
