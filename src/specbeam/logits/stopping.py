"""When a sequence ends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from specbeam.core.tree import Nodes, NodeStates, Tree
from specbeam.text.detokenizer import NewText, Progress, shared_length


class Stopping:
    """Ends a sequence at an end-of-sequence token, after a stop string, or at the maximum length.

    How far one tree's texts have come is kept, so that a stop string costs the same after any text.

    Args:
        eos_token_ids: tokens that end the sequence.
        max_length: the largest number of tokens, prompt and generated tokens together.
        stop_strings: strings that end the sequence when its new text, special tokens written out, contains one.
        decode: makes text of token ids. It writes special tokens out with ``skip_special_tokens=False``. None without a
            tokenizer. Then there are no stop strings, and texts are empty.
        min_new_tokens: stop strings that end within this many new tokens do not end the sequence. (The processors
            forbid end tokens there.)
        left_out: end tokens that are text, and that the text is without.

    Attributes:
        new_text: makes the texts of sequences.
    """

    def __init__(
        self,
        eos_token_ids: frozenset[int],
        max_length: int,
        stop_strings: tuple[str, ...],
        decode: Callable[..., str] | None,
        min_new_tokens: int = 0,
        left_out: frozenset[int] = frozenset(),
    ) -> None:
        self.eos_token_ids = eos_token_ids
        self.max_length = max_length
        self.stop_strings = stop_strings
        self._decode = decode
        self.new_text = NewText(decode or (lambda *_, **__: ""), stop_strings, min_new_tokens, left_out)
        self._progress = NodeStates(lambda prompt: self.new_text.after(prompt.tolist()), self.new_text.push)

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
        if self.stop_strings and self._progress.at(tree, node).stopped is not None:
            return "stop"
        return "length" if tree.depths(node) + 1 >= self.max_length else None

    def begin(self, tree: Tree) -> Progress:
        """The beginning of all texts of the tree: they go on from its prompt."""
        return self._progress.at(tree, tree.prompt_length - 1)

    def unchanged(self, tree: Tree, node: int) -> int:
        """After how many further tokens below this node, at most, only an end token can have ended the sequence."""
        return 0 if self.stop_strings else self.max_length - int(tree.depths(node)) - 2

    def text(self, tree: Tree, node: int) -> str | tuple[int, ...]:
        """The generated text down to a node, up to the first stop string, or without the end token.

        Special tokens are written out, because identifiers may be made of them. Without a tokenizer it is the tokens.
        Two sequences are the same text if it is equal for both.
        """
        tokens = tree.new_tokens(node)
        stopped = self._progress.at(tree, node).stopped if self.stop_strings else None
        if stopped is None and tokens[-1] in self.eos_token_ids:
            tokens = tokens[:-1]
        if self._decode is None:
            return tuple(tokens)
        begin = self.begin(tree).end
        prompt = begin.ids if begin.text else ()  # after a prompt without text it is a text of its own
        before, text = (self._decode([*ids], skip_special_tokens=False) for ids in (prompt, (*prompt, *tokens)))
        return text[shared_length((before, text)) :].removesuffix(stopped or "")
