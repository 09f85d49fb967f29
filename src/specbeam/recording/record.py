"""What a strategy reports of its rounds: counts for the statistics, and a trace if one was asked for."""

from __future__ import annotations

from typing import Any

import numpy as np

from specbeam.core.tree import NO_NODES, Nodes, Tree
from specbeam.recording.trace import Trace


class Record:
    """Counts of one request.

    Attributes:
        steps: tokens added to a sequence, or steps of beam search.
        drafted: draft tokens that the target verified.
        accepted: draft tokens that became part of the sequence, or of a beam.
        rounds: forward passes of the target that the strategy waited for.
        left_out: beams of steps that the target did not evaluate.
        skipped: rounds that skipped drafting, because it would not have paid.
        checks: for each round with draft tokens, how many were accepted in it.
        positions: for each position after the known tokens, how many draft tokens the target verified, and how many of
            them were accepted.
        trace: of the rounds; None if it was not asked for.
    """

    def __init__(self, tree: Tree, trace: Trace | None = None) -> None:
        self.steps = self.drafted = self.accepted = self.left_out = self.rounds = self.skipped = 0
        self.checks: list[int] = []
        self.positions: list[list[int]] = []
        self.trace = trace
        self._tree = tree
        self._draft_tokens: dict[int, int] = {}  # positions of tokens that may still be accepted, by node

    def round(self, draft_tokens: Nodes = NO_NODES, skipped: bool = False, evaluated: Any = None) -> None:
        """Begin a round, in which the target verifies these draft tokens.

        Args:
            skipped: the drafter skipped it, because drafting would not have paid.
            evaluated: the nodes of the pass, draft tokens included. None for the ends of the sequences.
        """
        self.rounds += 1
        self.skipped += skipped
        if self._draft_tokens:
            self._draft_tokens = {node: at for node, at in self._draft_tokens.items() if self._tree.is_live(node)}
        if len(draft_tokens):
            self.drafted += len(draft_tokens)
            self.checks.append(0)
            for node, parent in zip(draft_tokens.tolist(), self._tree.parents(draft_tokens).tolist(), strict=True):
                at = self._draft_tokens[node] = self._draft_tokens.get(parent, -1) + 1
                if at == len(self.positions):
                    self.positions.append([0, 0])
                self.positions[at][0] += 1
        if self.trace is not None:
            self.trace.begin_round(draft_tokens, evaluated)

    def step(self, nodes: Any, scores: Any = None) -> None:
        """Record one step: the sequences now end at these nodes. A single sequence is one beam.

        Args:
            scores: of the sequences. None for the sums of their log-probabilities.
        """
        self.steps += 1
        self._accept(nodes)
        if self.trace is not None and len(nodes):
            self.trace.step(nodes, self._tree.scores(nodes) if scores is None else scores)

    def ahead(self, nodes: Nodes, scores: Any) -> None:
        """Record the known beams of a step that is not certain yet, int64 [n], and their scores, float32 [n].

        They are the step's first beams, in its order. The trace has each of them once.
        """
        self._accept(nodes)
        if self.trace is not None:
            self.trace.ahead(nodes, scores)

    def acceptance_histogram(self) -> list[int] | None:
        """How many rounds with draft tokens accepted 0 of them, 1, 2, and so on; None without such rounds."""
        return np.bincount(self.checks).tolist() if self.checks else None

    def evaluated(self, num_beams: int) -> float | None:
        """The share of the beams of all steps that the target evaluated; None without beams, or without a step."""
        return 1 - self.left_out / (num_beams * self.steps) if num_beams > 1 and self.steps else None

    def draft_note(self) -> str | None:
        """Why a drafter proposed no tokens, or hardly any; None if it was used, and before the first round."""
        if not self.rounds:
            return None
        if not self.drafted:
            if self.skipped:
                return "draft proposed no tokens: that would not have paid"
            return "draft proposed no tokens: it found no likely continuation"
        if 2 * self.skipped > self.rounds:
            return f"draft proposed no tokens in {self.skipped} of {self.rounds} passes: that would not have paid"
        return None

    def _accept(self, beams: Any) -> None:
        if self._draft_tokens:
            accepted = self._draft_tokens.keys() & {*map(int, beams)}
            self.accepted += len(accepted)
            self.checks[-1] += len(accepted)
            for node in accepted:
                self.positions[self._draft_tokens.pop(node)][1] += 1
