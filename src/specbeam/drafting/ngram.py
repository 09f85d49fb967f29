"""Prompt lookup decoding: propose the tokens after earlier occurrences of the last tokens (Saxena 2023)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specbeam.decoding.drafter import Proposal
from specbeam.drafting.chains import Chains
from specbeam.drafting.controller import Controller
from specbeam.tree import Nodes, Tree

MAX_MATCH_TOKENS = 8
"""Compare at most this many of the last tokens: a longer match hardly makes the draft better."""
MAX_MATCHES = 100
"""Look at this many matches at most, the latest first."""


class NgramDrafter:
    """For each tip, proposes the tokens after earlier occurrences of its last n tokens, for the greatest n with any."""

    def __init__(self, tree: Tree, chains: Chains, controller: Controller) -> None:
        self.tree = tree
        self.chains = chains
        self.controller = controller

    def propose(self, tips: Nodes, scores: NDArray[np.float64]) -> Proposal:
        best = self._tokens(tips[0])
        places, matched = occurrences(best[:-1], best)
        width, depth = self.controller.shape(len(tips), matched=matched)
        if not depth:
            return self.controller.no_draft()
        found = [continuations(best, places, width, depth)]
        tips = np.array([tips[0], *np.setdiff1d(tips, tips[:1])])
        for tokens in map(self._tokens, tips[1:].tolist()):
            found.append(continuations(tokens, occurrences(tokens[:-1], tokens)[0], width, depth))
        return self.chains.draft(tips, found, width, self.controller.chances)
        yield  # never reached: it makes this a generator, as every drafter's propose is

    def _tokens(self, tip: int) -> NDArray[np.int64]:
        return self.tree.tokens(self.tree.path(tip))


def occurrences(text: NDArray[np.int64], tokens: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """The places in a text after the longest suffix of a sequence that it has, ascending, and the suffix's length."""
    places, matched = np.flatnonzero(text == tokens[-1]) + 1, 0
    found = places
    while len(found) and matched < MAX_MATCH_TOKENS:
        places, matched = found, matched + 1
        if matched == len(tokens):
            break
        found = places[places > matched]
        found = found[text[found - matched - 1] == tokens[-matched - 1]]
    return places, matched


def continuations(tokens: NDArray[np.int64], places: NDArray[np.int64], width: int, depth: int) -> list[list[int]]:
    """Up to ``width`` different continuations of a sequence, each of up to ``depth`` tokens: the tokens at the places.

    The latest places come first.
    """
    latest = places[: -MAX_MATCHES - 1 : -1].tolist()
    if width == 1:
        latest = latest[:1]
    found = (tuple(tokens[place : place + depth].tolist()) for place in latest)
    return [list(chain) for chain in list(dict.fromkeys(found))[:width]]
