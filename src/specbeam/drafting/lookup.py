"""Draft tokens of a lookup: what followed the last tokens of a sequence where these stood before.

Prompt lookup (Saxena 2023) takes the latest place. SAM decoding (Hu et al. 2024) takes what followed most often, in the
sequence and in earlier texts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from specbeam.core.tree import Nodes, Tree
from specbeam.drafting.drafter import Chains, Proposal
from specbeam.drafting.policy.controller import Controller
from specbeam.errors import SpecbeamError
from specbeam.models.model import LanguageModel, TokenIds
from specbeam.models.prompts import as_list, encode

MAX_MATCHES = 32
"""Look at this many matches at most, the latest first."""
SEPARATOR = -1
"""Stands between texts. It is no token, so nothing is drafted across it."""
MAX_COUNTED_SUFFIXES = 64
"""Count a new token for this many of the suffixes before it, the longest first: repetitive sequences have very many."""
MIN_PROBABILITY = 0.01
"""Draft nothing less likely than this."""

State = tuple[int, int]
"""A state of an automaton, and the length of the sequence's suffix that it matches, in tokens."""
Context = TypeVar("Context")
"""Where a chain stands: the positions after it in a text, the latest first, or the state of an automaton."""
Continue = Callable[[int, int], list[list[int]]]
"""Gives what may follow a sequence, for a width and a depth: chains of token ids, the likeliest first."""
MAX_MATCH_TOKENS = 8
"""Compare at most this many of the last tokens: a longer match hardly makes the draft better."""


class Lookup:
    """For each tip, proposes the tokens after the longest suffix of its sequence that occurred before.

    Args:
        latest: propose what followed at the latest places. Otherwise propose what followed most often.
        earlier: an automaton over earlier texts, shared by requests. It is not changed, and asked where it has a longer
            match than the sequence itself, up to ``MAX_MATCH_TOKENS``.
        before: token ids before the prompt, which are looked into as if they were part of the sequence.
    """

    def __init__(
        self,
        tree: Tree,
        chains: Chains,
        controller: Controller,
        latest: bool = True,
        earlier: SuffixAutomaton | None = None,
        before: Sequence[int] = (),
    ) -> None:
        self.tree = tree
        self.chains = chains
        self.controller = controller
        self._latest = latest
        # What comes before, the shared prefix, then room for a branch. int64 is slower to search.
        self._text = np.array(before, np.int32)
        self._before, self._read = len(before), 0  # tokens of the first two that it has
        self._earlier = earlier
        self._earlier_state: State = (0, 0)  # after the shared prefix

    def propose(self, tips: Nodes, scores: NDArray[np.float64]) -> Proposal:
        self._read_prefix()
        best, *others = dict.fromkeys(tips.tolist())
        matched, following = self._look_up(best)
        width, depth = self.controller.shape(len(tips), matched=matched)
        if not depth:
            return self.controller.no_draft()
        chains = [following(width, depth), *(self._look_up(tip)[1](width, depth) for tip in others)]
        return self.chains.draft(np.array([best, *others]), chains, width)
        yield  # never reached: it makes this a generator, as every drafter's propose is

    def _read_prefix(self) -> None:
        new = self.tree.tokens(self.tree.prefix[self._read :])
        self._put(new)
        self._read += len(new)
        if self._earlier is not None:
            self._earlier_state = self._earlier.follow(self._earlier_state, new.tolist())

    def _put(self, tokens: Nodes) -> NDArray[np.int32]:
        """Write tokens after the shared prefix. The text is valid until the next call."""
        end = self._before + self._read
        length = end + len(tokens)
        if length > len(self._text):
            self._text = np.resize(self._text, 2 * length)
        self._text[end:length] = tokens
        return self._text[:length]

    def _look_up(self, tip: int) -> tuple[int, Continue]:
        """The length of the match of a tip's sequence, and a function that gives its continuations."""
        branch = self.tree.tokens(self.tree.paths_beyond_prefix(np.array([tip]))[0])
        text = self._put(branch)
        positions, matched = occurrences(text[:-1], text)
        if self._earlier is not None:
            state, length = self._earlier.follow(self._earlier_state, branch.tolist())
            if min(length, MAX_MATCH_TOKENS) > matched:
                return length, partial(likeliest, self._earlier.below, state, length)
        if self._latest:
            return matched, partial(continuations, text, positions)
        return matched, partial(likeliest, partial(below, text), latest_first(positions), matched)


def latest_first(positions: NDArray[np.int64]) -> list[int]:
    latest: list[int] = positions[: -MAX_MATCHES - 1 : -1].tolist()
    return latest


def continuations(text: NDArray[np.integer], positions: NDArray[np.int64], width: int, depth: int) -> list[list[int]]:
    """Up to ``width`` different chains of up to ``depth`` tokens: the tokens at the positions, the latest first."""
    latest = latest_first(positions[-1:] if width == 1 else positions)
    chains = dict.fromkeys(tuple(text[position : position + depth].tolist()) for position in latest)
    return [list(chain) for chain in chains][:width]


