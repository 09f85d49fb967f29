"""Greedy search. Sampling shares its loop."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from specbeam.decoding import Evaluate, Hypothesis, Strategy
from specbeam.decoding.processors import MASKED, Processors
from specbeam.decoding.record import Record
from specbeam.decoding.stopping import Stopping
from specbeam.errors import SpecbeamError
from specbeam.tree import Tree


def greedy(
    tree: Tree, process: Processors, stop: Stopping, record: Record, pick: Callable[[Tensor], int] | None = None
) -> Strategy:
    """Extend the tree's tip by the likeliest token until something stops it.

    Args:
        pick: chooses a token from processed scores [vocab]. The default is the likeliest token.
    """
    tip = tree.tip
    while True:
        logits = yield Evaluate([tip])
        (scores,) = process(tree, [tip], logits)
        token = pick(scores) if pick else int(scores.argmax())
        (tip,) = tree.add(tip, token, log_prob(logits[0], token, scores)).tolist()
        record.round()
        record.step([tip], tree.scores([tip]))
        tree.keep(tip)
        if reason := stop(tree, tip):
            return [Hypothesis(tip, float(tree.scores(tip)), reason)]


def log_prob(logits: Tensor, token: int, scores: Tensor) -> float:
    """The log-probability of a token under logits [vocab]. The token was chosen by processed scores [vocab].

    Raises:
        SpecbeamError: no token was allowed.
    """
    if scores[token] == MASKED:
        raise SpecbeamError(
            "no token is allowed where the text now ends: constraint, prefix_allowed_tokens_fn, logits_processor, "
            "bans (no_repeat_ngram_size, bad_words_ids) and min_new_tokens together leave none"
        )
    return float(logits[token] - logits.logsumexp(-1))
