"""When a sequence ends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from specbeam.tree import Nodes, Tree


class Stopping:
    """Ends a sequence at an end-of-sequence token, after a stop string, or at the maximum length.

    Args:
        eos_token_ids: tokens that end the sequence.
        max_length: the largest number of tokens, prompt and generated text together.
        stop_strings: strings that end the sequence when its text contains one.
        decode: makes text of token ids.
    """

    def __init__(
        self,
        eos_token_ids: frozenset[int],
        max_length: int,
        stop_strings: tuple[str, ...],
        decode: Callable[[list[int]], str],
    ) -> None:
        self.eos_token_ids = eos_token_ids
        self._eos = np.array(sorted(eos_token_ids), dtype=np.int64)
        self.max_length = max_length
        self.stop_strings = stop_strings
        self.decode = decode

    def ended(self, tree: Tree, nodes: Nodes) -> NDArray[np.bool_]:
        """Which of the sequences that end at these nodes are finished, bool [n]."""
        ended = np.isin(tree.tokens(nodes), self._eos) | (tree.depths(nodes) + 1 >= self.max_length)
        if self.stop_strings:
            ended |= np.array([self(tree, node) is not None for node in nodes.tolist()], dtype=bool)
        return ended

    def __call__(self, tree: Tree, node: int) -> str | None:
        """Why the sequence that ends at this node is finished: "stop" or "length". None if it is not finished."""
        if int(tree.tokens(node)) in self.eos_token_ids:
            return "stop"
        if self.stop_strings:
            text = self.decode(tree.new_tokens(node))  # all of it: a token's text can depend on any token before it
            if any(s in text for s in self.stop_strings):
                return "stop"
        return "length" if tree.depths(node) + 1 >= self.max_length else None
