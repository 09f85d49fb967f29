"""Strategies: decoding methods as generators over a token tree.

A strategy yields :class:`Evaluate` with a :class:`SelectionRequest`, and is sent the :class:`Selection`: the likeliest
tokens at the nodes, say. Without a request it is sent the logits, float32 [nodes, vocab]. It decides which nodes live
(``tree.keep``), and returns its hypotheses, best first. It returns none, or raises :class:`DeadEnd`, if no sequence is
possible. It may yield a :class:`Hypothesis` once no other can rank before it; the engine then sends None. A strategy
knows nothing of caches, devices or other requests.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from specbeam.core.selection import AttentionProbe, NextBeams, SelectionRequest


class DeadEnd(Exception):
    """No token may follow a sequence that is not finished. The engine says which options can be the cause."""


@dataclass(slots=True)
class Evaluate:
    """A request to evaluate nodes. The engine also evaluates ancestors that it has not evaluated yet.

    Attributes:
        nodes: int [n].
        selection_request: what to select from the logits at these nodes; None for the logits themselves.
        drafting: evaluate nodes of the drafter's tree with the draft model, instead of the target.
        ahead: the strategy can take the selections of up to this many further forward passes. Each is over the tokens
            that the one before has chosen: the highest token of its one node, or the next ``beams``. The same request
            must hold there, with the next positions of its noise. So the selection may have more rows, n for each pass.
            The strategy adds the tokens to the tree pass by pass, in their order and without any others.
        ends: token ids after which no further pass is needed.
        beams: how the nodes go on as beams. None if one node goes on as one sequence.
        or_fewer: if memory is short, raise :class:`specbeam.errors.TooManyNodes` here: the strategy would rather go on
            with fewer nodes. Otherwise the engine evaluates the nodes in parts, and recomputes their ancestors. The
            draft model's nodes are always such.
        any_logits: take the selection also if the logits are not finite. Else the engine raises :class:`NotFinite`.
        probe: heads of cross-attention whose scores at the nodes are written there.
    """

    nodes: Any
    selection_request: SelectionRequest | None = None
    drafting: bool = False
    ahead: int = 0
    ends: frozenset[int] = frozenset()
    beams: NextBeams | None = None
    or_fewer: bool = False
    any_logits: bool = False
    probe: AttentionProbe | None = None


@dataclass(frozen=True)
class Hypothesis:
    """A finished sequence: its last node, its score, and why it ended ("stop" or "length")."""

    node: int
    score: float
    finish_reason: str


Strategy = Generator[Evaluate | Hypothesis, Any, list[Hypothesis]]
