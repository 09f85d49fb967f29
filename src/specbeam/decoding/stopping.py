"""When a sequence ends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from specbeam.decoding.node_states import NodeStates
from specbeam.detokenizing import Detokenizer, TextEnd
from specbeam.tree import Nodes, Tree


class Stopping:
    """Ends a sequence at an end-of-sequence token, after a stop string, or at the maximum length.

    The ends of one tree's texts are kept, so that a stop string costs the same after any text.

    Args:
        eos_token_ids: tokens that end the sequence.
        max_length: the largest number of tokens, prompt and generated tokens together.
        stop_strings: strings that end the sequence when its text contains one.
        decode: makes text of token ids. It writes special tokens out with ``skip_special_tokens=False``. None without a
            tokenizer. Then there are no stop strings.
    """

    def __init__(
        self,
        eos_token_ids: frozenset[int],
        max_length: int,
        stop_strings: tuple[str, ...],
        decode: Callable[..., str] | None,
    ) -> None:
        self.eos_token_ids = eos_token_ids
        self.max_length = max_length
        self.stop_strings = stop_strings
        self._decode = decode
        detokenizer = Detokenizer(decode or (lambda _: ""), reach=max(map(len, stop_strings), default=0))
        self._text_ends = NodeStates(lambda _: TextEnd(), detokenizer.push)  # of the generated text

    def ended(self, tree: Tree, nodes: Nodes) -> NDArray[np.bool_]:
        """Which of the sequences that end at these nodes are finished, bool [n]."""
        at_end = [token in self.eos_token_ids for token in tree.tokens(nodes).tolist()]
        ended = np.array(at_end, dtype=bool) | (tree.depths(nodes) + 1 >= self.max_length)
        if self.stop_strings:
            ended |= np.array([self(tree, node) is not None for node in nodes.tolist()], dtype=bool)
        return ended

    def __call__(self, tree: Tree, node: int) -> str | None:
        """Why the sequence that ends at this node is finished: "stop" or "length". None if it is not finished."""
        if int(tree.tokens(node)) in self.eos_token_ids:
            return "stop"
        if self.stop_strings:
            # A stop string that began before the window would have ended the sequence at an earlier node.
            text = self._text_ends.at(tree, node).text
            if any(s in text for s in self.stop_strings):
                return "stop"
        return "length" if tree.depths(node) + 1 >= self.max_length else None

    def unchanged(self, tree: Tree, node: int) -> int:
        """After how many further tokens below this node, at most, only an end token can have ended the sequence."""
        return 0 if self.stop_strings else self.max_length - int(tree.depths(node)) - 2

    def text(self, tree: Tree, node: int) -> str | tuple[int, ...]:
        """The generated text down to a node, up to the first stop string, or without the end token.

        Special tokens are written out, because identifiers may be made of them. Without a tokenizer it is the tokens.
        Two sequences are the same text if it is equal for both.
        """
        tokens = tree.new_tokens(node)
        if self._decode is not None and self.stop_strings:
            shown = self._decode(tokens)  # a stop string is one of the shown text
            if found := [at for s in self.stop_strings if (at := shown.find(s)) >= 0]:
                return self._decode(tokens, skip_special_tokens=False).removesuffix(shown[min(found) :])
        if tokens[-1] in self.eos_token_ids:
            tokens = tokens[:-1]
        return tuple(tokens) if self._decode is None else self._decode(tokens, skip_special_tokens=False)
