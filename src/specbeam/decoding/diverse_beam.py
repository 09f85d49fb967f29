"""Diverse beam search: groups of beams that are kept apart."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any, Self

import numpy as np

from specbeam.core.selection import Selection, SelectionRequest
from specbeam.core.strategy import Hypothesis
from specbeam.core.tree import NO_NODES, Nodes
from specbeam.decoding.beam import BeamSearch
from specbeam.decoding.candidates import Mask
from specbeam.decoding.search import Search
from specbeam.decoding.setup import Setup


class DiverseBeamSearch(Search):
    """Groups of beams that take their steps one after the other, each kept off the tokens of the groups before it.

    A token loses diversity_penalty for each beam of an earlier group that chose it in the same step. The finished
    hypotheses of all groups are ranked together (Vijayakumar et al. 2018, "Diverse Beam Search", 3, with Hamming
    diversity).

    Args:
        groups: the groups' searches over one tree, all with the same number of beams.
    """

    def __init__(self, groups: list[BeamSearch], diversity_penalty: float) -> None:
        self.tree = groups[0].tree
        self.groups = groups
        self.diversity_penalty = diversity_penalty
        self.needs_rows = False
        self.reported = False
        self._live = groups
        self._follow_groups()

    @classmethod
    def of(cls, setup: Setup) -> Self:
        """The search that a request's options ask for."""
        groups, size = setup.options.num_beam_groups, setup.options.num_beams // setup.options.num_beam_groups
        searches = [BeamSearch.of(setup, num_beams=size, bounded=False) for _ in range(groups)]
        return cls(searches, setup.options.diversity_penalty)

    def _follow_groups(self) -> None:
        """Have the beams of the groups that go on. When all are done: of the groups that took the last step."""
        self._live = [group for group in self.groups if not group.done] or self._live
        self.done = all(group.done for group in self.groups)
        self.beams = np.concatenate([group.beams for group in self._live])
        self.scores = np.concatenate([group.scores for group in self._live])
        self.length = self._live[0].length

    def selection_request(self, nodes: Nodes, draft_tokens: Any = ()) -> SelectionRequest:
        """As of one group, and a candidate more for each beam: as many tokens may be lowered among the highest."""
        request = self.groups[0].selection_request(nodes, draft_tokens)
        return replace(request, top=request.top + len(self.groups) * self.groups[0].num_beams)

    def step(self, selection: Selection | None, known: Mask | None = None) -> bool:
        if selection is None or (known is not None and not known.all()):
            return False
        chosen: Nodes = NO_NODES
        parts = np.split(np.arange(len(selection.tokens)), len(self._live))
        for group, rows in zip(self._live, parts, strict=True):
            group.step(self._lowered(selection.take(rows), chosen, group.num_candidates))
            chosen = np.concatenate([chosen, group.tree.tokens(group.beams)])
        self._follow_groups()
        return True

    def _lowered(self, selection: Selection, chosen: Nodes, count: int) -> Selection:
        """The highest tokens of each row, by how many, once the scores of chosen tokens are lowered."""
        times_chosen = np.bincount(chosen, minlength=int(selection.tokens.max(initial=0)) + 1).astype(np.float32)
        scores = selection.scores - (np.float32(self.diversity_penalty) * times_chosen)[selection.tokens]
        order = np.where(np.isnan(scores), -np.inf, -scores)  # a function's NaN stays where it is found
        best = np.lexsort((selection.tokens, order), axis=-1)[:, :count]
        tokens, scores, log_probs = (
            np.take_along_axis(of_all, best, -1) for of_all in (selection.tokens, scores, selection.log_probs)
        )
        return replace(selection, tokens=tokens, scores=scores, log_probs=log_probs)

    @property
    def finished_nodes(self) -> Nodes:
        return np.concatenate([group.finished_nodes for group in self.groups])

    def certain(self) -> Iterator[Hypothesis]:
        if self.done and not self.reported:
            self.reported = True
            yield from self.hypotheses()

    def hypotheses(self) -> list[Hypothesis]:
        found = sorted((h for group in self.groups for h in group.hypotheses()), key=lambda h: -h.score)
        best: dict[Hashable, Hypothesis] = {}
        for hypothesis in found:
            best.setdefault(self.groups[0].text(hypothesis.node), hypothesis)
        return [*best.values()][: self.groups[0].num_return_sequences]
