"""Guesses of a smaller model."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbeam.decoding import Evaluate
from specbeam.decoding.processors import MASKED, Processors, Warpers
from specbeam.decoding.sampling import gumbel
from specbeam.decoding.stopping import Stopping
from specbeam.decoding.top import top
from specbeam.drafting import DECLINED, Guesses, Proposal
from specbeam.drafting.pace import Pace
from specbeam.tree import NO_NODES, Nodes, Tree

MAX_RECENT_TOKENS, RECENT_TOKENS_SHARE = 512, 0.97
"""Guess among the first token ids of the vocabulary, enough of them to contain this share of the latest tokens."""
MIN_RECENT_TOKENS = 32
"""Guess among all token ids as long as the text has fewer tokens than this."""
VOCAB_STEP = 4096
"""The number of token ids to guess among is a multiple of this."""


class ModelDrafter:
    """Guesses the texts that the draft model's own beam search finds below the tips.

    Below one tip it guesses the nodes with the highest cumulative probability, as many as pay (EAGLE-2, Li et al.
    2024, section 4.2). Below several beams the guesses are whole levels, because a step of beam search needs all
    of its beams.

    Args:
        process: the request's processors. They hold for the draft as for the target.
        vocab_size: of the target.
        context: the most tokens that the draft can read.
        special: token ids that are not text, such as the separators of chat templates.
        draws: for sampling, the warpers of the draft's distribution and the generator of its draws. Guesses are then
            drawn. How many are drawn below a node never depends on a later draw.
    """

    def __init__(
        self,
        tree: Tree,
        process: Processors,
        stop: Stopping,
        vocab_size: int,
        context: int,
        special: Collection[int],
        pace: Pace,
        draws: tuple[Warpers, torch.Generator] | None = None,
    ) -> None:
        self.tree = tree
        self.process = process
        self.stop = stop
        self.vocab_size = vocab_size
        self.context = context
        self.special = sorted(special)
        self.pace = pace
        self.draws = draws
        self._eos = sorted(stop.eos_token_ids)

    def propose(self, tips: Nodes, scores: NDArray[np.float64]) -> Proposal:
        self.pace.begin_round()
        if self.draws is not None:
            return (yield from self._draw(int(tips[0])))
        if self.pace.sizes.num_beams > 1:
            return (yield from self._beams(tips, scores))
        return (yield from self._likeliest(tips, scores))

    def _likeliest(self, tips: Nodes, scores: NDArray[np.float64]) -> Proposal:
        nodes, totals, level, at = NO_NODES, np.empty(0), tips, scores
        chances, depth, spent = np.empty(0), 0, 0.0
        sizes, vocab = self.pace.sizes, self._vocab()
        while self._has_room(level):
            expanded = self.pace.expanded(np.exp(at - scores[0]), depth, chances, spent)
            if not expanded:
                if not depth:
                    return DECLINED
                break
            spent += sizes.draft_cost(expanded)
            level, at = level[:expanded], at[:expanded]
            level, at = yield from self._next_level(level, at, sizes.widths[-1], vocab, normalized=True)
            nodes, totals = np.concatenate([nodes, level]), np.concatenate([totals, at])
            chances = np.exp(totals - scores[0])
            depth += 1
        likeliest = np.argsort(-totals, kind="stable")[: self.pace.worthwhile(chances, spent)]
        likeliest.sort()  # parents first again: no parent is missing, because a child is never likelier than it
        return Guesses(nodes[likeliest], chances[likeliest])

    def _beams(self, tips: Nodes, scores: NDArray[np.float64]) -> Proposal:
        width, depth = self.pace.shape()
        if not depth:
            return DECLINED
        level, first = np.unique(tips, return_index=True)
        at = scores[first]
        nodes, vocab = NO_NODES, self._vocab()
        for _ in range(depth):
            if not self._has_room(level):
                break
            level, at = yield from self._next_level(level, at, width, vocab)
            nodes = np.concatenate([nodes, level])
        return Guesses(nodes[: self.pace.most_guesses], width=width)

    def _next_level(
        self, level: Nodes, at: NDArray[np.float64], width: int, vocab: int, normalized: bool = False
    ) -> Any:
        """The likeliest continuations of a level, and their scores, the likeliest first.

        Args:
            normalized: no score may be above 0, because it is a chance. Beam search adds up the raised scores as they
                are, so guesses below beams need these.
        """
        log_probs = self._log_probs(level, (yield Evaluate(level, drafting=True, vocab=vocab)))
        if normalized and self.process.raises:
            log_probs = log_probs.log_softmax(-1).nan_to_num(nan=MASKED, neginf=MASKED)  # NaN where no token may follow
        # The likeliest of each node: the likeliest of the level are among them.
        values, tokens = top(log_probs, min(width, self.vocab_size))
        totals = at[:, None] + values.double().cpu().numpy()
        order = np.argsort(-totals, axis=None, kind="stable")[:width]
        likeliest = order[totals.flat[order] > -np.inf]
        parents = level[likeliest // totals.shape[1]]
        return self.tree.guess(parents, tokens.cpu().numpy().flat[likeliest]), totals.flat[likeliest]

    def _draw(self, tip: int) -> Proposal:
        assert self.draws is not None
        warp, generator = self.draws
        width, depth = self.pace.shape()
        if not depth:
            return DECLINED
        nodes, chances, drawn_from = NO_NODES, np.empty(0), {}
        level, at = np.array([tip]), np.ones(1)
        vocab = self._vocab()
        for _ in range(depth):
            if not self._has_room(level):
                break
            scores = self._scores(level, (yield Evaluate(level, drafting=True, vocab=vocab)))
            distributions = warp(scores).double().softmax(-1).nan_to_num(0.0)
            # Settle the number of children of each node before any draw. Else they would not follow the distribution.
            counts = _shares(at, width)
            below, chances_below = [], []
            for node, q, count, chance in zip(level.tolist(), distributions, counts, at.tolist(), strict=True):
                count = min(count, int((q > 0).sum()))
                if not count:
                    continue
                # Draws without replacement: the Gumbel-top-k trick (Kool et al. 2019, section 2.3).
                noise = gumbel(len(q), generator).to(q.device)
                tokens = top(q.log() + noise, count)[1]
                below.append(self.tree.guess(np.full(count, node), tokens.cpu().numpy()))
                chances_below.append(chance * q[tokens].cpu().numpy())
                drawn_from[node] = q
            if not below:
                break
            level, at = np.concatenate(below), np.concatenate(chances_below)
            nodes, chances = np.concatenate([nodes, level]), np.concatenate([chances, at])
        most = self.pace.most_guesses  # the cut, too, depends on counts alone, not on the draws
        return Guesses(nodes[:most], chances[:most], drawn_from, width=width)

    def _vocab(self) -> int:
        """How many of the first token ids to guess among: the draft's head then computes logits for these alone.

        Byte-pair merges are ordered by frequency, so nearly all of a text consists of the vocabulary's first tokens
        (FR-Spec, Zhao et al. 2025). The latest tokens show how many that are.
        """
        if self.process.raises:  # the caller's function should see no scores masked by us
            return self.vocab_size
        recent = self.tree.tokens(self.tree.trunk[-MAX_RECENT_TOKENS:])
        recent = recent[~np.isin(recent, self.special)]
        if len(recent) < MIN_RECENT_TOKENS:
            return self.vocab_size
        highest = int(np.quantile(recent, RECENT_TOKENS_SHARE, method="higher")) + 1
        return min(-(-highest // VOCAB_STEP) * VOCAB_STEP, self.vocab_size)

    def _has_room(self, level: Nodes) -> bool:
        """Whether a token below this level would still be followed by another."""
        if not len(level):
            return False
        length = int(self.tree.depths(level).max()) + 1
        return length + 1 < self.stop.max_length and length <= self.context

    def _scores(self, nodes: Nodes, logits: Tensor) -> Tensor:
        """Processed scores over the target's vocabulary. EOS is masked: nothing can follow it."""
        logits = logits[:, : self.vocab_size]
        if missing := self.vocab_size - logits.shape[-1]:
            logits = torch.nn.functional.pad(logits, (0, missing), value=MASKED)
        scores = self.process(self.tree, nodes, logits, drafting=True)
        scores = scores.clone() if scores is logits else scores
        scores[:, self._eos] = MASKED
        return scores

    def _log_probs(self, nodes: Nodes, logits: Tensor) -> Tensor:
        """Processed log-probabilities."""
        return self._scores(nodes, logits[:, : self.vocab_size].log_softmax(-1))


def _shares(chances: NDArray[np.float64], width: int) -> list[int]:
    """Split ``width`` children among nodes in proportion to their chances."""
    ideal = chances / max(chances.sum(), np.finfo(float).tiny) * width if chances.any() else np.zeros(len(chances))
    counts = np.floor(ideal).astype(int)
    for i in np.argsort(counts - ideal, kind="stable")[: width - counts.sum()]:
        counts[i] += 1
    return counts.tolist()
