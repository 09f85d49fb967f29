"""Speculative beam search: exactly what beam search returns, in fewer passes of the target."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specbeam.decoding import Answer, Evaluate, Strategy
from specbeam.decoding.beam import Search, beam_round, beam_search
from specbeam.decoding.drafter import Drafter
from specbeam.decoding.record import Record
from specbeam.errors import NotFinite, TooManyNodes
from specbeam.selection import gather
from specbeam.tree import Nodes, Tree


def speculative_beam_search(tree: Tree, search: Search, record: Record, drafter: Drafter) -> Strategy:
    """Evaluate the beams and the guesses below them in one pass, then take every step whose answers are known.

    All beams are evaluated, so every round takes at least one step. No step is approximated: each is a step of the
    plain search. A step does without a beam only where the beam cannot matter (the bound rule of ``BeamSearch``).
    Guesses that may still become beams keep their answers for the next round. Where the memory cannot hold guesses, or
    their logits are not finite, the search goes on without them.
    """
    known = Known()
    while not search.done:
        try:
            yield from speculative_round(tree, search, record, drafter, known)
        except (TooManyNodes, NotFinite):
            tree.keep(search.beams, search.finished_nodes)
            return (yield from beam_search(tree, search, record))
    return search.hypotheses()


def speculative_round(tree: Tree, search: Search, record: Record, drafter: Drafter, known: Known) -> Strategy:
    """Evaluate all beams and guesses below them. Take every step whose answers are known."""
    guesses = yield from drafter.propose(search.beams, search.scores.astype(np.float64))
    if guesses.declined and not len(known.nodes):  # then the backend can go ahead
        rounds = record.rounds
        yield from beam_round(tree, search, record, rests=True)
        for _ in range(record.rounds - rounds):
            drafter.controller.learn(guesses, tree, steps=[])
        return []
    wanted = known.missing(np.concatenate([search.beams, guesses.nodes]))
    guessed = np.setdiff1d(wanted, search.beams)
    known.add(wanted, (yield Evaluate(wanted, search.wish(wanted, guessed), or_fewer=True)))
    record.round(guessed, guesses.declined, wanted)
    steps = []
    while not search.done:
        evaluated = known.among(search.beams)
        answer = known.at(search.beams[evaluated]) if evaluated.any() else None
        if not search.step(answer, evaluated):
            break
        record.left_out += int((~evaluated).sum())
        record.step(search.beams, search.scores)
        steps.append(search.beams)
    promising = known.nodes[tree.below(known.nodes, search.beams)]
    drafter.controller.learn(guesses, tree, steps)
    known.keep(promising, search.needs_rows)
    tree.keep(np.concatenate([search.beams, promising]), search.finished_nodes)
    yield from search.certain()
    return []


class Known:
    """Known answers, by node."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[Answer, int]] = {}  # an answer about several nodes, and the node's row there

    @property
    def nodes(self) -> Nodes:
        return np.array(sorted(self._rows), dtype=np.int64)

    def missing(self, nodes: Nodes) -> Nodes:
        """The nodes without known answers, each once, ascending."""
        return np.array(sorted({*nodes.tolist()} - self._rows.keys()), dtype=np.int64)

    def add(self, nodes: Nodes, answer: Answer) -> None:
        """Add the answer at nodes."""
        self._rows.update((node, (answer, row)) for row, node in enumerate(nodes.tolist()))

    def forget(self, nodes: Nodes) -> None:
        """Forget these nodes, whether they are known or not."""
        for node in nodes.tolist():
            self._rows.pop(node, None)

    def keep(self, nodes: Nodes, whole_rows: bool) -> None:
        """Forget all nodes but these. They must be known.

        Args:
            whole_rows: keep copies of their rows of logits, too.
        """
        self._rows = {node: self._rows[node] for node in nodes.tolist()}
        if whole_rows:
            self._rows = {node: (answer.copy(row), 0) for node, (answer, row) in self._rows.items()}

    def among(self, nodes: Nodes) -> NDArray[np.bool_]:
        """Which of the nodes have known answers, bool [n]."""
        return np.array([node in self._rows for node in nodes.tolist()], dtype=bool)

    def at(self, nodes: Nodes) -> Answer:
        """The answer at known nodes."""
        return gather([self._rows[node] for node in nodes.tolist()])
