"""The log-probabilities of given tokens: of a prompt's own, or of continuations that a caller gives."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specbeam.decoding import Evaluate, Selection, SelectionRequest
from specbeam.tree import Tree

NODES_PER_QUESTION = 64
"""Logits are held for this many nodes at once."""


@dataclass
class PromptScores:
    """How likely the tokens of a prompt are. The first token follows nothing, so it has no entry in the lists.

    Attributes:
        log_probs: the log-probability of each token given the tokens before it, as in :class:`specbeam.Sequence`.
        top_logprobs: the log-probabilities of the likeliest tokens at its position, by token id, the likeliest first.
    """

    log_probs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)


def score_prompt(tree: Tree, k: int, scores: PromptScores) -> Generator[Evaluate, Selection, None]:
    """The first part of a strategy: evaluate the prompt, and note its log-probabilities.

    It evaluates all tokens, because cached prefixes have no logits. The request should have ``share_prefix=False``.
    Otherwise its forward passes overwrite keys and values of other requests, and may round them differently.

    Args:
        k: how many of the likeliest tokens at each position are noted.
        scores: filled here.
    """
    before, tokens = tree.prefix[:-1], tree.tokens(tree.prefix[1:])
    for part in _parts(len(before)):
        selection = yield Evaluate(before[part].copy(), SelectionRequest(top=k, given=tokens[part, None].copy()))
        assert selection.given is not None
        scores.log_probs += selection.given[:, 0].tolist()
        for *row, token, log_prob in zip(
            selection.tokens.tolist(),
            selection.log_probs.tolist(),
            tokens[part].tolist(),
            selection.given[:, 0].tolist(),
            strict=True,
        ):
            likeliest = dict(zip(*row, strict=True))
            if token in likeliest:
                likeliest[token] = log_prob  # a token has one log-probability
            scores.top_logprobs.append(likeliest)


@dataclass
class ContinuationScores:
    """How likely some continuations of a prompt are.

    Attributes:
        log_probs: the sum over the tokens of each, float64 [n].
        greedy: whether all these tokens are the likeliest at their positions, bool [n].
    """

    log_probs: NDArray[np.float64]
    greedy: NDArray[np.bool_]


def score_continuations(
    tree: Tree, continuations: list[list[int]], scores: ContinuationScores
) -> Generator[Evaluate, Selection, None]:
    """A strategy: evaluate continuations of the prompt, each shared beginning once, and sum their log-probabilities.

    Args:
        scores: filled here.
    """
    scored: list[tuple[int, int, int]] = []  # for each token: the node that it follows, its id, and its continuation
    for number, tokens in enumerate(continuations):
        node = tree.tip
        for place, token in enumerate(tokens):
            scored.append((node, token, number))
            if place + 1 < len(tokens):
                (node,) = tree.draft(node, token).tolist()
    after, ids, numbers = np.array(sorted(scored), dtype=np.int64).reshape(-1, 3).T
    nodes, first, rows = np.unique(after, return_index=True, return_inverse=True)
    columns = np.arange(len(after)) - first[rows]
    given = np.zeros((len(nodes), columns.max(initial=-1) + 1), dtype=np.int64)
    given[rows, columns] = ids
    for part in _parts(len(nodes)):
        selection = yield Evaluate(nodes[part], SelectionRequest(top=1, given=given[part]))
        assert selection.given is not None
        here = (part.start <= rows) & (rows < part.stop)
        at = rows[here] - part.start
        np.add.at(scores.log_probs, numbers[here], selection.given[at, columns[here]].astype(np.float64))
        np.logical_and.at(scores.greedy, numbers[here], selection.tokens[at, 0] == ids[here])


def _parts(count: int) -> Iterator[slice]:
    return (slice(start, start + NODES_PER_QUESTION) for start in range(0, count, NODES_PER_QUESTION))
