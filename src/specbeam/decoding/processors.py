"""What changes the model's scores before a token is chosen, with transformers' semantics.

*Processors* hold for every method (penalties, forbidden tokens); *warpers* shape the distribution that is sampled from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbeam.options import Options
from specbeam.tree import Tree

MASKED = float("-inf")


class Processors:
    """The processors of one request, applied to the scores at some nodes."""

    def __init__(self, options: Options, eos_token_ids: frozenset[int]) -> None:
        self.repetition_penalty = options.repetition_penalty or 1.0
        self.min_new_tokens = options.min_new_tokens
        self.eos_token_ids = sorted(eos_token_ids)

    def __call__(self, tree: Tree, nodes: Any, scores: Tensor) -> Tensor:
        """Scores [n, vocab] at n nodes in, processed scores [n, vocab] out; the input is not changed."""
        if self.repetition_penalty != 1.0:
            seen = [np.unique(tree.tokens(tree.path(node))) for node in nodes]
            rows = zip(scores, seen, strict=True)
            scores = torch.stack([repetition_penalty(row, tokens, self.repetition_penalty) for row, tokens in rows])
        if self.eos_token_ids and self.min_new_tokens:
            early = tree.depths(nodes) + 1 - tree.prompt_length < self.min_new_tokens
            if early.any():
                forbidden = torch.zeros_like(scores, dtype=torch.bool)
                forbidden[:, self.eos_token_ids] = torch.from_numpy(early).to(scores.device)[:, None]
                scores = scores.masked_fill(forbidden, MASKED)
        return scores


class Warpers:
    """Temperature, then top-k, top-p and min-p, in transformers' order."""

    def __init__(self, options: Options) -> None:
        self.steps: list[Callable[[Tensor], Tensor]] = []
        given = {
            temperature: (options.temperature, 1.0),
            top_k: (options.top_k, 0),
            top_p: (options.top_p, 1.0),
            min_p: (options.min_p, 0.0),
        }
        for step, (value, neutral) in given.items():
            if value is not None and value != neutral:
                self.steps.append(lambda scores, step=step, value=value: step(scores, value))  # type: ignore[misc]

    def __call__(self, scores: Tensor) -> Tensor:
        """Scores [..., vocab] in, scores of the distribution to draw from out, with -inf where it is 0."""
        for step in self.steps:
            scores = step(scores)
        return scores


def repetition_penalty(scores: Tensor, seen: np.ndarray, penalty: float) -> Tensor:
    """Divide positive and multiply negative scores [vocab] of the tokens seen (Keskar et al. 2019, CTRL, 4.1)."""
    index = torch.from_numpy(seen).to(scores.device)
    chosen = scores[index]
    return scores.index_put((index,), torch.where(chosen < 0, chosen * penalty, chosen / penalty))


def temperature(scores: Tensor, value: float) -> Tensor:
    """Divide by the temperature."""
    return scores / value


def top_k(scores: Tensor, k: int) -> Tensor:
    """Keep the k highest scores, and those equal to the lowest of them (Fan et al. 2018, 5.4)."""
    lowest = scores.topk(min(k, scores.shape[-1]), dim=-1).values[..., -1:]
    return scores.masked_fill(scores < lowest, MASKED)


def top_p(scores: Tensor, p: float) -> Tensor:
    """Keep the likeliest tokens whose probabilities first sum to p (nucleus sampling, Holtzman et al. 2020, 3.1)."""
    ascending, order = scores.sort(dim=-1)
    below = ascending.softmax(-1).cumsum(-1) <= 1 - p
    below[..., -1] = False  # the likeliest always stays
    return scores.masked_fill(torch.zeros_like(below).scatter(-1, order, below), MASKED)


def min_p(scores: Tensor, p: float) -> Tensor:
    """Keep tokens at least p times as likely as the likeliest (Nguyen et al. 2024, 3)."""
    probabilities = scores.softmax(-1)
    return scores.masked_fill(probabilities < p * probabilities.amax(-1, keepdim=True), MASKED)
