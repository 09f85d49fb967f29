"""Draft tokens below beams that come back after they were deferred, copied from the best hypothesis.

Beams of one search mostly differ in a few tokens and agree again after them. When a deferred beam turns out to be
needed, the best hypothesis is already longer than it is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specbeam.core.tree import Nodes, Tree
from specbeam.drafting.drafter import Chains
from specbeam.drafting.lookup import occurrences
from specbeam.drafting.policy import Cost, DraftTokens
from specbeam.drafting.policy.acceptance import Acceptance, Rounds, match_bucket
from specbeam.drafting.policy.controller import MAX_ADAPTIVE_DEPTH, MIN_GAIN, fewest_seconds

MATCH_PRIOR = (0.3, 0.5, 0.8, 0.9, 0.95)
"""By the length of a match, the probability to assume that the next token is the same."""


class Copies:
    """Copies the tokens of the best hypothesis after the position where it has a beam's last tokens.

    Args:
        tree: of the request.
        cost: of the target's passes.

    Attributes:
        rounds: the latest passes over beams that come back.
    """

    def __init__(self, tree: Tree, chains: Chains, cost: Cost) -> None:
        self._tree = tree
        self._chains = chains
        self._cost = cost
        self._acceptance = Acceptance(MATCH_PRIOR)
        self._matched: dict[int, int] = {}  # by tip and draft token, the length of the match down to it
        self._parents: dict[int, int] = {}  # of the latest draft tokens
        self._evaluated = 0
        self.rounds = Rounds()

    def propose(self, tips: Nodes, best: int) -> DraftTokens:
        """Draft below those tips, int64 [n], that are shorter than the best hypothesis.

        Args:
            best: its end.
        """
        tree, best_tokens = self._tree, self._tree.tokens(self._tree.path(best))
        self._matched, self._parents, self._evaluated, chains = {}, {}, len(tips), []
        for tip in tips[tree.depths(tips) < tree.depths(best)].tolist():
            tokens = tree.tokens(tree.path(tip))
            positions, matched = occurrences(best_tokens[:-1], tokens)
            self._matched[tip] = matched
            nearest = positions[np.abs(positions - len(tokens)).argmin()] if matched else len(best_tokens)
            chains.append(best_tokens[nearest:])
        if not chains:
            return DraftTokens()
        depth = self._depth(np.array([*self._matched.values()]), len(tips))
        if not depth:
            self._acceptance.skip()
            return DraftTokens()
        below = [[chain[:depth].tolist()] for chain in chains]
        draft_tokens = self._chains.draft(np.array([*self._matched]), below, 1)
        self._parents = dict(zip(draft_tokens.nodes.tolist(), tree.parents(draft_tokens.nodes).tolist(), strict=True))
        for node, parent in self._parents.items():
            self._matched[node] = self._matched[parent] + 1
        return draft_tokens

    def learn(self, beams: Nodes, steps: int) -> None:
        """Take in the round.

        Args:
            beams: of the steps that are known now, int64 [n]: draft tokens among them are accepted.
            steps: how many steps became final.
        """
        if not self._matched:
            return
        self.rounds.add(self._cost(self._evaluated + len(self._parents)), steps)
        accepted = {*beams.tolist()}
        for node, parent in self._parents.items():
            if parent in accepted or parent not in self._parents:
                self._acceptance.learn(match_bucket(self._matched[parent]), node in accepted, 1)

    def _depth(self, matched: NDArray[np.int64], evaluated: int) -> int:
        """The number of draft tokens below each tip that promises the most steps per second."""
        surviving = self._acceptance.surviving(matched, MAX_ADAPTIVE_DEPTH) * (matched > 0)[:, None]
        steps = (1 + surviving.mean(0).cumsum()).tolist()
        tips, depths = int(np.count_nonzero(matched)), range(1, 1 + MAX_ADAPTIVE_DEPTH)
        plain = self._cost(evaluated)
        return fewest_seconds(depths, steps, lambda depth: self._cost(evaluated + tips * depth), plain / MIN_GAIN)[1]
