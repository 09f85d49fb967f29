"""Constraints: automata over tokens that say which sequences may be generated, and output specs that make them."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from specbeam.structured.grammar import Choice as Choice
from specbeam.structured.grammar import Grammar as Grammar
from specbeam.structured.grammar import JsonSchema as JsonSchema
from specbeam.structured.grammar import Regex as Regex
from specbeam.structured.trie import TokenTrie as TokenTrie

State = Any
"""Of a constraint: any object but None that never changes, such as a node of a trie or a grammar's stack."""


@runtime_checkable
class Constraint(Protocol):
    """A deterministic automaton over tokens, which says which sequences may be generated.

    The engine keeps a state for as long as the sequence may go on. One constraint may serve many requests at once, so
    its methods must not depend on earlier calls.

    A constraint may have two more attributes. ``together`` is the first of some adjacent tokens and the one after the
    last: where these together are likelier than each other allowed token, only they are allowed. ``measures``, if it is
    true, asks for the probability of all allowed tokens at each place (:attr:`specbeam.Sequence.allowed_log_probs`).

    Attributes:
        start: the state after the prompt.
    """

    start: State

    def advance(self, state: State, token: int) -> State | None:
        """The state after one more token; None if the token may not follow."""

    def mask(self, state: State, vocab_size: int) -> NDArray[np.uint8]:
        """All tokens that may follow, as packed bits, uint8 [ceil(vocab_size / 8)].

        The bit of token ``i`` is ``mask[i // 8] >> i % 8 & 1``, as ``numpy.packbits(..., bitorder="little")`` has it.
        """

    def complete(self, state: State) -> bool:
        """Whether the sequence may end here. The end-of-sequence tokens are then allowed, too."""
