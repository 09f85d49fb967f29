"""Greedy search. Sampling shares its loop."""

from __future__ import annotations

from specbeam.core.selection import MASKED, Selection
from specbeam.core.strategy import DeadEnd, Evaluate, Hypothesis, Strategy
from specbeam.core.tree import Tree
from specbeam.logits.selector import Selector
from specbeam.logits.stopping import Stopping
from specbeam.recording.record import Record


def greedy(tree: Tree, selector: Selector, stop: Stopping, record: Record) -> Strategy:
    """Extend the tree's tip by the likeliest token until something stops it.

    If the selection requests have noise, the token with the highest score is a draw, and this is ancestral sampling.
    """
    ended: list[Hypothesis] = []
    while not ended:
        ended = yield from greedy_round(tree, selector, stop, record)
    return ended


def greedy_round(tree: Tree, selector: Selector, stop: Stopping, record: Record, skipped: bool = False) -> Strategy:
    """Append the likeliest token, and the tokens of passes that went ahead. Returns the hypothesis if it is finished.

    Args:
        skipped: a drafter skipped this round, because drafting would have saved no time.
    """
    tip = tree.tip
    ahead = selector.ahead(tree, tip, stop)
    selection = yield Evaluate([tip], selector(tree, [tip]), ahead=ahead, ends=stop.eos_token_ids)
    for row in range(len(selection.tokens)):  # the first, and those ahead
        tip = tree.append(tip, *chosen(selection, row))
        record.round(skipped=skipped)
        record.step([tip])
        if reason := stop(tree, tip):
            return [Hypothesis(tip, float(tree.scores(tip)), reason)]
    tree.keep(tip)
    return []


def chosen(selection: Selection, row: int = 0) -> tuple[int, float]:
    """The highest token of a row, and its log-probability.

    Raises:
        DeadEnd: no token was allowed. Functions may have made NaN of that.
    """
    if not selection.scores[row, 0] > MASKED:
        raise DeadEnd
    return int(selection.tokens[row, 0]), float(selection.log_probs[row, 0])
