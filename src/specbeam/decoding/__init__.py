"""Strategies: decoding methods as generators over a token tree.

A strategy yields :class:`Evaluate`, is sent the logits at those nodes (float32 [nodes, vocab]), decides which nodes
live on (``tree.keep``), and returns its hypotheses, best first. It may yield a :class:`Hypothesis` as soon as it is
certain to be the next best, and is sent None then. It knows nothing of caches, devices or other requests.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Evaluate:
    """A request for the next-token logits at nodes, int [n]. Ancestors not evaluated yet are the engine's concern.

    Attributes:
        drafting: ask the draft model, about nodes of the drafter's tree, instead of the target.
        vocab: the logits of so many first tokens are enough; None for all.
    """

    nodes: Any
    drafting: bool = False
    vocab: int | None = None


@dataclass(frozen=True)
class Hypothesis:
    """A finished sequence: its last node, its score, and why it ended ("stop" or "length")."""

    node: int
    score: float
    finish_reason: str


Strategy = Generator[Evaluate | Hypothesis, Tensor, list[Hypothesis]]
