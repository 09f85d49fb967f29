"""The token tree: every decoding method is a walk over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Nodes = NDArray[np.int64]

NO_NODES: Nodes = np.empty(0, dtype=np.int64)
S = TypeVar("S")

MIN_STATES_TO_FORGET = 64
"""Small states are kept up to this number before the first is dropped."""


class Holders:
    """Reference counts of nodes. A node is held by each child that is held, and by the tree if its caller keeps it.

    Attributes:
        counts: by node, how many hold it.
        kept: the nodes that the tree itself holds.
    """

    def __init__(self, size: int) -> None:
        self.counts = [1] * size
        self.kept = {size - 1}

    def add(self, nodes: range, parents: list[int]) -> None:
        """Hold new nodes, one below each parent, until the next :meth:`keep`."""
        counts = self.counts
        counts += [1] * len(parents)
        for parent in parents:
            counts[parent] += 1
        self.kept.update(nodes)

    def append(self, node: int, parent: int) -> None:
        """Hold one new node."""
        self.counts.append(1)
        self.counts[parent] += 1
        self.kept.add(node)

    def keep(self, nodes: set[int], parents: Nodes) -> list[int]:
        """Keep these nodes and no others. Return the nodes that nothing holds any more. It costs time for these only.

        Args:
            parents: of all nodes, by node.
        """
        counts, gone = self.counts, []
        for node in nodes - self.kept:
            counts[node] += 1
        for node in self.kept - nodes:
            while node >= 0:
                counts[node] -= 1
                if counts[node]:
                    break
                gone.append(node)
                node = parents.item(node)
        self.kept = nodes
        return gone


class Tree:
    """Tokens with parents. A node is an integer, smaller than each of its children.

    *Live* nodes are the nodes of the last ``keep``, their ancestors, and all nodes added since. The path from the root
    that all of them share is the *shared prefix*: first the prompt, then also the tokens that all surviving hypotheses
    begin with. It can no longer change, so its text can be streamed.

    A *draft token* is a node that a drafter added. If a strategy then adds the same token below the same parent, it
    gets the drafted node, which may have been evaluated already.

    Attributes:
        prompt_length: number of prompt tokens; they are nodes 0 to prompt_length - 1.
        tip: the last node of the shared prefix.
        prefix_length: number of nodes of the shared prefix.
        live: number of live nodes.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        n = self.prompt_length = len(prompt)
        self._size = n
        self._tokens = np.array(prompt, dtype=np.int64)
        self._parents = np.arange(-1, n - 1, dtype=np.int64)
        self._depths = np.arange(n, dtype=np.int64)
        self._log_probs = np.zeros(n)
        self._scores = np.zeros(n)
        self._living = Holders(n)
        self._growing = Holders(n)  # a node is needed for growth while any sequence through it may grow
        self._child_sum = [0] * n  # of the numbers of a node's live children; of an only child, its number
        self._prefix = np.arange(n, dtype=np.int64)  # the shared prefix: its node at each depth
        self.prefix_length = n
        self.tip = n - 1
        self.live = n
        # Paths are climbed only up to the nodes that grew at the last keep: theirs beyond the prefix are kept.
        self._paths: dict[int, Nodes] = {}
        self._paths_start = n  # the depth at which they begin
        self._unremembered: set[int] = set()  # the nodes that grew at the last keep, if their paths were not asked for
        self._draft_tokens: dict[tuple[int, int], int] = {}  # by parent and token
        self._dropped: set[int] = set()

    def __len__(self) -> int:
        """The number of nodes ever added, dropped nodes included."""
        return self._size

    @property
    def prefix(self) -> Nodes:
        """The nodes of the shared prefix, from the root on."""
        return self._prefix[: self.prefix_length]

    @property
    def kept(self) -> Nodes:
        """The nodes of the last :meth:`keep` and all nodes added since, int64 [n]."""
        return np.array(sorted(self._living.kept), dtype=np.int64)

    @property
    def finished(self) -> set[int]:
        """The finished nodes of the last :meth:`keep` that no growing sequence needs."""
        return self._living.kept - self._growing.kept

    @property
    def growing_depth(self) -> int:
        """The least position of the nodes that may grow: the nodes of the last :meth:`keep` and all added since."""
        return min(map(self._depths.item, self._growing.kept), default=self.prefix_length - 1)

    def tokens(self, nodes: Any) -> Nodes:
        """Token ids of nodes, int64, in the nodes' shape."""
        return self._tokens[nodes]

    def parents(self, nodes: Any) -> Nodes:
        """Parents of nodes, -1 for the root's."""
        return self._parents[nodes]

    def depths(self, nodes: Any) -> Nodes:
        """Positions of nodes in their sequence, 0 for the root."""
        return self._depths[nodes]

    def log_probs(self, nodes: Any) -> NDArray[np.float64]:
        """Log-probabilities of nodes' tokens given what precedes them, 0 for the prompt's tokens."""
        return self._log_probs[nodes]

    def scores(self, nodes: Any) -> NDArray[np.float64]:
        """Sums of the log-probabilities of the generated tokens down to these nodes."""
        return self._scores[nodes]

    def add(self, parents: Any, tokens: Any, log_probs: Any = 0.0) -> Nodes:
        """Add one child per parent and return the children, int64 [n]. A drafted child is not added again.

        Args:
            parents: nodes, int [n]. Each is the prefix's tip or beyond it, and live.
            tokens: token ids, int [n].
            log_probs: the tokens' log-probabilities given what precedes them, float [n].
        """
        parents = np.array(parents, dtype=np.int64, ndmin=1)
        if self._draft_tokens:
            tokens = np.broadcast_to(np.asarray(tokens, dtype=np.int64), parents.shape)
            nodes = self.drafted(parents, tokens)
            new = nodes < 0
            nodes[new] = self._append(parents[new], tokens[new])
        else:
            nodes = self._append(parents, tokens)
        self._log_probs[nodes] = log_probs
        self._scores[nodes] = self._scores[parents] + log_probs
        return nodes

    def append(self, parent: int, token: int, log_prob: float) -> int:
        """Add one child and return it: :meth:`add` for a single sequence, in a few operations."""
        if self._draft_tokens:
            return int(self.add(parent, token, log_prob)[0])
        node = self._size
        if node == len(self._tokens):
            self._grow(node + 1)
        self._tokens[node] = token
        self._parents[node] = parent
        self._depths[node] = self._depths[parent] + 1
        self._log_probs[node] = log_prob
        self._scores[node] = self._scores[parent] + log_prob
        self._living.append(node, parent)
        self._growing.append(node, parent)
        self._child_sum.append(0)
        self._child_sum[parent] += node
        self._size += 1
        self.live += 1
        return node

    def draft(self, parents: Any, tokens: Any) -> Nodes:
        """Add one draft token per parent, int [n] each, and return them. An existing one is not added again."""
        parents = np.array(parents, dtype=np.int64, ndmin=1)
        tokens = np.broadcast_to(np.asarray(tokens, dtype=np.int64), parents.shape)
        pairs = list(zip(parents.tolist(), tokens.tolist(), strict=True))
        new = list(dict.fromkeys(pair for pair in pairs if pair not in self._draft_tokens))
        if new:
            above, below = np.array(new, dtype=np.int64).T
            nodes = self._append(above, below)
            self._log_probs[nodes], self._scores[nodes] = 0.0, self._scores[above]
            self._draft_tokens.update(zip(new, nodes.tolist(), strict=True))
        return np.array([self._draft_tokens[pair] for pair in pairs], dtype=np.int64)

    def drafted(self, parents: Nodes, tokens: Nodes) -> Nodes:
        """The draft tokens with these ids below these parents, int [n] each; -1 where there is none."""
        pairs = zip(parents.tolist(), tokens.tolist(), strict=True)
        return np.array([self._draft_tokens.get(pair, -1) for pair in pairs], dtype=np.int64)

    def _append(self, parents: Nodes, tokens: Any) -> Nodes:
        """Add a child for each parent, int64 [n], without its log-probability and score."""
        start, end = self._size, self._size + len(parents)
        if end > len(self._tokens):
            self._grow(end)
        self._tokens[start:end] = tokens
        self._parents[start:end] = parents
        self._depths[start:end] = self._depths[parents] + 1
        above = parents.tolist()
        self._living.add(range(start, end), above)
        self._growing.add(range(start, end), above)
        self._child_sum += [0] * len(above)
        for node, parent in enumerate(above, start):
            self._child_sum[parent] += node
        self._size = end
        self.live += len(above)
        return np.arange(start, end, dtype=np.int64)

    def is_live(self, node: int) -> bool:
        """Whether a node is live."""
        return self._living.counts[node] > 0

    def keep(self, growing: Any, finished: Any = NO_NODES) -> None:
        """Drop every node that is neither one of these nor an ancestor of one; extend the shared prefix.

        Nothing grows below finished nodes. They stay in the tree with their ancestors. No forward pass needs these
        again, unless a growing node is below them, so :meth:`take_dropped` returns them, too.

        Raises:
            ValueError: a node is not live.
        """
        still_growing = {growing} if type(growing) is int else {*np.array(growing, np.int64, ndmin=1).tolist()}
        kept = still_growing
        if finished is not NO_NODES:
            kept = kept.union(np.array(finished, np.int64, ndmin=1).tolist())
        if dead := [node for node in kept - self._living.kept if not self._living.counts[node]]:
            raise ValueError(f"nodes {sorted(dead)} are not all live")
        idle = self._growing.keep(still_growing, self._parents)
        self._dropped.update(idle)
        if self._draft_tokens:  # a finished node is no draft token any more: its slot is gone
            self._forget_draft_tokens(idle)
        gone = self._living.keep(kept, self._parents)
        for node in gone:
            self._child_sum[self._parents.item(node)] -= node
        self.live -= len(gone)
        self._unremembered = still_growing
        self._advance()

    def take_dropped(self) -> Nodes:
        """The nodes dropped since the last call, each once, int64 [n]. Nothing grows below them: free their slots."""
        if not self._dropped:
            return NO_NODES
        dropped, self._dropped = self._dropped, set()
        return np.array([*dropped], dtype=np.int64)

    def _forget_draft_tokens(self, nodes: list[int]) -> None:
        for node in nodes:
            pair = self._parents.item(node), self._tokens.item(node)
            if self._draft_tokens.get(pair) == node:
                del self._draft_tokens[pair]

    def _advance(self) -> None:
        """Extend the prefix by each node that all live nodes share: the only child of a tip that is not itself kept."""
        while self._living.counts[self.tip] == 1 and self.tip not in self._living.kept:
            if self.prefix_length == len(self._prefix):
                self._prefix = np.resize(self._prefix, 2 * len(self._prefix))
            self.tip = self._prefix[self.prefix_length] = self._child_sum[self.tip]
            self.prefix_length += 1

    def path(self, node: int) -> Nodes:
        """The nodes from the root down to a live node."""
        if node == self.tip:
            return self.prefix
        (path,) = self.paths(np.array([node]))
        return path

    def paths(self, nodes: Any) -> Nodes:
        """The nodes from the root down to live nodes, int64 [n, longest path]; shorter paths repeat their last node."""
        nodes = np.asarray(nodes, dtype=np.int64)
        depths = self._depths[nodes]
        columns = np.arange(min(self.prefix_length, depths.max() + 1))
        shared = self._prefix[np.minimum(columns, depths[:, None])]
        return np.concatenate([shared, self.paths_beyond_prefix(nodes)], axis=1)

    def paths_beyond_prefix(self, nodes: Nodes) -> Nodes:
        """The columns of :meth:`paths` from the prefix's end on; nodes of the prefix are repeated."""
        if self._unremembered:
            grown, self._unremembered = sorted(self._unremembered), set()
            paths = self._climb(np.array(grown, dtype=np.int64))
            self._paths, self._paths_start = dict(zip(grown, paths, strict=True)), self.prefix_length
        if len(nodes) and self._paths_start == self.prefix_length and self._paths.keys() == {*nodes.tolist()}:
            return np.array([self._paths[node] for node in nodes.tolist()])
        return self._climb(nodes)

    def _climb(self, nodes: Nodes) -> Nodes:
        """Walk up from each node to the prefix, or to a node whose path is known."""
        begin, skipped = self.prefix_length, self.prefix_length - self._paths_start
        lengths = self._depths[nodes] + 1 - begin
        paths = np.empty((len(nodes), max(0, lengths.max(initial=0))), dtype=np.int64)
        if not paths.size:
            return paths
        paths[:] = nodes[:, None]
        rows: dict[int, Nodes] = {}
        for node, length, path in zip(nodes.tolist(), lengths.tolist(), paths, strict=True):
            ancestor = node
            while length > 0:
                if (known := rows.get(ancestor)) is not None:
                    path[:length] = known[:length]
                    break
                if (known := self._paths.get(ancestor)) is not None:
                    path[:length] = known[skipped : skipped + length]
                    break
                length -= 1
                path[length] = ancestor
                ancestor = self._parents.item(ancestor)
            rows[node] = path
        return paths

    def last_tokens(self, nodes: Nodes, count: int) -> Nodes:
        """The last tokens of the sequences down to nodes, int64 [n, count]; -1 where a sequence has fewer."""
        tokens = np.full((len(nodes), count), -1)
        for column in range(count - 1, -1, -1):
            exists = nodes >= 0
            tokens[exists, column] = self._tokens[nodes[exists]]
            nodes = np.where(exists, self._parents[nodes], -1)
        return tokens

    def new_tokens(self, node: int) -> list[int]:
        """The generated token ids from the end of the prompt down to a live node."""
        tokens: list[int] = self._tokens[self.path(node)[self.prompt_length :]].tolist()
        return tokens

    def below(self, nodes: Any, ancestors: Any) -> NDArray[np.bool_]:
        """Which of the nodes, int [n], are one of the ancestors or below one, bool [n]."""
        nodes, ancestors = np.asarray(nodes, dtype=np.int64), np.asarray(ancestors, dtype=np.int64)
        shallowest = self._depths[ancestors].min(initial=self._size)
        is_below = dict.fromkeys(ancestors.tolist(), True)
        for node in nodes.tolist():
            climbed = []
            while node not in is_below and self._depths.item(node) > shallowest:
                climbed.append(node)
                node = self._parents.item(node)
            is_below.update(dict.fromkeys(climbed, is_below.get(node, False)))
        return np.array([is_below.get(node, False) for node in nodes.tolist()], dtype=bool)

    def _grow(self, size: int) -> None:
        capacity = max(2 * len(self._tokens), size, 64)
        for name in ("_tokens", "_parents", "_depths", "_log_probs", "_scores"):
            old = getattr(self, name)
            new = np.empty(capacity, dtype=old.dtype)
            new[: self._size] = old[: self._size]
            setattr(self, name, new)


