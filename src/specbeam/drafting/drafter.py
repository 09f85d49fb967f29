"""The interface between a speculative strategy and its drafter. ``specbeam.drafting`` has the drafters."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specbeam.core.strategy import Evaluate
from specbeam.core.tree import NO_NODES, Nodes, Tree
from specbeam.drafting.policy import DraftTokens as DraftTokens
from specbeam.drafting.policy.controller import Controller
from specbeam.logits.processors import Processors
from specbeam.logits.stopping import Stopping

Proposal = Generator[Evaluate, Any, DraftTokens]


class Drafter(Protocol):
    """Proposes draft tokens for one request."""

    @property
    def tree(self) -> Tree:
        """The tree whose nodes its model evaluates: the request's tree, unless it keeps another."""

    @property
    def controller(self) -> Controller:
        """Decides how far it drafts. The strategy reports the outcome of each round here."""

    def propose(self, tips: Nodes, scores: NDArray[np.float64]) -> Proposal:
        """Draft below the tips, int64 [b], whose sequences have these scores, float64 [b] (sums of log-probabilities).

        The tips are all beams, or the best one alone while lazy beam search defers the others.

        May yield ``Evaluate(nodes, drafting=True)``. Adds draft tokens with ``tree.draft`` to the request's tree. None
        of them ends its sequence, because the target's logits there are not needed.
        """


class Chains:
    """Puts chains of tokens below tips.

    A chain ends before a forbidden token, an end token, and the maximum length.

    Args:
        max_draft_tokens: per forward pass.
    """

    def __init__(self, tree: Tree, process: Processors, stop: Stopping, max_draft_tokens: int) -> None:
        self.tree = tree
        self.process = process
        self.stop = stop
        self.max_draft_tokens = max_draft_tokens

    def draft(self, tips: Nodes, chains: list[list[list[int]]], width: int) -> DraftTokens:
        """Draft chains below each tip, the likeliest first. Chains with the same beginning share its nodes.

        Args:
            width: the maximum of chains below each tip.
        """
        tree = self.tree
        parents = np.repeat(tips, [len(below) for below in chains])
        below = [chain for of_tip in chains for chain in of_tip]
        nodes, column = NO_NODES, 0
        while len(parents):
            continues = np.array([len(chain) > column for chain in below], dtype=bool)
            tokens = np.array([chain[column] if len(chain) > column else 0 for chain in below], dtype=np.int64)
            continues &= self._allowed(parents, tokens)
            below = [chain for chain, on in zip(below, continues, strict=True) if on]
            parents = tree.draft(parents[continues], tokens[continues])
            nodes = np.concatenate([nodes, parents])
            column += 1
        _, first = np.unique(nodes, return_index=True)
        first = np.sort(first)[: self.max_draft_tokens]
        return DraftTokens(nodes[first], width=width)

    def _allowed(self, parents: Nodes, tokens: Nodes) -> np.ndarray:
        allowed = (tokens < self.process.vocab_size) & ~np.isin(tokens, sorted(self.stop.eos_token_ids))
        allowed &= self.tree.depths(parents) + 2 < self.stop.max_length
        if self.process.forbids and allowed.any():
            at = np.flatnonzero(allowed)
            allowed[at] = ~self.process.forbidden(self.tree, parents[at], tokens[at])
        return allowed
