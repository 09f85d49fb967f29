"""Warpers: sampling's temperature and truncations, which change the scores of all tokens, float32 [n, vocab]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbeam.backends.torch.transfer import to_device
from specbeam.core.selection import MASKED


def only_the_likeliest(scores: Tensor, tokens: Sequence[int]) -> Tensor:
    """Scores [n, vocab] with -inf for all of some tokens but the likeliest of them, in each row."""
    columns = to_device(np.array(tokens), scores.device)
    among = scores[:, columns]
    best = among.argmax(-1, keepdim=True)
    scores = scores.clone()
    scores[:, columns] = torch.full_like(among, MASKED).scatter(-1, best, among.gather(-1, best))
    return scores


def only_together(scores: Tensor, first: int, end: int) -> Tensor:
    """Scores [n, vocab] where the tokens from first to before end are alone if together they beat each other token."""
    among, others = scores[:, first:end], torch.cat([scores[:, :first], scores[:, end:]], dim=-1)
    if not among.shape[-1] or not others.shape[-1]:
        return scores
    alone = (among.logsumexp(-1) > others.amax(-1))[:, None]
    is_other = torch.ones(scores.shape[-1], dtype=torch.bool, device=scores.device)
    is_other[first:end] = False
    return scores.masked_fill(alone & is_other, MASKED)


def temperature(scores: Tensor, value: float) -> Tensor:
    """Divide by the temperature."""
    return scores / value


def top_k(scores: Tensor, k: int) -> Tensor:
    """Keep the k highest scores, and those equal to the lowest of them (Fan et al. 2018, 5.4)."""
    lowest = scores.topk(min(k, scores.shape[-1])).values[..., -1:]
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


def typical_p(scores: Tensor, p: float) -> Tensor:
    """Keep the tokens whose surprise is nearest to the expected one, until they sum to p (Meister et al. 2023, 4)."""
    log_probs = scores.log_softmax(-1)
    expected = -(log_probs * log_probs.exp()).nansum(-1, keepdim=True)  # impossible tokens are 0 * -inf
    ascending, order = (-log_probs - expected).abs().sort(dim=-1)
    number = (scores.gather(-1, order).softmax(-1).cumsum(-1) < p).sum(-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
    far = ascending > ascending.gather(-1, number)
    return scores.masked_fill(torch.zeros_like(far).scatter(-1, order, far), MASKED)


WARPERS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    warp.__name__: warp for warp in (temperature, top_k, top_p, min_p, typical_p)
}
"""By the options that ask for them."""
