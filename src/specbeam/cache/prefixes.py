"""Which slots hold the longest cached prefix of some tokens: a radix tree over token ids."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
NO_SLOTS: Ints = np.empty(0, dtype=np.int64)
MIN_TOKENS_EVICTED = 64
"""Evict at least this many tokens of a sequence at once."""


@dataclass(eq=False, slots=True)
class Stretch:
    """A node of the radix tree: some tokens that follow one another.

    Attributes:
        tokens, slots: int64 [n].
        above: the stretch before. None for the root, which is empty.
        below: the stretches that follow, by their first tokens.
    """

    tokens: Ints
    slots: Ints
    above: Stretch | None
    below: dict[int, Stretch] = field(default_factory=dict)


class PrefixCache:
    """Token sequences and their slots. Common prefixes are there once (RadixAttention: Zheng et al. 2024, SGLang)."""

    def __init__(self) -> None:
        self._root = Stretch(NO_SLOTS, NO_SLOTS, None)
        self._by_use: OrderedDict[Stretch, None] = OrderedDict()  # least recently used first, each before the one above

    def find(self, tokens: Ints) -> Ints:
        """The slots of the longest cached prefix of a sequence, int64 [n]."""
        stretch, _, known = self._walk(tokens)
        return _slots(stretch, known)

    def use(self, tokens: Ints) -> Ints:
        """The same as :meth:`find`, and what is found is evicted later than others."""
        stretch, _, known = self._walk(tokens)
        self._touch(stretch)
        return _slots(stretch, known)

    def add(self, tokens: Ints, slots: Ints) -> Ints:
        """Cache a sequence.

        Args:
            tokens, slots: int64 [n]. At a negative slot the sequence ends, unless its token is cached already.

        Returns: the slots that were added: those beyond the longest cached prefix.
        """
        stretch, common, known = self._walk(tokens)
        rest = slots[known:]
        if len(rest) and rest.min() < 0:
            rest = rest[: int((rest < 0).argmax())]
        if len(rest):
            more = tokens[known : known + len(rest)]
            if common < len(stretch.tokens):
                stretch = self._split(stretch, common)
            if stretch.above is not None and not stretch.below:  # the sequence goes on where another one ends
                stretch.tokens = np.concatenate([stretch.tokens, more])
                stretch.slots = np.concatenate([stretch.slots, rest])
            else:
                stretch.below[int(more[0])] = stretch = Stretch(more.copy(), rest.copy(), stretch)
        self._touch(stretch)
        return rest

    def evict(self, least: int, references: NDArray[np.int32]) -> Iterator[Ints]:
        """Evict the least recently used sequences, from their ends on, until enough slots are free.

        Args:
            least: how many slots to free. At least as many are cached that no tree holds.
            references: by slot, how many trees hold it. A sequence whose end a tree holds stays as it is. It is evicted
                only if the tree has freed its beginning, and nothing else is left to free.

        Yields: slots that are not cached any more, int64 [n]. A tree may still hold them.
        """
        held = set[Stretch]()
        while least > 0 and self._by_use:
            leaf = next(iter(self._by_use))
            if leaf in held:  # so are all others
                held.remove(leaf)
                yield self._cut(leaf, int(np.flatnonzero(references[leaf.slots] == 0).max(initial=-1)) + 1)
                continue
            end = leaf.slots[-max(least, MIN_TOKENS_EVICTED) :]
            if free := len(end) - 1 - int(np.flatnonzero(references[end]).max(initial=-1)):
                least -= free
                yield self._cut(leaf, len(leaf.slots) - free)
            else:
                self._touch(leaf)  # else each call would come to it first
                held.add(leaf)

    def slots(self) -> Ints:
        """All cached slots, int64 [n]."""
        return np.concatenate([NO_SLOTS, *(stretch.slots for stretch in self._by_use)])

    def _walk(self, tokens: Ints) -> tuple[Stretch, int, int]:
        """The last stretch that a sequence goes through, the tokens in common with it, and the number in all."""
        stretch, common, known = self._root, 0, 0
        while common == len(stretch.tokens) and known < len(tokens):
            below = stretch.below.get(int(tokens[known]))
            if below is None:
                break
            stretch, common = below, common_length(below.tokens, tokens[known:])
            known += common
        return stretch, common, known

    def _cut(self, leaf: Stretch, length: int) -> Ints:
        """Shorten a leaf to its first tokens. Return the slots of the others."""
        gone = leaf.slots[length:]
        if not length:
            assert leaf.above is not None
            del leaf.above.below[int(leaf.tokens[0])], self._by_use[leaf]
        leaf.slots, leaf.tokens = leaf.slots[:length], leaf.tokens[:length]
        return gone

    def _split(self, stretch: Stretch, length: int) -> Stretch:
        """Cut a stretch in two, and return the first part. The caller uses it next."""
        assert stretch.above is not None
        first = Stretch(stretch.tokens[:length], stretch.slots[:length], stretch.above)
        stretch.tokens, stretch.slots, stretch.above = stretch.tokens[length:], stretch.slots[length:], first
        first.below[int(stretch.tokens[0])] = stretch
        assert first.above is not None
        first.above.below[int(first.tokens[0])] = first
        return first

    def _touch(self, stretch: Stretch) -> None:
        """Note that a stretch and all above it are used now."""
        while stretch.above is not None:
            self._by_use[stretch] = None
            self._by_use.move_to_end(stretch)
            stretch = stretch.above


def _slots(stretch: Stretch, count: int) -> Ints:
    """The first slots down to a stretch."""
    parts = [stretch.slots]
    while stretch.above is not None:
        stretch = stretch.above
        parts.append(stretch.slots)
    return np.concatenate(parts[::-1])[:count]


def common_length(some: Ints, others: Ints) -> int:
    """How many of the first numbers are the same."""
    shorter = min(len(some), len(others))
    different = np.flatnonzero(some[:shorter] != others[:shorter])
    return int(different[0]) if len(different) else shorter
