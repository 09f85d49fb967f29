"""Guesses from the text itself: what followed its last tokens when they came before (prompt lookup decoding)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam.drafting import Guesses, Proposal
from specbeam.drafting.chains import Chains
from specbeam.tree import Tree

LONGEST = 4
"""Tokens compared at most: longer agreement hardly says more."""
RECENT = 100
"""Places looked at, the latest."""


class NgramDrafter:
    """For each tip, what followed where its last n tokens stood before, latest first, for the greatest n there is."""

    def __init__(self, tree: Tree, chains: Chains) -> None:
        self.tree = tree
        self.chains = chains
        self.pace = chains.pace

    def propose(self, tips: Any, scores: NDArray[np.float64]) -> Proposal:
        width, depth = self.pace.shape()
        if not depth:
            return Guesses()
        tips = np.unique(tips)
        paths = self.tree.tokens(self.tree.paths(tips))
        lengths = self.tree.depths(tips) + 1
        found = [continuations(path[:n], width, depth) for path, n in zip(paths, lengths.tolist(), strict=True)]
        return self.chains.guess(tips, found)
        yield  # never, but it makes this a generator like every drafter's


def continuations(tokens: NDArray[np.int64], width: int, depth: int) -> list[list[int]]:
    """Up to width different continuations of a text, up to depth tokens each, likeliest first."""
    for n in range(min(LONGEST, len(tokens) - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], n)
        ends = np.flatnonzero((windows == tokens[-n:]).all(axis=1)) + n
        if len(ends):
            latest = ends[: -RECENT - 1 : -1]
            found = (tuple(tokens[end : end + depth].tolist()) for end in latest)
            return [list(chain) for chain in list(dict.fromkeys(found))[:width]]
    return []
