"""Tokens that may not follow: ``no_repeat_ngram_size`` and ``bad_words_ids``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specbeam.tree import Nodes, Tree


class RepeatedNgrams:
    """Bans the tokens that would end an n-gram that the sequence has already (Paulus et al. 2018, 2.5).

    The shared prefix's n-grams are kept as it grows. The others are compared: they begin in its last tokens, or beyond.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._ends: dict[tuple[int, ...], dict[int, int]] = {}  # by begun n-gram: where each token first ends one
        self._read = 0  # tokens of the shared prefix

    def __call__(self, tree: Tree, nodes: Nodes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        depths = tree.depths(nodes)
        if self.size > depths.max(initial=-1) + 1:  # a sequence with its next token holds no two of them
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
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

    def _read_prefix(self, tree: Tree) -> None:
        begin = max(0, self._read - self.size + 1)
        tokens = tree.tokens(tree.prefix[begin:]).tolist()
        for end in range(max(self._read - begin, self.size - 1), len(tokens)):
            ngram = tuple(tokens[end - self.size + 1 : end])
            self._ends.setdefault(ngram, {}).setdefault(tokens[end], begin + end)
        self._read = tree.prefix_length


def repeated_ngrams(ids: NDArray[np.int64], size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The tokens that would end an n-gram that a sequence has already, and their rows. ``ids``: int64 [n, length]."""
    n, length = ids.shape
    if length < size:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    begun = ids[:, length - size + 1 :]
    same = np.ones((n, length - size + 1), dtype=bool)
    for column in range(size - 1):
        same &= ids[:, column : length - size + 1 + column] == begun[:, column : column + 1]
    rows, at = np.nonzero(same)
    return rows, ids[rows, at + size - 1]


class BadWords:
    """Bans the last token of each word where the sequence ends with the word's other tokens.

    Args:
        words: token ids of each. A word that is one end token alone is left out, as in transformers.
    """

    def __init__(self, words: Sequence[Sequence[int]], eos_token_ids: frozenset[int]) -> None:
        kept = [word for word in words if not (len(word) == 1 and word[0] in eos_token_ids)]
        self.groups = []  # by length, shortest first: tokens before the last, int64 [n, length - 1], and the last [n]
        for length in sorted({len(word) for word in kept}):
            table = np.array([word for word in kept if len(word) == length], dtype=np.int64)
            self.groups.append((table[:, :-1], table[:, -1]))

    def __call__(self, tree: Tree, nodes: Nodes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        rows, tokens = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        longest = tree.depths(nodes).max(initial=-1) + 1
        for begins, last in self.groups:
            if begins.shape[1] > longest:  # and so are the words of the groups after it
                break
            ends = tree.last_tokens(nodes, begins.shape[1])
            row, word = np.nonzero((ends[:, None] == begins).all(-1))
            rows.append(row)
            tokens.append(last[word])
        return np.concatenate(rows), np.concatenate(tokens)
