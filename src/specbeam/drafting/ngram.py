"""Prompt lookup decoding: guess what followed the last tokens where they stood before in the text (Saxena 2023)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specbeam.drafting import Proposal
from specbeam.drafting.chains import Chains
from specbeam.drafting.controller import Controller
from specbeam.tree import Nodes, Tree

MAX_MATCH_TOKENS = 8
"""Compare at most this many of the last tokens: a longer match hardly makes the guess better."""
MAX_MATCHES = 100
"""Look at this many matches at most, the latest first."""


class NgramDrafter:
    """For each tip, guesses the tokens after earlier occurrences of its last n tokens, for the greatest n with any."""

    def __init__(self, tree: Tree, chains: Chains, controller: Controller) -> None:
        self.tree = tree
        self.chains = chains
        self.controller = controller

    def propose(self, tips: Nodes, scores: NDArray[np.float64]) -> Proposal:
        best = self._text(tips[0])
        places, matched = occurrences(best)
        width, depth = self.controller.shape(len(tips), matched=matched)
        if not depth:
            return self.controller.no_draft()
        found = [continuations(best, places, width, depth)]
        tips = np.array([tips[0], *np.setdiff1d(tips, tips[:1])])
        for text in map(self._text, tips[1:].tolist()):
            found.append(continuations(text, occurrences(text)[0], width, depth))
        return self.chains.draft(tips, found, width, self.controller.chances)
        yield  # never reached: it makes this a generator, as every drafter's propose is

    def _text(self, tip: int) -> NDArray[np.int64]:
        return self.tree.tokens(self.tree.path(tip))


def occurrences(tokens: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Where the longest end of a text that stood before stood: the places after it, ascending, and its length."""
    places, matched = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1, 0
    found = places
    while len(found) and matched < MAX_MATCH_TOKENS:
        places, matched = found, matched + 1
        found = places[places > matched]
        found = found[tokens[found - matched - 1] == tokens[-matched - 1]]
    return places, matched


def continuations(tokens: NDArray[np.int64], places: NDArray[np.int64], width: int, depth: int) -> list[list[int]]:
    """Up to ``width`` different continuations of a text, each of up to ``depth`` tokens: the tokens at the places.

    Those at the latest places come first.
    """
    latest = places[: -MAX_MATCHES - 1 : -1].tolist()
    if width == 1:
        latest = latest[:1]
    found = (tuple(tokens[place : place + depth].tolist()) for place in latest)
    return [list(chain) for chain in list(dict.fromkeys(found))[:width]]
