"""Speculative beam search: exactly what beam search returns, in fewer passes of the target."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbeam.decoding import Evaluate, Strategy
from specbeam.decoding.beam import Search
from specbeam.decoding.record import Record
from specbeam.drafting import Drafter
from specbeam.tree import NO_NODES, Nodes, Tree


def speculative_beam_search(tree: Tree, search: Search, record: Record, drafter: Drafter) -> Strategy:
    """Evaluate the beams and guesses below them in one pass, then take all steps whose logits are there.

    Every round takes at least one step, since all beams are evaluated, and no step is ever approximated: it is the
    plain search's own, which goes on without a beam only where that cannot matter (the bound rule, at
    ``BeamSearch.step``). Guesses that may still become beams keep their logits for the next round.
    """
    known = Known()
    while not search.done:
        guesses = yield from drafter.propose(search.beams, search.scores.double().numpy())
        wanted = known.missing(np.concatenate([search.beams, guesses.nodes]))
        known.add(wanted, (yield Evaluate(wanted)))
        record.round(np.setdiff1d(wanted, search.beams))
        while not search.done and search.step(*known.at(search.beams)):
            record.step(search.beams, search.scores)
        promising = known.nodes[tree.below(known.nodes, search.beams)]
        drafter.pace.learn(guesses, tree, int(search.beams[0]))
        known.keep(promising)
        tree.keep(np.concatenate([search.beams, promising]), search.finished_nodes)
        yield from search.certain()
    return search.hypotheses()


class Known:
    """Logits by node."""

    def __init__(self) -> None:
        self.nodes: Nodes = NO_NODES  # ascending
        self._logits: Tensor | None = None  # float32 [nodes, vocab]

    def missing(self, nodes: Nodes) -> Nodes:
        """Those of the nodes whose logits are not known, each once."""
        return np.setdiff1d(nodes, self.nodes)

    def add(self, nodes: Nodes, logits: Tensor) -> None:
        """Learn the logits [n, vocab] at nodes that were not known."""
        everything = np.concatenate([self.nodes, nodes])
        order = np.argsort(everything)
        self.nodes = everything[order]
        if self._logits is not None:
            logits = torch.cat([self._logits, logits])[torch.from_numpy(order).to(logits.device)]
        self._logits = logits

    def keep(self, nodes: Nodes) -> None:
        """Forget all but these, which are known."""
        assert self._logits is not None
        rows = np.searchsorted(self.nodes, nodes)
        self.nodes, self._logits = nodes, self._logits[torch.from_numpy(rows).to(self._logits.device)]

    def at(self, nodes: Nodes) -> tuple[Tensor, NDArray[np.bool_]]:
        """The logits at those of the nodes that are known, and which these are."""
        assert self._logits is not None
        known = np.isin(nodes, self.nodes)
        rows = np.searchsorted(self.nodes, nodes[known])
        return self._logits[torch.from_numpy(rows).to(self._logits.device)], known
