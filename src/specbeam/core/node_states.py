"""States of sequences, made token by token, so that a state costs the same after any sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from specbeam.core.tree import Nodes, Tree

S = TypeVar("S")

MIN_STATES_TO_FORGET = 64
"""Small states are kept up to this number before the first is dropped."""


class NodeStates(Generic[S]):
    """A state of the sequence down to each node, made of the parent's state and the node's token.

    Args:
        start: makes the state of the prompt of its token ids, int64 [n].
        push: makes the state after one more token. It changes no state, since sequences may branch.
        least: keep at least this many states before the first is dropped.
    """

    def __init__(
        self, start: Callable[[Nodes], S], push: Callable[[S, int], S], least: int = MIN_STATES_TO_FORGET
    ) -> None:
        self._start = start
        self._push = push
        self._states: dict[int, S] = {}
        self._least = self._max_states = least

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
        self._max_states = max(self._least, 2 * len(needed))
