"""Draft tokens below beams that come back after they were deferred: what the best hypothesis says in their place.

Beams of one search mostly differ in a few tokens and agree again after them. By the time that a deferred beam turns out
to be needed, the best hypothesis is ahead of it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specbeam.decoding.deferring import Cost
from specbeam.decoding.drafter import DraftTokens
from specbeam.drafting.chains import Chains
from specbeam.drafting.controller import DECAY, MATCH_LENGTHS, MIN_GAIN, PRIOR_WEIGHT, Acceptance
from specbeam.drafting.lookup import MAX_MATCH_TOKENS, occurrences
from specbeam.drafting.sizes import MAX_ADAPTIVE_DEPTH
from specbeam.tree import Nodes, Tree

MATCH_PRIOR = (0.3, 0.5, 0.8, 0.9, 0.95)
"""By the lengths of a match (``MATCH_LENGTHS``), the chance to assume that the next token is the same."""


class Copies:
    """Copies the tokens of the best hypothesis after the place where it has a beam's last tokens.

    Args:
        tree: of the request.
        cost: of the target's passes.
    """

    def __init__(self, tree: Tree, chains: Chains, cost: Cost) -> None:
        self._tree = tree
        self._chains = chains
        self._cost = cost
        self._acceptance = Acceptance(MATCH_PRIOR)
        self._matched: dict[int, int] = {}  # by tip and draft token, the length of the match down to it
        self._parents: dict[int, int] = {}  # of the latest draft tokens
        self._evaluated = 0
        self._seconds, self._steps = 0.0, 0.0  # of the latest passes over beams that come back
        lengths = np.arange(MAX_MATCH_TOKENS + MAX_ADAPTIVE_DEPTH)
        self._buckets = np.searchsorted(MATCH_LENGTHS, np.maximum(lengths, 1), side="right") - 1

    def seconds_per_step(self, otherwise: float) -> float:
        return (self._seconds + PRIOR_WEIGHT * otherwise) / (self._steps + PRIOR_WEIGHT)

    def propose(self, tips: Nodes, best: int) -> DraftTokens:
        tree, text = self._tree, self._tree.tokens(self._tree.path(best))
        self._matched, self._parents, self._evaluated, chains = {}, {}, len(tips), []
        for tip in tips[tree.depths(tips) < tree.depths(best)].tolist():
            own = tree.tokens(tree.path(tip))
            places, matched = occurrences(text[:-1], own)
            self._matched[tip] = matched
            chains.append(text[places[np.abs(places - len(own)).argmin()] :] if matched else text[:0])
        if not chains:
            return DraftTokens()
        depth = self._depth(np.array([*self._matched.values()]), len(tips))
        if not depth:
            self._acceptance.skip()
            return DraftTokens()
        below = [[chain[:depth].tolist()] for chain in chains]
        draft_tokens = self._chains.draft(np.array([*self._matched]), below, 1, lambda levels: np.ones(levels))
        self._parents = dict(zip(draft_tokens.nodes.tolist(), tree.parents(draft_tokens.nodes).tolist(), strict=True))
        for node, parent in self._parents.items():
            self._matched[node] = self._matched[parent] + 1
        return draft_tokens

    def learn(self, beams: Nodes, steps: int) -> None:
        if not self._matched:
            return
        self._seconds = DECAY * self._seconds + self._cost(self._evaluated + len(self._parents))
        self._steps = DECAY * self._steps + steps
        accepted = {*beams.tolist()}
        for node, parent in self._parents.items():
            if parent in accepted or parent not in self._parents:
                self._acceptance.learn(self._buckets[self._matched[parent]], node in accepted, 1)

    def _depth(self, matched: NDArray[np.int64], evaluated: int) -> int:
        """The number of draft tokens below each tip that promises the most steps per second."""
        chances = self._acceptance.chances[self._buckets[matched[:, None] + np.arange(MAX_ADAPTIVE_DEPTH)]]
        chances[matched == 0] = 0.0
        steps = 1 + np.cumprod(chances, axis=1).mean(0).cumsum()
        copied = np.count_nonzero(matched) * np.arange(1, 1 + MAX_ADAPTIVE_DEPTH)
        rates = steps / [self._cost(evaluated + count) for count in copied.tolist()]
        return int(np.argmax([MIN_GAIN / self._cost(evaluated), *rates]))
