"""The protocol of constraints."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

DEAD_STATE = -1
"""The state of a text that the constraint does not allow."""

States = NDArray[np.int64]


@runtime_checkable
class Constraint(Protocol):
    """A deterministic automaton over tokens, which says which texts may be generated.

    States are integers from 0 on. The constraint decides what they stand for: a node of a trie, or a grammar's stack.
    One constraint may serve many requests at once, so its methods must not depend on earlier calls.

    Attributes:
        start: the state after the prompt.
    """

    start: int

    def advance(self, states: States, tokens: NDArray[np.int64]) -> States:
        """The next state for each state and token, int64 [n] all three; -1 where the token may not follow."""

    def allowed(self, states: States) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """All tokens that may follow the states, int64 [n], as pairs.

        Returns:
            Indices into the states and token ids, int64 [m] each.
        """

    def complete(self, states: States) -> NDArray[np.bool_]:
        """Whether the text may end in each state, bool [n]. The end-of-sequence tokens are allowed there too."""
