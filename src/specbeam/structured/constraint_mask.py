"""How a constraint applies to the token tree of one request."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from specbeam.core.tree import Nodes, NodeStates, Tree
from specbeam.errors import SpecbeamError
from specbeam.structured import Constraint, State

MIN_STATES_TO_FORGET = 8
"""A grammar's state takes 10 to 100 kB."""


class ConstraintMask:
    """The tokens that a constraint allows at the nodes of one request's tree.

    Args:
        written_ends: end tokens that are text. Within a text they would end it where it is not complete.

    Attributes:
        together, measures: of the constraint, or None and False.
    """

    def __init__(
        self,
        constraint: Constraint,
        eos_token_ids: Iterable[int],
        vocab_size: int,
        written_ends: Iterable[int] = (),
    ) -> None:
        self.constraint = constraint
        self.together: tuple[int, int] | None = getattr(constraint, "together", None)
        self.measures: bool = getattr(constraint, "measures", False)
        self.vocab_size = vocab_size
        self._ends = packed([*eos_token_ids], vocab_size)
        self._not_within = packed([*written_ends], vocab_size)
        start = constraint.start  # where the request is submitted: a grammar may be compiled for it
        self._states: NodeStates[State | None] = NodeStates(lambda _: start, self._advance, MIN_STATES_TO_FORGET)

    def __call__(self, tree: Tree, nodes: Nodes) -> NDArray[np.uint8]:
        """Which tokens may follow nodes, int64 [n], as packed bits, uint8 [n, ceil(vocab_size / 8)].

        Raises:
            SpecbeamError: the constraint gave a mask of another shape or type.
        """
        return np.stack([self._mask(self._states.at(tree, node)) for node in nodes.tolist()])

    def allows(self, tree: Tree, node: int, tokens: Iterable[int]) -> dict[int, bool]:
        """Whether each of some tokens may follow a node, by token id."""
        mask = self._mask(self._states.at(tree, node))
        return {token: bool(mask[token // 8] >> token % 8 & 1) for token in tokens}

    def forced(self, tree: Tree, node: int, max_tokens: int) -> list[int]:
        """The tokens that follow a node because no other is allowed, up to a choice or an end, at most this many."""
        state, tokens = self._states.at(tree, node), list[int]()
        while state is not None and len(tokens) < max_tokens:
            mask = self._mask(state)
            if np.count_nonzero(mask) != 1:
                break
            place = int(mask.argmax())
            bits = int(mask[place])
            if bits.bit_count() != 1 or bits & int(self._ends[place]):
                break
            tokens.append(8 * place + bits.bit_length() - 1)
            state = self.constraint.advance(state, tokens[-1])
        return tokens

    def complete(self, tree: Tree, node: int) -> bool:
        """Whether the sequence down to a node may end there. The node is no end token."""
        state = self._states.at(tree, node)
        return state is not None and self.constraint.complete(state)

    def _advance(self, state: State | None, token: int) -> State | None:
        return None if state is None else self.constraint.advance(state, token)

    def _mask(self, state: State | None) -> NDArray[np.uint8]:
        if state is None:
            return np.zeros_like(self._ends)
        mask = self.constraint.mask(state, self.vocab_size)
        if not isinstance(mask, np.ndarray) or mask.dtype != np.uint8 or mask.shape != self._ends.shape:
            got = f"{mask.dtype} {[*mask.shape]}" if isinstance(mask, np.ndarray) else type(mask).__name__
            raise SpecbeamError(
                f"the mask of {type(self.constraint).__name__} is {got}, and a vocabulary of {self.vocab_size} needs "
                f"uint8 {[*self._ends.shape]}: give packed bits, in little bit order"
            )
        return mask | self._ends if self.constraint.complete(state) else mask & ~self._not_within


def packed(tokens: NDArray[np.integer] | list[int], vocab_size: int) -> NDArray[np.uint8]:
    """Some tokens of a vocabulary as packed bits, uint8 [ceil(vocab_size / 8)]."""
    bits = np.zeros(vocab_size, dtype=bool)
    bits[tokens] = True
    return np.packbits(bits, bitorder="little")
