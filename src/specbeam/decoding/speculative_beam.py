"""Speculative beam search: exactly what beam search returns, in fewer passes of the target."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbeam.decoding import Evaluate, Strategy
from specbeam.decoding.beam import Search
from specbeam.decoding.drafter import Drafter
from specbeam.decoding.record import Record
from specbeam.tree import Nodes, Tree


def speculative_beam_search(tree: Tree, search: Search, record: Record, drafter: Drafter) -> Strategy:
    """Evaluate the beams and the guesses below them in one pass, then take every step whose logits are known.

    All beams are evaluated, so every round takes at least one step. No step is approximated: each is a step of the
    plain search. A step does without a beam only where the beam cannot matter (the bound rule of ``BeamSearch``).
    Guesses that may still become beams keep their logits for the next round.
    """
    known = Known()
    while not search.done:
        guesses = yield from drafter.propose(search.beams, search.scores.double().numpy())
        wanted = known.missing(np.concatenate([search.beams, guesses.nodes]))
        known.add(wanted, (yield Evaluate(wanted)))
        record.round(np.setdiff1d(wanted, search.beams), rests=guesses.declined)
        steps = []
        while not search.done and search.step(*known.at(search.beams)):
            record.step(search.beams, search.scores)
            steps.append(search.beams)
        promising = known.nodes[tree.below(known.nodes, search.beams)]
        drafter.pace.learn(guesses, tree, steps)
        known.keep(promising)
        tree.keep(np.concatenate([search.beams, promising]), search.finished_nodes)
        yield from search.certain()
    return search.hypotheses()


class Known:
    """Known logits, by node."""

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}  # each float32 [vocab]

    @property
    def nodes(self) -> Nodes:
        return np.array(sorted(self._rows), dtype=np.int64)

    def missing(self, nodes: Nodes) -> Nodes:
        """The nodes without known logits, each once, ascending."""
        return np.setdiff1d(nodes, self.nodes)

    def add(self, nodes: Nodes, logits: Tensor) -> None:
        """Add the logits [n, vocab] at nodes."""
        self._rows.update(zip(nodes.tolist(), logits, strict=True))

    def keep(self, nodes: Nodes) -> None:
        """Forget all nodes but these. They must be known."""
        self._rows = {node: self._rows[node] for node in nodes.tolist()}

    def at(self, nodes: Nodes) -> tuple[Tensor, NDArray[np.bool_]]:
        """The known logits at the nodes, float32 [k, vocab], and which nodes these are, bool [n]."""
        rows = [self._rows.get(node) for node in nodes.tolist()]
        known = [row for row in rows if row is not None]
        return torch.stack(known) if known else torch.empty(0), np.array([row is not None for row in rows])
