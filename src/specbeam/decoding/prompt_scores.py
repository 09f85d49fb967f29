"""The log-probabilities of a prompt's own tokens."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

from specbeam.decoding import Answer, Evaluate, Wish
from specbeam.tree import Tree

NODES_PER_QUESTION = 64
"""Logits are held for this many nodes at once."""


@dataclass
class PromptScores:
    """How likely the tokens of a prompt are. The first token follows nothing, so it has no entry in the lists.

    Attributes:
        log_probs: the log-probability of each token given the tokens before it, as in :class:`specbeam.Sequence`.
        top_logprobs: the log-probabilities of the likeliest tokens at its place, by token id, the likeliest first.
    """

    log_probs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)


def score_prompt(tree: Tree, k: int, scores: PromptScores) -> Generator[Evaluate, Answer, None]:
    """The first part of a strategy: evaluate the prompt, and note its log-probabilities.

    It evaluates all tokens, because kept texts have no logits. The request should have ``share_prefix=False``. Else its
    passes store the keys and values of other requests again, and may round them in another way.

    Args:
        k: how many of the likeliest tokens at each place are noted.
        scores: filled here.
    """
    before, tokens = tree.trunk[:-1], tree.tokens(tree.trunk[1:])
    for start in range(0, len(before), NODES_PER_QUESTION):
        part = slice(start, start + NODES_PER_QUESTION)
        answer = yield Evaluate(before[part].copy(), Wish(most=k, given=tokens[part, None].copy()))
        assert answer.given is not None
        scores.log_probs += answer.given[:, 0].tolist()
        for *row, token, log_prob in zip(
            answer.tokens.tolist(),
            answer.log_probs.tolist(),
            tokens[part].tolist(),
            answer.given[:, 0].tolist(),
            strict=True,
        ):
            likeliest = dict(zip(*row, strict=True))
            if token in likeliest:
                likeliest[token] = log_prob  # a token has one log-probability
            scores.top_logprobs.append(likeliest)
