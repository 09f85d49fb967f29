"""Draft tokens from a suffix automaton over the sequence so far, and over earlier texts if given.

The automaton always knows the longest suffix of the sequence that occurred before. It also counts the tokens that
followed (SAM decoding, Hu et al. 2024).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from specbeam.decoding.drafter import Proposal
from specbeam.drafting.chains import Chains
from specbeam.drafting.controller import Controller
from specbeam.errors import SpecbeamError
from specbeam.model import LanguageModel
from specbeam.prompts import encode
from specbeam.tree import Nodes, Tree

SEPARATOR = -1
"""Stands between texts. It is no token, so nothing is drafted across it."""
MAX_COUNTED_SUFFIXES = 64
"""Count a new token for this many of the suffixes before it, the longest first: repetitive sequences have very many."""
MIN_CHANCE = 0.01
"""Draft nothing less likely than this."""

Match = tuple[int, int]
"""A state, and the length of the sequence's suffix that it matches, in tokens."""


class SuffixAutomaton:
    """The smallest automaton of all substrings of a sequence, extended token by token (Blumer et al. 1985).

    A state stands for the substrings that end at the same positions. State 0 is the empty substring.

    Attributes:
        next: by state, the states that one more token leads to.
        count: by state, how often its substrings occurred.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.count = [0]
        self._length = [0]  # of a state's longest substring
        self._link = [-1]  # suffix links: the state of the longest suffix that also ends elsewhere
        self._last = 0

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._append(token)

    @property
    def repeated(self) -> Match:
        """The longest suffix of the sequence that also occurs elsewhere in it."""
        state = max(self._link[self._last], 0)
        return state, self._length[state]

    def follow(self, match: Match, token: int) -> Match:
        """The longest suffix of another sequence that occurs in the automaton's, after one more token of the other."""
        state, length = match
        while state and token not in self.next[state]:
            state = self._link[state]
            length = self._length[state]
        below = self.next[state].get(token)
        return (0, 0) if below is None else (below, length + 1)

    def _append(self, token: int) -> None:
        new = self._state(self._length[self._last] + 1)
        state = self._last
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self._link[state]
        if state < 0:
            self._link[new] = 0
        else:
            below = self.next[state][token]
            if self._length[below] != self._length[state] + 1:
                below = self._split(below, state, token)
            self._link[new] = below
        self._last = state = new
        for _ in range(MAX_COUNTED_SUFFIXES):
            if state <= 0:
                break
            self.count[state] += 1
            state = self._link[state]

    def _split(self, state: int, above: int, token: int) -> int:
        """Give the shorter substrings of a state a new state: a token leads to them from the state ``above``."""
        clone = self._state(self._length[above] + 1)
        self.next[clone] = dict(self.next[state])
        self.count[clone] = self.count[state]
        self._link[clone], self._link[state] = self._link[state], clone
        while above >= 0 and self.next[above].get(token) == state:
            self.next[above][token] = clone
            above = self._link[above]
        return clone

    def _state(self, length: int) -> int:
        self.next.append({})
        self.count.append(0)
        self._length.append(length)
        self._link.append(-1)
        return len(self.next) - 1


class SuffixDrafter:
    """For each tip, proposes the tokens after the longest suffix of its sequence that occurred before.

    Args:
        earlier: an automaton over earlier texts, shared by requests. It is not changed.
    """

    def __init__(
        self, tree: Tree, chains: Chains, controller: Controller, earlier: SuffixAutomaton | None = None
    ) -> None:
        self.tree = tree
        self.chains = chains
        self.controller = controller
        self._own = SuffixAutomaton()
        self._read = 0  # tokens of the shared prefix that the automaton has
        self._earlier = earlier
        self._earlier_match: Match = (0, 0)

    def propose(self, tips: Nodes, scores: NDArray[np.float64]) -> Proposal:
        self._read_prefix()
        matched = self._longest_match(int(tips[0]))[1][1]
        width, depth = self.controller.shape(len(tips), matched=matched)
        if not depth:
            return self.controller.no_draft()
        tips = np.unique(tips)
        found = [[*self._likeliest(int(tip), width * depth, depth)] for tip in tips]
        return self.chains.draft(tips, found, width, self.controller.chances)
        yield  # never reached: it makes this a generator, as every drafter's propose is

    def _read_prefix(self) -> None:
        tokens = self.tree.tokens(self.tree.prefix[self._read :]).tolist()
        self._read += len(tokens)
        self._own.extend(tokens)
        if self._earlier is not None:
            for token in tokens:
                self._earlier_match = self._earlier.follow(self._earlier_match, token)

    def _longest_match(self, tip: int) -> tuple[SuffixAutomaton, Match]:
        """The longest suffix of a tip's sequence that occurred before, and the automaton that knows it."""
        branch = self.tree.tokens(self.tree.path(tip)[self._read :]).tolist()
        match, elsewhere = self._own.repeated, self._earlier_match
        for token in branch:
            match = self._own.follow(match, token)
        if self._earlier is None:
            return self._own, match
        for token in branch:
            elsewhere = self._earlier.follow(elsewhere, token)
        return (self._earlier, elsewhere) if elsewhere[1] > match[1] else (self._own, match)

    def _likeliest(self, tip: int, most: int, depth: int) -> Iterator[list[int]]:
        """Chains below a tip that together have its likeliest ``most`` nodes, at most ``depth`` tokens deep."""
        automaton, (state, length) = self._longest_match(tip)
        if not length:
            return
        # A heap, the likeliest first: minus the chance, the chain, the state.
        waiting: list[tuple[float, tuple[int, ...], int]] = [(-1.0, (), state)]
        while waiting and most >= 0:
            chance, chain, state = heapq.heappop(waiting)
            if chain:
                yield list(chain)
            most -= 1
            if len(chain) == depth:
                continue
            below = [(token, other) for token, other in automaton.next[state].items() if token != SEPARATOR]
            # A shorter context is weaker evidence. Smooth its counts, as if another token had followed it too.
            total = sum(automaton.count[other] for _, other in below) + 1 / (length + len(chain))
            for token, other in below:
                if (less := chance * automaton.count[other] / total) <= -MIN_CHANCE:
                    heapq.heappush(waiting, (less, (*chain, token), other))


def suffix_automaton(lm: LanguageModel, texts: Iterable[str | Sequence[int]]) -> SuffixAutomaton:
    """An automaton over earlier texts, to draft from: pass it as ``draft=``.

    Args:
        lm: the target model, whose tokenizer encodes the texts.
        texts: texts, or their token ids.

    Raises:
        SpecbeamError: an element is neither a text nor token ids, or there are no texts at all.
    """
    automaton = SuffixAutomaton()
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise SpecbeamError(f"suffix_automaton takes a list of texts, not {type(texts).__name__}")
    for text in texts:
        automaton.extend(encode(lm, text, raw=True))
        automaton.extend([SEPARATOR])
    if len(automaton.next) == 1:
        raise SpecbeamError("there are no texts to draft from: give at least one")
    return automaton
