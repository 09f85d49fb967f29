"""What a text may be at all: automata over tokens, such as a trie of the allowed outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from numbers import Integral
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbeam.errors import SpecbeamError
from specbeam.tree import Nodes, Tree

DEAD = -1
"""The state of a text that may not be."""
UNKNOWN = -2

States = NDArray[np.int64]


@runtime_checkable
class Constraint(Protocol):
    """An automaton over tokens. States are whole numbers from 0 on; what they stand for (a node of a trie, a stack of a
    grammar) is its own affair. The same constraint may serve many requests at once.

    Attributes:
        start: the state after the prompt.
    """

    start: int

    def advance(self, states: States, tokens: NDArray[np.int64]) -> States:
        """The states, int64 [n], after one more token each; -1 where the token may not follow."""

    def allowed(self, states: States) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The tokens that may follow, as pairs: indices into the states, and tokens, int64 [m] each."""

    def complete(self, states: States) -> NDArray[np.bool_]:
        """Where the text may end, bool [n]: the end-of-sequence tokens are allowed there too."""


class TokenTrie:
    """The allowed outputs written out, such as the identifiers of a catalogue for generative retrieval.

    Built once, in compact arrays: a node is a state; the tokens below it are a sorted run, found by bisection. A text
    is cut where max_new_tokens ends, and where an entry has an end-of-sequence token inside.

    Args:
        outputs: token ids of each allowed output, without an end-of-sequence token; or an int array [n, length], in
            which negative numbers fill up shorter outputs.

    Raises:
        SpecbeamError: no outputs, or an empty one, or something that is not token ids.
    """

    start = 0

    def __init__(self, outputs: Iterable[Sequence[int]] | NDArray[np.integer]) -> None:
        table = outputs if isinstance(outputs, np.ndarray) and outputs.ndim == 2 else _padded(outputs)
        if isinstance(outputs, bytes | str):
            raise SpecbeamError("a TokenTrie is made of lists of token ids, not of text")
        if not table.size:
            raise SpecbeamError("a TokenTrie needs at least one output")
        if not np.issubdtype(table.dtype, np.integer) or (table[:, 0] < 0).any() or table.max() >= 2**31:
            raise SpecbeamError("a TokenTrie is made of token ids, at least one an output")
        table = table.astype(np.int32, copy=False)
        table = table[np.lexsort(table.T[::-1])]  # so that what shares a beginning lies together
        rows = len(table)
        node = np.zeros(rows, dtype=np.int32)  # that the row has reached
        tokens, parents = [np.array([-1], dtype=np.int32)], [np.array([-1], dtype=np.int32)]
        lengths = (table >= 0).cumprod(axis=1).sum(axis=1)
        size = 1
        ends = []
        differs = np.zeros(rows, dtype=bool)  # from the row before it, somewhere up to this column
        differs[0] = True
        for column in range(table.shape[1]):
            here = lengths > column
            differs[1:] |= table[1:, column] != table[:-1, column]
            new = differs & here
            tokens.append(table[new, column])
            parents.append(node[new])
            number = size - 1 + np.cumsum(new)
            node = np.where(here, number, node).astype(np.int32)
            size += int(new.sum())
            ends.append(np.unique(node[lengths == column + 1]))
        # Level by level and in rows' order, so the children of a node follow each other, ascending by token.
        self._tokens = np.concatenate(tokens)
        children = np.bincount(np.concatenate(parents)[1:], minlength=size)
        self._first = np.concatenate([[1], 1 + np.cumsum(children)]).astype(np.int32)
        self._complete = np.zeros(size, dtype=bool)
        self._complete[np.concatenate(ends)] = True

    def __len__(self) -> int:
        """How many nodes there are."""
        return len(self._tokens)

    def __repr__(self) -> str:
        return f"TokenTrie({int(self._complete.sum())} outputs, {len(self)} nodes)"

    def advance(self, states: States, tokens: NDArray[np.int64]) -> States:
        low, end = self._first[states].astype(np.int64), self._first[states + 1].astype(np.int64)
        high = end.copy()
        while (searching := low < high).any():
            middle = (low + high) // 2
            below = searching & (self._tokens[np.minimum(middle, len(self) - 1)] < tokens)
            low = np.where(below, middle + 1, low)
            high = np.where(searching & ~below, middle, high)
        found = (low < end) & (self._tokens[np.minimum(low, len(self) - 1)] == tokens)
        return np.where(found, low, DEAD)

    def allowed(self, states: States) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        first, counts = self._first[states].astype(np.int64), self._first[states + 1] - self._first[states]
        rows = np.repeat(np.arange(len(states)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        return rows, self._tokens[first[rows] + within].astype(np.int64)

    def complete(self, states: States) -> NDArray[np.bool_]:
        return self._complete[states]


def _padded(outputs: Iterable[Sequence[int]]) -> NDArray[np.int32]:
    try:
        outputs = [*outputs]
        lengths = np.array([len(output) for output in outputs], dtype=np.int64)
        tokens = list(chain.from_iterable(outputs))
        if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in tokens):
            raise ValueError("something else is among them")
        flat = np.array(tokens, dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise SpecbeamError(f"a TokenTrie is made of lists of token ids: {error}") from error
    if not len(lengths) or not lengths.all() or (flat < 0).any() or (flat >= 2**31).any():
        raise SpecbeamError("a TokenTrie needs at least one output, and at least one token id in each, 0 or more")
    table = np.full((len(lengths), int(lengths.max())), -1, dtype=np.int32)
    table[np.arange(table.shape[1]) < lengths[:, None]] = flat
    return table


class Constrained:
    """A constraint on one request: the state at each node of its tree, and a mask of what may follow."""

    def __init__(self, constraint: Constraint, eos_token_ids: Iterable[int]) -> None:
        self.constraint = constraint
        self._eos = sorted(eos_token_ids)
        self._states = np.empty(0, dtype=np.int64)  # by node

    def mask(self, tree: Tree, nodes: Nodes, scores: Tensor) -> Tensor:
        """Scores [n, vocab] with -inf where a token may not follow."""
        states = self.states(tree, nodes)
        masked = torch.full_like(scores, float("-inf"))
        alive = np.flatnonzero(states != DEAD)
        rows, tokens = self.constraint.allowed(states[alive])
        inside = tokens < scores.shape[-1]
        index = (torch.from_numpy(a).to(scores.device) for a in (alive[rows[inside]], tokens[inside]))
        row, token = index
        masked[row, token] = scores[row, token]
        complete = torch.from_numpy(alive[self.constraint.complete(states[alive])]).to(scores.device)
        for eos in self._eos:
            masked[complete, eos] = scores[complete, eos]
        return masked

    def states(self, tree: Tree, nodes: Nodes) -> States:
        """The states at nodes, those of their ancestors worked out where they are not known."""
        if len(self._states) < len(tree):
            self._states = np.concatenate([self._states, np.full(2 * len(tree) - len(self._states), UNKNOWN)])
        self._states[tree.prompt_length - 1] = self.constraint.start
        levels = []
        climbing = np.unique(nodes)
        while len(climbing := climbing[self._states[climbing] == UNKNOWN]):
            levels.append(climbing)
            climbing = np.unique(tree.parents(climbing))
        for level in reversed(levels):
            above = self._states[tree.parents(level)]
            alive = above != DEAD
            self._states[level] = DEAD
            self._states[level[alive]] = self.constraint.advance(above[alive], tree.tokens(level[alive]))
        return self._states[nodes]
