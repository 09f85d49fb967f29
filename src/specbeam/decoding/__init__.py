"""Strategies: decoding methods as generators over a token tree.

A strategy yields :class:`Evaluate` and is sent the logits at the nodes, float32 [nodes, vocab]. It decides which nodes
live on (``tree.keep``), and returns its hypotheses, best first. It may yield a :class:`Hypothesis` as soon as that is
certain to be the next best; it is then sent None. It knows nothing of caches, devices or other requests.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Evaluate:
    """A request for the next-token logits at nodes. The engine also evaluates ancestors that it has not evaluated yet.

    Attributes:
        nodes: int [n].
        drafting: ask the draft model about nodes of the drafter's tree, instead of the target.
        vocab: the number of first tokens whose logits are enough; None for all tokens.
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