def below(text: NDArray[np.integer], positions: list[int]) -> list[tuple[int, int, list[int]]]:
    """The tokens at positions of a text, how often each is there, and the positions after it."""
    following: dict[int, list[int]] = {}
    for position in positions:
        if position < len(text):
            following.setdefault(text.item(position), []).append(position + 1)
    return [(token, len(after), after) for token, after in following.items()]


def likeliest(
    below: Callable[[Context], list[tuple[int, int, Context]]], start: Context, matched: int, width: int, depth: int
) -> list[list[int]]:
    """Chains that together have the likeliest ``width * depth`` nodes below a tip, at most ``depth`` tokens deep.

    Args:
        below: the tokens that followed in a context, each with how often it did, and its own context.
        start: the context of the tip.
        matched: the length of its match, in tokens. Without a match, nothing follows.
    """
    # A heap, the likeliest first: minus the probability, the order of entry, the chain, the context.
    waiting: list[tuple[float, int, list[int], Context]] = [(-1.0, 0, [], start)] if matched else []
    chains: list[list[int]] = []
    entered = 0
    while waiting and len(chains) <= width * depth:  # the tip itself is the first
        probability, _, chain, context = heapq.heappop(waiting)
        chains.append(chain)
        if len(chain) == depth:
            continue
        followed = below(context)
        # The counts of a shorter context are weaker. Smooth them, as if another token had followed it, too.
        total = sum(count for _, count, _ in followed) + 1 / (matched + len(chain))
        for token, count, after in followed:
            if (less_likely := probability * count / total) <= -MIN_PROBABILITY:
                entered += 1
                heapq.heappush(waiting, (less_likely, entered, [*chain, token], after))
    return chains[1:]


class SuffixAutomaton:
    """The smallest automaton of all substrings of a sequence, extended token by token (Blumer et al. 1985).

    A state stands for the substrings that end at the same positions. State 0 is the empty substring.

    Args:
        token_ids: what its tokens mean; None: what they mean to any model.

    Attributes:
        next: by state, the states that one more token leads to.
        count: by state, how often its substrings occurred.
    """

    def __init__(self, token_ids: TokenIds | None = None) -> None:
        self.token_ids = token_ids
        self.next: list[dict[int, int]] = [{}]
        self.count = [0]
        self._length = [0]  # of a state's longest substring
        self._link = [-1]  # suffix links: the state of the longest suffix that also ends elsewhere
        self._last = 0

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._append(token)

    def follow(self, start: State, tokens: Iterable[int]) -> State:
        """The longest suffix of another sequence that occurs in the automaton's, after more tokens of the other."""
        state, length = start
        for token in tokens:
            while state and token not in self.next[state]:
                state = self._link[state]
                length = self._length[state]
            below = self.next[state].get(token)
            state, length = (0, 0) if below is None else (below, length + 1)
        return state, length

    def below(self, state: int) -> list[tuple[int, int, int]]:
        """The tokens that followed a state's substrings, how often each did, and the states they lead to."""
        return [(token, self.count[after], after) for token, after in self.next[state].items() if token != SEPARATOR]

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


@dataclass(frozen=True)
class Continued:
    """A lookup for a text that goes on from more than its prompt, such as the transcript of a long file.

    Attributes:
        draft: "ngram", "suffix", or an automaton over earlier texts.
        before: the token ids before the prompt.
    """

    draft: str | SuffixAutomaton
    before: Sequence[int]


def suffix_automaton(lm: LanguageModel, texts: Iterable[str | Sequence[int]]) -> SuffixAutomaton:
    """An automaton over earlier texts, to draft from: pass it as ``draft=``.

    Args:
        lm: the target model, whose tokenizer encodes the texts.
        texts: texts, or their token ids.

    Raises:
        SpecbeamError: an element is neither a text nor token ids, or there are no texts at all.
    """
    automaton = SuffixAutomaton(lm.token_ids)
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise SpecbeamError(f"suffix_automaton takes a list of texts, not {type(texts).__name__}")
    for text in as_list(texts):
        automaton.extend(encode(lm, text, raw=True))
        automaton.extend([SEPARATOR])
    if len(automaton.next) == 1:
        raise SpecbeamError("there are no texts to draft from: give at least one")
    return automaton


def occurrences(text: NDArray[np.integer], tokens: NDArray[np.integer]) -> tuple[NDArray[np.int64], int]:
    """The positions after the longest suffix of a sequence that a text has, ascending, and the length of the suffix."""
    matched, longer = 0, text == tokens[-1]
    begins = longer[:0]  # by token of the text, whether the match begins there
    while longer.any():
        begins, matched = longer, matched + 1
        if matched == min(MAX_MATCH_TOKENS, len(tokens)):
            break
        longer = begins[1:] & (text[:-matched] == tokens[-1 - matched])
    return np.flatnonzero(begins) + matched, matched
