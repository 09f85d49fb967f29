"""The record of a strategy's rounds: counts for the statistics, and the trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from specbeam.tree import NO_NODES, Nodes, Tree


class Record:
    """Always counts. Remembers the rounds only for a trace.

    Attributes:
        steps: tokens added to a text, or steps of beam search.
        drafted: guesses that the target checked.
        accepted: guesses that became part of the text, or a beam.
        rounds: passes of the target that the strategy waited for.
        rested: rounds without guesses because none would have paid.
        checks: for each round with guesses, how many were accepted in it.
    """

    def __init__(self, tree: Tree, trace: bool = False) -> None:
        self.steps = self.drafted = self.accepted = self.rounds = self.rested = 0
        self.checks: list[int] = []
        self._tree = tree
        self._guesses: set[int] = set()  # guesses that may still be accepted
        self._rounds: list[tuple[Nodes, list[list[tuple[int, float]]]]] | None = [] if trace else None

    def round(self, guesses: Nodes = NO_NODES, rests: bool = False) -> None:
        """Begin a round, in which the target checks these guesses.

        Args:
            rests: the drafter made no guesses, because none would have paid.
        """
        self.rounds += 1
        self.rested += rests
        if self._guesses:
            self._guesses = {node for node in self._guesses if self._tree.is_live(node)}
        if len(guesses):
            self.drafted += len(guesses)
            self.checks.append(0)
            self._guesses.update(guesses.tolist())
        if self._rounds is not None:
            self._rounds.append((guesses, []))

    def step(self, nodes: Any, scores: Any = None) -> None:
        """Record one step: the texts now end at these nodes. A single text is one beam.

        Args:
            scores: of the texts. None for the sums of their log-probabilities.
        """
        self.steps += 1
        if self._guesses:
            accepted = self._guesses.intersection(map(int, nodes))
            self.accepted += len(accepted)
            self.checks[-1] += len(accepted)
            self._guesses -= accepted
        if self._rounds is not None:
            scores = self._tree.scores(nodes) if scores is None else scores
            self._rounds[-1][1].append([*zip(map(int, nodes), map(float, scores), strict=True)])

    def acceptance_histogram(self) -> list[int] | None:
        """How many rounds with guesses accepted 0 of them, 1, 2, and so on; None without such rounds."""
        return np.bincount(self.checks).tolist() if self.checks else None

    def draft_note(self) -> str | None:
        """Why a drafter was not used, or hardly used; None if it was used, and before the first round."""
        if not self.rounds:
            return None
        if not self.drafted:
            if self.rested:
                return "draft rested: it would not have paid"
            return "draft made no guess: it found no likely continuation"
        if 2 * self.rested > self.rounds:
            return f"draft rested in {self.rested} of {self.rounds} rounds: it would not have paid"
        return None

    def trace(self, decode: Callable[[list[int]], str]) -> list[dict[str, Any]] | None:
        """The rounds as plain data (see :class:`specbeam.Result`); None if they were not remembered."""
        if self._rounds is None:
            return None
        tree = self._tree

        def token(node: int) -> dict[str, Any]:
            token = int(tree.tokens(node))
            return {"token_id": token, "text": decode([token])}

        guesses = {node for drafted, _ in self._rounds for node in drafted.tolist()}
        accepted = guesses & {node for _, steps in self._rounds for step in steps for node, _ in step}
        ends = {tree.prompt_length - 1: 0}  # the number of the beam that ends at a node
        rounds = []
        for drafted, steps in self._rounds:
            number = {node: i for i, node in enumerate(drafted.tolist())}
            entry: dict[str, Any] = {"drafted": [], "steps": []}
            for node in number:
                parent = int(tree.parents(node))
                place = {"parent": number.get(parent), "beam": ends.get(parent)}
                entry["drafted"].append({**token(node), **place, "accepted": node in accepted})
            for step in steps:
                beams = []
                for node, score in step:
                    beam = ends.get(int(tree.parents(node)))
                    beams.append({**token(node), "beam": beam, "drafted": node in guesses, "score": score})
                entry["steps"].append(beams)
                ends = {node: i for i, (node, _) in reversed([*enumerate(step)])}
            rounds.append(entry)
        return rounds
