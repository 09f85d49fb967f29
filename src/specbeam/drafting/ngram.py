"""Prompt lookup decoding: guess what followed the last tokens where they stood before in the text (Saxena 2023)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam.drafting import DECLINED, Drafter, Proposal
from specbeam.drafting.chains import Chains
from specbeam.tree import Tree

MAX_MATCH_TOKENS = 4
"""Compare at most this many of the last tokens: a longer match hardly makes the guess better."""
MAX_MATCHES = 100
"""Look at this many matches at most, the latest first."""


class NgramDrafter:
    """For each tip, guesses the tokens after earlier occurrences of its last n tokens, for the greatest n with any."""

    def __init__(self, tree: Tree, chains: Chains) -> None:
        self.tree = tree
        self.chains = chains
        self.pace = chains.pace
        self.of_best: Drafter | None = None

    def propose(self, tips: Any, scores: NDArray[np.float64]) -> Proposal:
        self.pace.begin_round()
        width, depth = self.pace.shape()
        if not depth:
            return DECLINED
        tips = np.unique(tips)
        paths = self.tree.tokens(self.tree.paths(tips))
        lengths = self.tree.depths(tips) + 1
        found = [continuations(path[:n], width, depth) for path, n in zip(paths, lengths.tolist(), strict=True)]
        return self.chains.guess(tips, found, width)
        yield  # never reached: it makes this a generator, as every drafter's propose is


def continuations(tokens: NDArray[np.int64], width: int, depth: int) -> list[list[int]]:
    """Up to ``width`` different continuations of a text, each of up to ``depth`` tokens, the latest match first."""
    for n in range(min(MAX_MATCH_TOKENS, len(tokens) - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], n)
        ends = np.flatnonzero((windows == tokens[-n:]).all(axis=1)) + n
        if len(ends):
            latest = ends[: -MAX_MATCHES - 1 : -1]
            found = (tuple(tokens[end : end + depth].tolist()) for end in latest)
            return [list(chain) for chain in list(dict.fromkeys(found))[:width]]
    return []
