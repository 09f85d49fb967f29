"""What the loop of beam search needs: a search that takes steps, and the selections that are known."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam.core.selection import Selection, SelectionRequest, gather
from specbeam.core.strategy import Evaluate, Hypothesis
from specbeam.core.tree import NO_NODES, Nodes, Tree
from specbeam.decoding.candidates import Mask, Scores


class Known:
    """Known selections, by node."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[Selection, int]] = {}  # a selection at several nodes, and the node's row there

    @property
    def nodes(self) -> Nodes:
        return np.array(sorted(self._rows), dtype=np.int64)

    def missing(self, nodes: Nodes) -> Nodes:
        """The nodes without known selections, each once, ascending."""
        return np.array(sorted({*nodes.tolist()} - self._rows.keys()), dtype=np.int64)

    def add(self, nodes: Nodes, selection: Selection) -> None:
        self._rows.update((node, (selection, row)) for row, node in enumerate(nodes.tolist()))

    def forget(self, nodes: Nodes) -> None:
        """Drop these nodes, whether they are known or not."""
        for node in nodes.tolist():
            self._rows.pop(node, None)

    def keep(self, nodes: Nodes, with_logits: bool) -> None:
        """Drop all nodes but these. They must be known.

        Args:
            with_logits: keep copies of their rows of logits, too.
        """
        self._rows = {node: self._rows[node] for node in nodes.tolist()}
        if with_logits:
            self._rows = {node: (selection.copy(row), 0) for node, (selection, row) in self._rows.items()}

    def among(self, nodes: Nodes) -> NDArray[np.bool_]:
        """Which of the nodes have known selections, bool [n]."""
        return np.array([node in self._rows for node in nodes.tolist()], dtype=bool)

    def at(self, nodes: Nodes) -> Selection:
        """The selection at known nodes."""
        return gather([self._rows[node] for node in nodes.tolist()])


@dataclass
class Step:
    """The beams after a step, as far as they are known.

    Attributes:
        length: of the beams, in new tokens.
        beams: the ends of the unfinished hypotheses, int64 [b].
        scores: the log-probabilities of the beams, float32 [b].
    """

    length: int
    beams: Nodes
    scores: Scores


class Search(ABC):
    """A search by beams between two steps.

    Attributes:
        tree: of the request.
        length, beams, scores: of the latest :class:`Step`.
        done: no step can change the outcome any more.
        needs_rows: every step needs whole rows of logits.
        left_out: beams of steps that were taken without them.
        levels: steps that are known in part, if the search defers beams. The first one is known as a whole.
    """

    tree: Tree
    length: int
    beams: Nodes
    scores: Scores
    done: bool
    needs_rows: bool
    left_out = 0
    levels: Sequence[Step] = ()

    @abstractmethod
    def selection_request(self, nodes: Nodes, draft_tokens: Any = ()) -> SelectionRequest:
        """The request of a step at beams, or at draft tokens that may become beams, int64 [n]."""

    def evaluation(self) -> Evaluate:
        """All beams, and how the search goes on by itself, if it can."""
        return Evaluate(self.beams, self.selection_request(self.beams))

    @abstractmethod
    def step(self, selection: Selection | None, known: Mask | None = None) -> bool:
        """Replace the beams by continuations of beams.

        Args:
            selection: at the known beams; None if no beam is known.
            known: which beams are known, bool [b]; None means all.

        Returns:
            False if the outcome depends on a beam that is not known. The search is then as it was.
        """

    def advance(self, known: Known, new: Nodes) -> Sequence[Step]:
        """Take every step that the known selections decide, and return these steps.

        Args:
            new: the nodes whose selections became known.
        """
        steps = []
        while not self.done:
            evaluated = known.among(self.beams)
            selection = known.at(self.beams[evaluated]) if evaluated.any() else None
            if not self.step(selection, evaluated):
                break
            self.left_out += int((~evaluated).sum())
            steps.append(Step(self.length, self.beams, self.scores))
        return steps

    @property
    def growing(self) -> Nodes:
        """The nodes below which sequences may grow."""
        return self.beams

    @property
    def settled(self) -> Nodes:
        """Evaluated beams that do not matter any more."""
        return NO_NODES

    @property
    @abstractmethod
    def finished_nodes(self) -> Nodes:
        """The ends of the finished hypotheses that are kept, int64 [n]."""

    @abstractmethod
    def certain(self) -> Iterator[Hypothesis]:
        """The next best finished hypotheses that became final since the last call."""

    @abstractmethod
    def hypotheses(self) -> list[Hypothesis]:
        """The finished hypotheses to return, best first."""