class NodeStates(Generic[S]):
    """A state of the sequence down to each node, made of the parent's state and the node's token.

    Args:
        start: makes the state of the prompt of its token ids, int64 [n].
        push: makes the state after one more token. It changes no state, since sequences may branch.
        min_states: keep at least this many states before the first is dropped.
    """

    def __init__(
        self, start: Callable[[Nodes], S], push: Callable[[S, int], S], min_states: int = MIN_STATES_TO_FORGET
    ) -> None:
        self._start = start
        self._push = push
        self._states: dict[int, S] = {}
        self._min_states = self._max_states = min_states

    def at(self, tree: Tree, node: int) -> S:
        """The state of the sequence down to a live node. Calls must be about one tree."""
        states, unread = self._states, []
        while node not in states and node >= tree.prompt_length:
            unread.append(node)
            node = int(tree.parents(node))
        if node not in states:
            states[node] = self._start(tree.tokens(tree.prefix[: node + 1]))
        state = states[node]
        for node in reversed(unread):
            state = states[node] = self._push(state, int(tree.tokens(node)))
        if len(states) > self._max_states:
            self._forget(tree)
        return state

    def _forget(self, tree: Tree) -> None:
        """Keep only the states that further ones are made of, or that may be asked for again."""
        needed = {}
        for node in tree.kept.tolist():
            while node not in self._states and node >= tree.prompt_length:
                node = int(tree.parents(node))
            if node in self._states:
                needed[node] = self._states[node]
        self._states = needed
        self._max_states = max(self._min_states, 2 * len(needed))
