"""Tokens that may not follow: repeated n-grams, bad words, and tokens that are banned for a time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specbeam.core.tree import Nodes, Tree

NONE = np.empty(0, dtype=np.int64)


class Bans(Protocol):
    """Some tokens that may not follow, whatever their scores."""

    def __call__(self, tree: Tree, nodes: Nodes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """At nodes, int64 [n]: the rows and the token ids that may not follow there, int64 [m] each."""

    def unchanged(self, new_tokens: int) -> int:
        """For how many tokens beyond this number of new ones, whatever they are, the same tokens are banned."""


class BannedTokens:
    """Bans some tokens while a sequence has at least ``first`` and at most ``last`` new tokens."""

    def __init__(self, tokens: Sequence[int], first: int = 0, last: int = sys.maxsize) -> None:
        self.tokens = np.array(tokens, dtype=np.int64)
        self.first, self.last = first, last

    def __call__(self, tree: Tree, nodes: Nodes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        new = tree.depths(nodes) + 1 - tree.prompt_length
        rows = np.flatnonzero((new >= self.first) & (new <= self.last))
        return np.repeat(rows, len(self.tokens)), np.tile(self.tokens, len(rows))

    def unchanged(self, new_tokens: int) -> int:
        if new_tokens > self.last:
            return sys.maxsize
        return (self.last if new_tokens >= self.first else self.first - 1) - new_tokens


class RepeatedNgrams:
    """Bans the tokens that would complete an n-gram of the sequence a second time (Paulus et al. 2018, 2.5).

    The shared prefix's n-grams are kept as it grows. The others are compared: they begin in its last tokens, or beyond.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._ends: dict[tuple[int, ...], dict[int, int]] = {}  # by begun n-gram: where each token first ends one
        self._read = 0  # tokens of the shared prefix

    def __call__(self, tree: Tree, nodes: Nodes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        depths = tree.depths(nodes)
        if self.size > depths.max(initial=-1) + 1:  # a sequence with its next token holds no two of them
            return NONE, NONE
        self._read_prefix(tree)
        begun = tree.last_tokens(nodes, self.size - 1)
        pairs = [
            (row, token)
            for row, (ngram, depth) in enumerate(zip(begun.tolist(), depths.tolist(), strict=True))
            for token, end in self._ends.get(tuple(ngram), {}).items()
            if end <= depth
        ]
        found = [np.array(pairs, dtype=np.int64).reshape(-1, 2).T]
        last = tree.tokens(tree.prefix[max(0, tree.prefix_length - self.size + 1) :])
        for depth in {*depths.tolist()}:
            if depth >= tree.prefix_length:
                at = np.flatnonzero(depths == depth)
                beyond = tree.tokens(tree.paths_beyond_prefix(nodes[at]))
                ids = np.concatenate([np.broadcast_to(last, (len(at), len(last))), beyond], axis=1)
                rows, tokens = repeated_ngrams(ids, self.size)
                found.append(np.stack([at[rows], tokens]))
        rows, tokens = np.concatenate(found, axis=1)
        return rows, tokens

    def unchanged(self, new_tokens: int) -> int:
        return 0

    def _read_prefix(self, tree: Tree) -> None:
        begin = max(0, self._read - self.size + 1)
        tokens = tree.tokens(tree.prefix[begin:]).tolist()
        for end in range(max(self._read - begin, self.size - 1), len(tokens)):
            ngram = tuple(tokens[end - self.size + 1 : end])
            self._ends.setdefault(ngram, {}).setdefault(tokens[end], begin + end)
        self._read = tree.prefix_length


def repeated_ngrams(ids: NDArray[np.int64], size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The tokens that would complete an n-gram a second time, and their rows. ``ids``: int64 [n, length]."""
    n, length = ids.shape
    if length < size:
        return NONE, NONE
    begun = ids[:, length - size + 1 :]
    same = np.ones((n, length - size + 1), dtype=bool)
    for column in range(size - 1):
        same &= ids[:, column : length - size + 1 + column] == begun[:, column : column + 1]
    rows, at = np.nonzero(same)
    return rows, ids[rows, at + size - 1]


class SourceNgrams:
    """Bans the tokens that would complete an n-gram of the prompt (``encoder_no_repeat_ngram_size``)."""

    def __init__(self, source: Sequence[int], size: int) -> None:
        self.size = size
        self._ends: dict[tuple[int, ...], set[int]] = {}  # by begun n-gram
        for end in range(size - 1, len(source)):
            self._ends.setdefault(tuple(source[end - size + 1 : end]), set()).add(source[end])

    def __call__(self, tree: Tree, nodes: Nodes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if not self._ends:
            return NONE, NONE
        begun = tree.last_tokens(nodes, self.size - 1).tolist()
        pairs = [(row, token) for row, ngram in enumerate(begun) for token in self._ends.get(tuple(ngram), ())]
        rows, tokens = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        return rows, tokens

    def unchanged(self, new_tokens: int) -> int:
        return sys.maxsize if self.size == 1 or not self._ends else 0


class Words:
    """Finds where a sequence ends with all tokens of a word but its last one.

    Args:
        words: token ids of each.

    Attributes:
        last: the last token of each word, int64 [words].
    """

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        lengths = np.array([len(word) for word in words], dtype=np.int64)
        self.last = np.array([word[-1] for word in words], dtype=np.int64)
        self.groups = []  # by length, shortest first: tokens before the last, int64 [n, length - 1], and numbers [n]
        for length in np.unique(lengths).tolist():
            numbers = np.flatnonzero(lengths == length)
            self.groups.append((np.array([words[i][:-1] for i in numbers.tolist()], dtype=np.int64), numbers))

    def __call__(self, tree: Tree, nodes: Nodes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """At nodes, int64 [n]: the rows, and the numbers of the words that may end there, int64 [m] each."""
        rows, words = [NONE], [NONE]
        longest = tree.depths(nodes).max(initial=-1) + 1
        for begins, numbers in self.groups:
            if begins.shape[1] > longest:  # and so are the words of the groups after it
                break
            ends = tree.last_tokens(nodes, begins.shape[1])
            row, word = np.nonzero((ends[:, None] == begins).all(-1))
            rows.append(row)
            words.append(numbers[word])
        return np.concatenate(rows), np.concatenate(words)

    def unchanged(self, new_tokens: int) -> int:
        """For how many further tokens, whatever they are, the same words may end."""
        return 0 if any(begins.shape[1] for begins, _ in self.groups) else sys.maxsize


class BadWords:
    """Bans the last token of each word where the sequence ends with the word's other tokens.

    Args:
        words: token ids of each. A word that is one end token alone is left out, as in transformers.
    """

    def __init__(self, words: Sequence[Sequence[int]], eos_token_ids: frozenset[int]) -> None:
        self.words = Words([word for word in words if not (len(word) == 1 and word[0] in eos_token_ids)])
        self.unchanged = self.words.unchanged

    def __call__(self, tree: Tree, nodes: Nodes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        rows, numbers = self.words(tree, nodes)
        return rows, self.words.last[numbers]


class SequenceBias:
    """Adds a number to the score of a word's last token where the sequence ends with its other tokens."""

    def __init__(self, biases: dict[tuple[int, ...], float]) -> None:
        self.words, self.values = Words([*biases]), np.array([*biases.values()], dtype=np.float32)
        self.unchanged = self.words.unchanged

    def __call__(self, tree: Tree, nodes: Nodes) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        """At nodes, int64 [n]: rows and token ids, int64 [m] each, and what is added there, float32 [m]."""
        rows, numbers = self.words(tree, nodes)
        places, which = np.unique(np.stack([rows, self.words.last[numbers]]), axis=1, return_inverse=True)
        sums = np.zeros(places.shape[1], np.float32)  # several words may have the same last token
        np.add.at(sums, which.ravel(), self.values[numbers])
        return places[0], places[1], sums
