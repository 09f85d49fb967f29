"""Draft tokens that come as lists, from a lookup or from another vocabulary, become nodes of the tree."""

from __future__ import annotations

import numpy as np

from specbeam.core.tree import NO_NODES, Nodes, Tree
from specbeam.drafting.policy import DraftTokens
from specbeam.logits.processors import Processors
from specbeam.logits.stopping import Stopping


class Chains:
    """Puts chains of tokens below tips.

    A chain ends before a forbidden token, an end token, and the maximum length.

    Args:
        most: the largest number of draft tokens per forward pass.
    """

    def __init__(self, tree: Tree, process: Processors, stop: Stopping, most: int) -> None:
        self.tree = tree
        self.process = process
        self.stop = stop
        self.most = most

    def draft(self, tips: Nodes, chains: list[list[list[int]]], width: int) -> DraftTokens:
        """Draft chains below each tip, the likeliest first. Chains with the same beginning share its nodes.

        Args:
            width: the most chains below each tip.
        """
        tree = self.tree
        parents = np.repeat(tips, [len(below) for below in chains])
        below = [chain for of_tip in chains for chain in of_tip]
        nodes, column = NO_NODES, 0
        while len(parents):
            goes_on = np.array([len(chain) > column for chain in below], dtype=bool)
            tokens = np.array([chain[column] if len(chain) > column else 0 for chain in below], dtype=np.int64)
            goes_on &= self._allowed(parents, tokens)
            below = [chain for chain, on in zip(below, goes_on, strict=True) if on]
            parents = tree.draft(parents[goes_on], tokens[goes_on])
            nodes = np.concatenate([nodes, parents])
            column += 1
        _, first = np.unique(nodes, return_index=True)
        first = np.sort(first)[: self.most]
        return DraftTokens(nodes[first], width=width)

    def _allowed(self, parents: Nodes, tokens: Nodes) -> np.ndarray:
        allowed = (tokens < self.process.vocab_size) & ~np.isin(tokens, sorted(self.stop.eos_token_ids))
        allowed &= self.tree.depths(parents) + 2 < self.stop.max_length
        if self.process.forbids and allowed.any():
            at = np.flatnonzero(allowed)
            allowed[at] = ~self.process.forbidden(self.tree, parents[at], tokens[at])
        return allowed
