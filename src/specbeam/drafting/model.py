"""Draft tokens of a smaller model."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam.core.selection import Selection
from specbeam.core.strategy import Evaluate
from specbeam.core.tree import NO_NODES, Nodes, Tree
from specbeam.drafting.drafter import Proposal
from specbeam.drafting.policy import SKIPPED, DraftTokens
from specbeam.drafting.policy.controller import Controller
from specbeam.logits.selector import Selector
from specbeam.logits.stopping import Stopping

MAX_RECENT_TOKENS, RECENT_TOKENS_SHARE = 512, 0.97
"""Draft among the first token ids of the vocabulary, enough of them to contain this share of the latest tokens."""
MIN_RECENT_TOKENS = 32
"""Draft among all token ids as long as the sequence has fewer tokens than this."""
MIN_COMPARED_TOKENS = 4
"""A drawn token's probability is judged by the distance to this many tokens of the highest ranks."""
VOCAB_STEP = 4096
"""The number of token ids to draft among is a multiple of this."""


class ModelDrafter:
    """Proposes the hypotheses that the draft model's own beam search finds below the tips.

    Below one tip it proposes the nodes with the highest cumulative probability, as many as save time (EAGLE-2, Li et
    al. 2024, section 4.2). Below several beams it proposes whole levels, because a step of beam search needs all of its
    beams.

    Args:
        selector: of the request. Its processors and its noise hold for the draft model as for the target.
        vocab_size: of the target.
        context: the maximum number of tokens that the draft can read.
        special: token ids that are not text, such as the separators of chat templates.
    """

    def __init__(
        self,
        tree: Tree,
        selector: Selector,
        stop: Stopping,
        vocab_size: int,
        context: int,
        special: Collection[int],
        controller: Controller,
    ) -> None:
        self.tree = tree
        self.selector = selector
        self.stop = stop
        self.vocab_size = vocab_size
        self.context = context
        self.special = sorted(special)
        self.controller = controller
        self._eos = np.array(sorted(stop.eos_token_ids), dtype=np.int64)

    def propose(self, tips: Nodes, scores: NDArray[np.float64]) -> Proposal:
        steps = self.stop.max_length - 1 - int(self.tree.depths(tips).max())
        width, depth = self.controller.shape(len(tips), steps)
        if not depth:
            return SKIPPED
        if len(tips) == 1:
            return (yield from self._likeliest(tips, scores))
        return (yield from self._beams(tips, scores, width, depth))

    def _likeliest(self, tips: Nodes, scores: NDArray[np.float64]) -> Proposal:
        nodes, totals, level, at = NO_NODES, np.empty(0), tips, scores
        probabilities, depth, spent = np.empty(0), 0, 0.0
        controller, vocab = self.controller, self._vocab()
        while self._fits(level):
            expanded = controller.expanded(np.exp(at - scores[0]), depth, probabilities, spent)
            if not expanded:
                break
            spent += controller.draft_cost(expanded)
            level, at = level[:expanded], at[:expanded]
            level, at = yield from self._next_level(level, at, controller.tree_width, vocab, normalized=True)
            nodes, totals = np.concatenate([nodes, level]), np.concatenate([totals, at])
            probabilities = np.exp(totals - scores[0])
            depth += 1
        likeliest = np.argsort(-totals, kind="stable")[: controller.worthwhile(probabilities, spent)]
        likeliest.sort()  # parents first again: no parent is missing, because a child is never likelier than it
        return DraftTokens(nodes[likeliest], probabilities[likeliest], seconds=spent)

    def _beams(self, tips: Nodes, scores: NDArray[np.float64], width: int, depth: int) -> Proposal:
        level, first = np.unique(tips, return_index=True)
        at = scores[first]
        nodes, vocab = NO_NODES, self._vocab()
        for _ in range(depth):
            if not self._fits(level):
                break
            level, at = yield from self._next_level(level, at, width, vocab)
            nodes = np.concatenate([nodes, level])
        return DraftTokens(nodes[: self.controller.max_draft_tokens], width=width)

    def _next_level(
        self, level: Nodes, at: NDArray[np.float64], width: int, vocab: int, normalized: bool = False
    ) -> Any:
        """The likeliest continuations of a level, and their scores, the likeliest first.

        Args:
            normalized: no score may be above 0, because it is a log-probability. Beam search adds up raised scores as
                they are, so draft tokens below beams need these.
        """
        draws = self.selector.seed is not None
        request = self.selector(
            self.tree,
            level,
            draft_tokens=level,
            streams=0 if normalized else self.selector.streams(self.tree, level),
            top=min(max(width, MIN_COMPARED_TOKENS) + len(self._eos), vocab),  # EOS is no draft: nothing can follow it
            vocab=vocab,
            normalize=not (draws and normalized),
            total=normalized and self.selector.process.raises,
        )
        selection: Selection = yield Evaluate(level, request, drafting=True)
        scores = selection.scores.astype(np.float64)
        ranks = scores if selection.noise is None else scores + selection.noise
        if draws and normalized:
            scores = ranks = estimated_log_probs(ranks)
        elif selection.totals is not None:
            # without a finite total no score is finite, and nothing is to be subtracted
            scores = ranks = scores - np.nan_to_num(selection.totals, neginf=0.0)[:, None]
        usable = np.isfinite(ranks) & ~np.isin(selection.tokens, self._eos)
        ranks = np.where(usable, at[:, None] + ranks, -np.inf)
        order = np.argsort(-ranks, axis=None, kind="stable")[:width]
        likeliest = order[ranks.flat[order] > -np.inf]
        parents = level[likeliest // ranks.shape[1]]
        totals = (at[:, None] + scores).flat[likeliest]
        return self.tree.draft(parents, selection.tokens.flat[likeliest]), totals

    def _vocab(self) -> int:
        """How many of the first token ids to draft among: the draft's head then computes logits for these alone.

        Byte-pair merges are ordered by frequency, so nearly all of a text consists of the vocabulary's first tokens
        (FR-Spec, Zhao et al. 2025). The latest tokens show how many that are.
        """
        if self.selector.process.raises:  # the caller's function should see no scores masked by us
            return self.vocab_size
        recent = self.tree.tokens(self.tree.prefix[-MAX_RECENT_TOKENS:])
        recent = recent[~np.isin(recent, self.special)]
        if len(recent) < MIN_RECENT_TOKENS:
            return self.vocab_size
        highest = int(np.quantile(recent, RECENT_TOKENS_SHARE, method="higher")) + 1
        return min(-(-highest // VOCAB_STEP) * VOCAB_STEP, self.vocab_size)

    def _fits(self, level: Nodes) -> bool:
        """Whether a token below this level would still be followed by another."""
        if not len(level):
            return False
        length = int(self.tree.depths(level).max()) + 1
        return length + 1 < self.stop.max_length and length <= self.context


def estimated_log_probs(ranks: NDArray[np.float64]) -> NDArray[np.float64]:
    """Estimated log-probabilities that the target draws these tokens, from the draft's ranks with the same noise.

    The target's scores differ from the draft's. If the differences are logistic, the probability of the first of two
    tokens is a logistic function of the distance between their ranks. With more tokens that is a softmax of the ranks.
    Its sharpness depends on the models: 1.05 fits best to Qwen2.5-Coder 1.5B and 0.5B, and 1 is taken.

    Args:
        ranks: scores with noise, float64 [n, k], the highest first.
    """
    with np.errstate(invalid="ignore"):
        relative = np.where(np.isfinite(ranks), ranks - ranks[:, :1], -np.inf)
    probabilities = np.exp(relative)
    return relative - np.log(np.maximum(probabilities.sum(-1, keepdims=True), 1.0))
