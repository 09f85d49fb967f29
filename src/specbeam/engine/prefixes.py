"""Texts that were read lately, and the slots where their keys and values lie: a radix tree over token ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
NO_SLOTS: Ints = np.empty(0, dtype=np.int64)
MIN_TOKENS_DROPPED = 64
"""Drop at least this many tokens of a text at once."""


@dataclass(eq=False, slots=True)
class Stretch:
    """Some tokens that follow one another.

    Attributes:
        tokens, slots: int64 [n].
        above: the stretch before. None for the root, which is empty.
        below: the stretches that follow, by their first tokens.
        last_used: the larger, the later.
    """

    tokens: Ints
    slots: Ints
    above: Stretch | None
    below: dict[int, Stretch] = field(default_factory=dict)
    last_used: int = 0


class Prefixes:
    """The texts. They share their common beginnings (radix attention: Zheng et al. 2024, SGLang, section 3)."""

    def __init__(self) -> None:
        self._root = Stretch(NO_SLOTS, NO_SLOTS, None)
        self._clock = count(1)
        self._oldest: list[tuple[int, int, Stretch]] = []  # a heap with each leaf. Some entries are out of date
        self._numbers = count()

    def find(self, tokens: Ints, is_used: bool = True) -> Ints:
        """The slots of the longest beginning of a text that is here, int64 [m].

        Args:
            tokens: int64 [n].
            is_used: whether it is used now. Then it is dropped later than others.
        """
        path, (stretch, common) = self._walk(tokens)
        if is_used:
            self._use([*path, stretch])
        parts = [one.slots for one in path] + [stretch.slots[:common]]
        return np.concatenate(parts)

    def add(self, tokens: Ints, slots: Ints) -> Ints:
        """Keep a text. Slots of a beginning that is here already are left out.

        Args:
            tokens, slots: int64 [n]. A negative slot holds nothing: there the text ends, unless it is here already.

        Returns: the slots that were added.
        """
        path, (stretch, common) = self._walk(tokens)
        known = sum(len(one.tokens) for one in path) + common
        rest = slots[known:]
        if len(rest) and rest.min() < 0:
            rest = rest[: int((rest < 0).argmax())]
        used = [*path, stretch]
        if len(rest):
            more = tokens[known : known + len(rest)]
            if common < len(stretch.tokens):
                used[-1] = stretch = self._split(stretch, common)
            if stretch.above is not None and not stretch.below:  # the text goes on where another one ends
                stretch.tokens = np.concatenate([stretch.tokens, more])
                stretch.slots = np.concatenate([stretch.slots, rest])
            else:
                stretch.below[int(more[0])] = leaf = Stretch(more.copy(), rest.copy(), stretch)
                used.append(leaf)
                self._push(leaf)
        self._use(used)
        return rest

    def drop(self, least: int, references: NDArray[np.int32]) -> Iterator[Ints]:
        """Drop the texts that were not used for the longest time, from their ends on, until enough slots are free.

        Args:
            least: how many slots to free. Texts hold at least as many that no tree holds.
            references: by slot, how many trees hold it. A text whose end a tree holds stays as it is. It is dropped
                only if the tree has let go of its beginning, and nothing else is left to free.

        Yields: slots that no text holds any more, int64 [n]. A tree may still hold them.
        """
        held: list[Stretch] = []
        freed = 0
        while freed < least and (self._oldest or held):
            if not self._oldest:
                leaf = held.pop(0)
                yield self._cut(leaf, int(np.flatnonzero(references[leaf.slots] == 0).max(initial=-1)) + 1)
                continue
            last_used, _, leaf = heappop(self._oldest)
            if leaf.above is None or leaf.below:  # dropped, or no leaf any more
                continue
            if leaf.last_used > last_used:
                self._push(leaf)
                continue
            end = leaf.slots[-max(least - freed, MIN_TOKENS_DROPPED) :]
            free = len(end) - 1 - int(np.flatnonzero(references[end]).max(initial=-1))
            if free:
                freed += free
                yield self._cut(leaf, len(leaf.slots) - free)
            else:
                self._use([leaf])  # else each call would come to it first
                held.append(leaf)
        for leaf in held:
            self._push(leaf)

    def _cut(self, leaf: Stretch, length: int) -> Ints:
        """Shorten a leaf to its first tokens. Return the slots of the others."""
        gone = leaf.slots[length:]
        if length:
            leaf.slots, leaf.tokens = leaf.slots[:length], leaf.tokens[:length]
            self._push(leaf)
        else:
            above, leaf.above = leaf.above, None
            assert above is not None
            del above.below[int(leaf.tokens[0])]
            if not above.below:
                self._push(above)
        return gone

    def slots(self) -> Ints:
        """The slots of all texts, int64 [n]."""
        found, waiting = [NO_SLOTS], [self._root]
        while waiting:
            stretch = waiting.pop()
            found.append(stretch.slots)
            waiting += stretch.below.values()
        return np.concatenate(found)

    def _walk(self, tokens: Ints) -> tuple[list[Stretch], tuple[Stretch, int]]:
        """The stretches that a text goes through, the last one of them with the number of its tokens in common."""
        path: list[Stretch] = []
        stretch, common, at = self._root, 0, 0
        while common == len(stretch.tokens) and at < len(tokens):
            below = stretch.below.get(int(tokens[at]))
            if below is None:
                break
            path.append(stretch)
            stretch, common = below, common_length(below.tokens, tokens[at:])
            at += common
        return path, (stretch, common)

    def _split(self, stretch: Stretch, length: int) -> Stretch:
        """Cut a stretch in two, and return the first part."""
        above = stretch.above
        assert above is not None
        first = Stretch(stretch.tokens[:length], stretch.slots[:length], above, last_used=stretch.last_used)
        stretch.tokens, stretch.slots, stretch.above = stretch.tokens[length:], stretch.slots[length:], first
        first.below[int(stretch.tokens[0])] = stretch
        above.below[int(first.tokens[0])] = first
        return first

    def _use(self, path: list[Stretch]) -> None:
        now = next(self._clock)
        for stretch in path:
            stretch.last_used = now

    def _push(self, leaf: Stretch) -> None:
        if leaf.above is not None:
            heappush(self._oldest, (leaf.last_used, next(self._numbers), leaf))


def common_length(some: Ints, others: Ints) -> int:
    """How many of the first numbers are the same."""
    shorter = min(len(some), len(others))
    different = np.flatnonzero(some[:shorter] != others[:shorter])
    return int(different[0]) if len(different) else shorter
