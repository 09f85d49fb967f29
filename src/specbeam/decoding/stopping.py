"""When a sequence ends."""

from __future__ import annotations

from collections.abc import Callable

from specbeam.tree import Tree


class Stopping:
    """Ends a sequence at an end-of-sequence token, after a stop string, or at its greatest length.

    Args:
        eos_token_ids: tokens that end the text.
        max_length: tokens of prompt and text together.
        stop_strings: texts that end the text.
        decode: token ids to text.
    """

    def __init__(
        self,
        eos_token_ids: frozenset[int],
        max_length: int,
        stop_strings: tuple[str, ...],
        decode: Callable[[list[int]], str],
    ) -> None:
        self.eos_token_ids = eos_token_ids
        self.max_length = max_length
        self.stop_strings = stop_strings
        self.decode = decode

    def __call__(self, tree: Tree, node: int) -> str | None:
        """Why the sequence that ends at this node is finished: "stop", "length", or None if it is not."""
        if int(tree.tokens(node)) in self.eos_token_ids:
            return "stop"
        if self.stop_strings:
            text = self.decode(tree.new_tokens(node))  # whole: what a token says can depend on any before it
            if any(s in text for s in self.stop_strings):
                return "stop"
        return "length" if tree.depths(node) + 1 >= self.max_length else None
