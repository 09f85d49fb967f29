"""Speculative decoding: a drafter guesses how the text goes on, and one pass of the target checks all guesses.

Greedy search keeps its tokens (Leviathan et al. 2023; Chen et al. 2023). So does sampling: the noise of a draw does not
depend on the guesses. A guess is right if it is the token that is drawn there anyway. See Daliri, Musco and Suresh
2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding".
"""

from __future__ import annotations

import numpy as np

from specbeam.decoding import Evaluate, Hypothesis, Strategy
from specbeam.decoding.drafter import Drafter
from specbeam.decoding.greedy import chosen, greedy, greedy_round
from specbeam.decoding.record import Record
from specbeam.decoding.stopping import Stopping
from specbeam.decoding.wishes import Wishes
from specbeam.errors import NotFinite
from specbeam.tree import Tree


def speculative(tree: Tree, wish: Wishes, stop: Stopping, record: Record, drafter: Drafter) -> Strategy:
    """Choose tokens as the plain method does, for as long as they were guessed; the answers are all there.

    Where logits are not finite, it goes on without guesses: plain decoding may never meet these logits.
    """
    while True:
        tip = tree.tip
        guesses = yield from drafter.propose(np.array([tip]), tree.scores([tip]))
        if guesses.declined:  # then the backend can go ahead
            if ended := (yield from greedy_round(tree, wish, stop, record, rests=True)):
                return ended
            for _ in range(int(tree.depths(tree.tip) - tree.depths(tip))):
                drafter.pace.learn(guesses, tree, steps=[])
            continue
        nodes = np.sort(np.array([tip, *guesses.nodes]))
        try:
            answer = yield Evaluate(nodes, wish(tree, nodes, guesses.nodes))
        except NotFinite:
            tree.keep(tip)
            return (yield from greedy(tree, wish, stop, record))
        rows = {node: row for row, node in enumerate(nodes.tolist())}
        record.round(guesses.nodes, guesses.declined, nodes)
        steps = []
        while (row := rows.get(tip)) is not None:
            tip = tree.append(tip, *chosen(answer, row))
            record.step([tip])
            steps.append(np.array([tip]))
            if reason := stop(tree, tip):
                return [Hypothesis(tip, float(tree.scores(tip)), reason)]
        drafter.pace.learn(guesses, tree, steps)
        tree.keep(tip)
