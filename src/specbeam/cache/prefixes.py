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
class RadixNode:
    """Some tokens that follow one another, and their slots.

    Attributes:
        tokens, slots: int64 [n].
        parent: None for the root, which is empty.
        children: by their first tokens.
    """

    tokens: Ints
    slots: Ints
    parent: RadixNode | None
    children: dict[int, RadixNode] = field(default_factory=dict)


class PrefixCache:
    """Token sequences and their slots. Common prefixes are there once (RadixAttention: Zheng et al. 2024, SGLang)."""

    def __init__(self) -> None:
        self._root = RadixNode(NO_SLOTS, NO_SLOTS, None)
        self._by_use: OrderedDict[RadixNode, None] = OrderedDict()  # least recently used first, children before parents

    def find(self, tokens: Ints) -> Ints:
        """The slots of the longest cached prefix of a sequence, int64 [n]."""
        node, _, known = self._walk(tokens)
        return _slots(node, known)

    def use(self, tokens: Ints) -> Ints:
        """The same as :meth:`find`, and what is found is evicted later than others."""
        node, _, known = self._walk(tokens)
        self._touch(node)
        return _slots(node, known)

    def add(self, tokens: Ints, slots: Ints) -> Ints:
        """Cache a sequence.

        Args:
            tokens, slots: int64 [n]. At a negative slot the sequence ends, unless its token is cached already.

        Returns: the slots that were added: those beyond the longest cached prefix.
        """
        node, common, known = self._walk(tokens)
        rest = slots[known:]
        if len(rest) and rest.min() < 0:
            rest = rest[: int((rest < 0).argmax())]
        if len(rest):
            more = tokens[known : known + len(rest)]
            if common < len(node.tokens):
                node = self._split(node, common)
            if node.parent is not None and not node.children:  # the sequence goes on where another one ends
                node.tokens = np.concatenate([node.tokens, more])
                node.slots = np.concatenate([node.slots, rest])
            else:
                node.children[int(more[0])] = node = RadixNode(more.copy(), rest.copy(), node)
        self._touch(node)
        return rest

    def evict(self, count: int, references: NDArray[np.int32]) -> Iterator[Ints]:
        """Evict the least recently used sequences, from their ends on, until enough slots are free.

        Args:
            count: how many slots to free. At least as many are cached that no tree holds.
            references: by slot, how many trees hold it. A tree that holds the end of a sequence holds all of it.

        Yields: slots that are not cached any more, int64 [n]. A tree may still hold them.
        """
        while count > 0:
            leaf = next(iter(self._by_use))
            end = leaf.slots[-max(count, MIN_TOKENS_EVICTED) :]
            if free := len(end) - 1 - int(np.flatnonzero(references[end]).max(initial=-1)):
                count -= free
                yield self._cut(leaf, len(leaf.slots) - free)
            else:
                self._touch(leaf)  # else each call would come to it first

    def slots(self) -> Ints:
        """All cached slots, int64 [n]."""
        return np.concatenate([NO_SLOTS, *(node.slots for node in self._by_use)])

    def _walk(self, tokens: Ints) -> tuple[RadixNode, int, int]:
        """The last node on a sequence's path, how many of its tokens match, and the length of the cached prefix."""
        node, common, known = self._root, 0, 0
        while common == len(node.tokens) and known < len(tokens):
            child = node.children.get(int(tokens[known]))
            if child is None:
                break
            node, common = child, common_length(child.tokens, tokens[known:])
            known += common
        return node, common, known

    def _cut(self, leaf: RadixNode, length: int) -> Ints:
        """Shorten a leaf to its first tokens. Return the slots of the others."""
        gone = leaf.slots[length:]
        if not length:
            assert leaf.parent is not None
            del leaf.parent.children[int(leaf.tokens[0])], self._by_use[leaf]
        leaf.slots, leaf.tokens = leaf.slots[:length], leaf.tokens[:length]
        return gone

    def _split(self, node: RadixNode, length: int) -> RadixNode:
        """Cut a node in two, and return the first part. The caller uses it next."""
        assert node.parent is not None
        first = RadixNode(node.tokens[:length], node.slots[:length], node.parent)
        node.tokens, node.slots, node.parent = node.tokens[length:], node.slots[length:], first
        first.children[int(node.tokens[0])] = node
        assert first.parent is not None
        first.parent.children[int(first.tokens[0])] = first
        return first

    def _touch(self, node: RadixNode) -> None:
        """Note that a node and all above it are used now."""
        while node.parent is not None:
            self._by_use[node] = None
            self._by_use.move_to_end(node)
            node = node.parent


def _slots(node: RadixNode, count: int) -> Ints:
    """The slots from the root down to a node, the first ones of them."""
    parts = [node.slots]
    while node.parent is not None:
        node = node.parent
        parts.append(node.slots)
    return np.concatenate(parts[::-1])[:count]


def common_length(some: Ints, others: Ints) -> int:
    """How many of the first numbers are the same."""
    shorter = min(len(some), len(others))
    different = np.flatnonzero(some[:shorter] != others[:shorter])
    return int(different[0]) if len(different) else shorter
