"""The token tree: every decoding method is a walk over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Nodes = NDArray[np.int64]

NO_NODES: Nodes = np.empty(0, dtype=np.int64)
NO_ROW = -1


class Tree:
    """Tokens with parents. A node is an integer, smaller than each of its children.

    *Live* nodes are the nodes of the last ``keep``, their ancestors, and all nodes added since. The paths to all live
    nodes begin alike. This shared path from the root is the *trunk*: first the prompt, then also the tokens that all
    surviving hypotheses share. Text on the trunk can no longer change, so it can be streamed.

    A *guess* is a node that a drafter added. If a strategy then adds the same token below the same parent, it gets the
    guessed node, which may have been evaluated already.

    Attributes:
        prompt_length: number of prompt tokens; they are nodes 0 to prompt_length - 1.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        n = self.prompt_length = len(prompt)
        self._size = n
        self._tokens = np.array(prompt, dtype=np.int64)
        self._parents = np.arange(-1, n - 1, dtype=np.int64)
        self._depths = np.arange(n, dtype=np.int64)
        self._log_probs = np.zeros(n)
        self._scores = np.zeros(n)
        # A node lives while a live child or the strategy itself holds it. It is held for growth, too, while any text
        # through it may still grow.
        self._holders = np.ones(n, dtype=np.int64)
        self._growth_holders = np.ones(n, dtype=np.int64)
        self._trunk = np.arange(n, dtype=np.int64)  # the trunk's node at each depth
        self._trunk_length = n
        self._live = n
        self._kept = self._growing = np.array([n - 1])  # held by the strategy itself, ascending
        # Paths are climbed only down to the nodes that grew at the last keep: theirs beyond the trunk are remembered.
        self._row = np.full(n, NO_ROW, dtype=np.int64)  # by node, its row of remembered paths
        self._remembered: Nodes = NO_NODES  # the nodes with a row
        self._paths = np.empty((0, 0), dtype=np.int64)
        self._paths_start = n  # the depth of the first column
        self._guesses: dict[tuple[int, int], int] = {}  # by parent and token
        self._dropped = NO_NODES

    def __len__(self) -> int:
        """The number of nodes ever added, dropped nodes included."""
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
        """The number of live nodes."""
        return self._live

    @property
    def kept(self) -> Nodes:
        """The nodes of the last :meth:`keep` and all nodes added since, int64 [n]."""
        return self._kept

    def tokens(self, nodes: Any) -> Nodes:
        """Token ids of nodes, int64, in the nodes' shape."""
        return self._tokens[nodes]

    def parents(self, nodes: Any) -> Nodes:
        """Parents of nodes, -1 for the root's."""
        return self._parents[nodes]

    def depths(self, nodes: Any) -> Nodes:
        """Positions of nodes in their text, 0 for the root."""
        return self._depths[nodes]

    def log_probs(self, nodes: Any) -> NDArray[np.float64]:
        """Log-probabilities of nodes' tokens given what precedes them, 0 for the prompt's tokens."""
        return self._log_probs[nodes]

    def scores(self, nodes: Any) -> NDArray[np.float64]:
        """Sums of the log-probabilities of the generated tokens down to these nodes."""
        return self._scores[nodes]

    def add(self, parents: Any, tokens: Any, log_probs: Any = 0.0) -> Nodes:
        """Add one child per parent and return the children, int64 [n]. A child that was guessed is not added again.

        Args:
            parents: nodes, int [n]. Each is the trunk's tip or beyond it, and live.
            tokens: token ids, int [n].
            log_probs: the tokens' log-probabilities given what precedes them, float [n].
        """
        parents = np.atleast_1d(np.asarray(parents, dtype=np.int64))
        tokens = np.broadcast_to(np.asarray(tokens, dtype=np.int64), parents.shape)
        if self._guesses:
            nodes = self.guessed(parents, tokens)
            new = nodes < 0
            nodes[new] = self._append(parents[new], tokens[new])
        else:
            nodes = self._append(parents, tokens)
        self._log_probs[nodes] = log_probs
        self._scores[nodes] = self._scores[parents] + log_probs
        return nodes

    def guess(self, parents: Any, tokens: Any) -> Nodes:
        """Add one guess per parent, int [n] each, and return them. A guess made before is not added again."""
        parents = np.atleast_1d(np.asarray(parents, dtype=np.int64))
        tokens = np.broadcast_to(np.asarray(tokens, dtype=np.int64), parents.shape)
        pairs = list(zip(parents.tolist(), tokens.tolist(), strict=True))
        new = list(dict.fromkeys(pair for pair in pairs if pair not in self._guesses))
        if new:
            above, below = np.array(new, dtype=np.int64).T
            self._guesses.update(zip(new, self._append(above, below).tolist(), strict=True))
        return np.array([self._guesses[pair] for pair in pairs], dtype=np.int64)

    def guessed(self, parents: Nodes, tokens: Nodes) -> Nodes:
        """The guesses of these tokens below these parents, int [n] each; -1 where no such guess exists."""
        pairs = zip(parents.tolist(), tokens.tolist(), strict=True)
        return np.array([self._guesses.get(pair, -1) for pair in pairs], dtype=np.int64)

    def _append(self, parents: Nodes, tokens: Nodes) -> Nodes:
        start, end = self._size, self._size + len(parents)
        if end > len(self._tokens):
            self._grow(end)
        nodes = np.arange(start, end, dtype=np.int64)
        self._tokens[nodes] = tokens
        self._parents[nodes] = parents
        self._depths[nodes] = self._depths[parents] + 1
        self._log_probs[nodes], self._scores[nodes] = 0.0, self._scores[parents]
        for holders in (self._holders, self._growth_holders):
            holders[nodes] = 1  # until the next keep, the strategy
            np.add.at(holders, parents, 1)
        self._row[nodes] = NO_ROW
        self._size = end
        self._live += len(nodes)
        self._kept = np.concatenate([self._kept, nodes])
        self._growing = np.concatenate([self._growing, nodes])
        return nodes

    def live_among(self, nodes: Any) -> NDArray[np.bool_]:
        """Which of the nodes, int [n], are live, bool [n]."""
        return self._holders[nodes] > 0

    def keep(self, growing: Any, finished: Any = NO_NODES) -> None:
        """Drop every node that is neither one of these nor an ancestor of one; advance the trunk.

        Nothing grows below finished nodes. They and the ancestors that no growing node needs stay in the tree. But no
        pass will need them again, so they are among the nodes that :meth:`take_dropped` returns.
        """
        growing = np.unique(np.asarray(growing, dtype=np.int64))
        kept = np.union1d(growing, np.asarray(finished, dtype=np.int64))
        dead = kept[self._holders[kept] <= 0]
        if len(dead):
            raise ValueError(f"nodes {dead.tolist()} are not all live")
        idle = self._hold(self._growth_holders, self._growing, growing)
        gone = self._hold(self._holders, self._kept, kept)
        self._growing, self._kept = growing, kept
        if len(idle):
            self._dropped = np.concatenate([self._dropped, idle])
            if self._guesses:  # a finished node is no guess any more: its slot is gone
                self._forget_guesses(idle)
        self._live -= len(gone)
        self._remember_paths()
        self._advance()

    def take_dropped(self) -> Nodes:
        """The nodes dropped since the last call, int64 [n]. Nothing grows below them: their cache slots are free."""
        dropped, self._dropped = self._dropped, NO_NODES
        return dropped

    def _hold(self, holders: NDArray[np.int64], before: Nodes, now: Nodes) -> Nodes:
        """Hold other nodes than before, and return the nodes that nothing holds any more. Costs time for these only."""
        holders[np.setdiff1d(now, before, assume_unique=True)] += 1
        let_go = np.setdiff1d(before, now, assume_unique=True)
        holders[let_go] -= 1
        gone = []
        while len(let_go := let_go[holders[let_go] == 0]):
            gone.append(let_go)
            let_go, children = np.unique(self._parents[let_go], return_counts=True)
            holders[let_go] -= children
        return np.concatenate(gone) if gone else NO_NODES

    def _forget_guesses(self, nodes: Nodes) -> None:
        pairs = zip(self._parents[nodes].tolist(), self._tokens[nodes].tolist(), strict=True)
        for pair, node in zip(pairs, nodes.tolist(), strict=True):
            if self._guesses.get(pair) == node:
                del self._guesses[pair]

    def _remember_paths(self) -> None:
        paths = self.paths_beyond_trunk(self._growing)
        self._row[self._remembered] = NO_ROW
        self._row[self._growing] = np.arange(len(self._growing))
        self._remembered, self._paths, self._paths_start = self._growing, paths, self._trunk_length

    def _advance(self) -> None:
        """Extend the trunk by each node that all live nodes share: the only child of a tip that is not itself kept."""
        held_itself = set(self._kept[self._depths[self._kept] >= self._trunk_length - 1].tolist())
        length = self._trunk_length
        (path,) = self._paths[:1] if len(self._paths) else self.paths_beyond_trunk(self._kept[:1])
        while self._holders[tip := self.tip] == 1 and tip not in held_itself:
            if self._trunk_length == len(self._trunk):
                self._trunk = np.resize(self._trunk, 2 * len(self._trunk))
            self._trunk[self._trunk_length] = path[self._trunk_length - length]
            self._trunk_length += 1

    def path(self, node: int) -> Nodes:
        """The nodes from the root down to a live node."""
        (path,) = self.paths(np.array([node]))
        return path

    def paths(self, nodes: Any) -> Nodes:
        """The nodes from the root down to live nodes, int64 [n, longest path]; shorter paths repeat their last node."""
        nodes = np.asarray(nodes, dtype=np.int64)
        depths = self._depths[nodes]
        columns = np.arange(min(self._trunk_length, depths.max() + 1))
        shared = self._trunk[np.minimum(columns, depths[:, None])]
        return np.concatenate([shared, self.paths_beyond_trunk(nodes)], axis=1)

    def paths_beyond_trunk(self, nodes: Nodes) -> Nodes:
        """The columns of :meth:`paths` from the trunk's end on; nodes on the trunk are repeated."""
        begin, depths = self._trunk_length, self._depths[nodes]
        climbed, at = [], np.arange(len(nodes))
        known = nodes.copy()  # the nodes, or ancestors of theirs: on the trunk, or with a remembered path
        while len(at := at[(self._row[known[at]] == NO_ROW) & (self._depths[known[at]] >= begin)]):
            climbed.append((at, known[at]))
            known[at] = self._parents[known[at]]
        columns = np.arange(begin, depths.max(initial=begin - 1) + 1)
        paths = np.repeat(nodes[:, None], len(columns), axis=1)
        at = np.flatnonzero(self._row[known] != NO_ROW)
        known_paths = self._paths[:, begin - self._paths_start :][:, : len(columns)]
        paths[at, : known_paths.shape[1]] = known_paths[self._row[known[at]]]
        for at, ancestors in climbed:
            paths[at, self._depths[ancestors] - begin] = ancestors
        if (shorter := np.flatnonzero(depths < depths.max(initial=0))).size:
            paths[shorter] = np.where(columns <= depths[shorter, None], paths[shorter], nodes[shorter, None])
        return paths

    def new_tokens(self, node: int) -> list[int]:
        """The generated token ids from the end of the prompt down to a live node."""
        tokens: list[int] = self._tokens[self.path(node)[self.prompt_length :]].tolist()
        return tokens

    def below(self, nodes: Any, ancestors: Any) -> NDArray[np.bool_]:
        """Which of the nodes, int [n], are one of the ancestors or below one, bool [n]."""
        nodes, ancestors = np.asarray(nodes, dtype=np.int64), np.asarray(ancestors, dtype=np.int64)
        found = np.isin(nodes, ancestors)
        shallowest = self._depths[ancestors].min(initial=self._size)
        climbing = nodes
        while (deeper := ~found & (self._depths[climbing] > shallowest)).any():
            climbing = np.where(deeper, self._parents[climbing], climbing)
            found |= deeper & np.isin(climbing, ancestors)
        return found

    def _grow(self, size: int) -> None:
        room = max(2 * len(self._tokens), size, 64)
        for name in ("_tokens", "_parents", "_depths", "_log_probs", "_scores", "_holders", "_growth_holders", "_row"):
            old = getattr(self, name)
            new = np.empty(room, dtype=old.dtype)
            new[: self._size] = old[: self._size]
            setattr(self, name, new)
