"""How a constraint applies to the token tree of one request."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from specbeam.constraints import DEAD_STATE, Constraint, States
from specbeam.tree import Nodes, Tree

UNKNOWN_STATE = -2


class ConstraintMask:
    """The tokens that a constraint allows. Remembers the state at each node of one request's tree."""

    def __init__(self, constraint: Constraint, eos_token_ids: Iterable[int]) -> None:
        self.constraint = constraint
        self._eos = sorted(eos_token_ids)
        self._states = np.empty(0, dtype=np.int64)  # by node

    def __call__(self, tree: Tree, nodes: Nodes, vocab_size: int) -> NDArray[np.bool_]:
        """Which tokens may follow nodes, int64 [n]: bool [n, vocab_size]."""
        states = self.states(tree, nodes)
        allowed = np.zeros((len(nodes), vocab_size), dtype=bool)
        alive = np.flatnonzero(states != DEAD_STATE)
        rows, tokens = self.constraint.allowed(states[alive])
        inside = tokens < vocab_size
        allowed[alive[rows[inside]], tokens[inside]] = True
        complete = alive[self.constraint.complete(states[alive])]
        allowed[complete[:, None], self._eos] = True
        return allowed

    def allows(self, tree: Tree, node: int, tokens: Iterable[int]) -> dict[int, bool]:
        """Whether each of some tokens may follow a node, by token id."""
        given = np.fromiter(tokens, dtype=np.int64)
        state = self.states(tree, np.array([node]))
        if state[0] == DEAD_STATE:
            return dict.fromkeys(given.tolist(), False)
        may_end = bool(self.constraint.complete(state)[0])
        follows = self.constraint.advance(state.repeat(len(given)), given) != DEAD_STATE
        allowed = follows | (np.isin(given, self._eos) & may_end)
        return dict(zip(given.tolist(), allowed.tolist(), strict=True))

    def states(self, tree: Tree, nodes: Nodes) -> States:
        """The states at nodes, int64 [n]. Unknown states of their ancestors are computed on the way."""
        if len(self._states) < len(tree):
            self._states = np.concatenate([self._states, np.full(2 * len(tree) - len(self._states), UNKNOWN_STATE)])
        self._states[tree.prompt_length - 1] = self.constraint.start
        levels = []
        climbing = np.unique(nodes)
        while len(climbing := climbing[self._states[climbing] == UNKNOWN_STATE]):
            levels.append(climbing)
            climbing = np.unique(tree.parents(climbing))
        for level in reversed(levels):
            above = self._states[tree.parents(level)]
            alive = above != DEAD_STATE
            self._states[level] = DEAD_STATE
            self._states[level[alive]] = self.constraint.advance(above[alive], tree.tokens(level[alive]))
        return self._states[nodes]
