"""How much to draft: as much as recent acceptance and the measured cost of passes make worthwhile."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from specbeam.drafting import Guesses
from specbeam.drafting.evidence import EVIDENCE_DECAY, FORGOTTEN, PRIOR_STEPS, Evidence, needed_width
from specbeam.drafting.retry import Phase, RetryPolicy
from specbeam.drafting.sizes import Shape, Sizes
from specbeam.tree import Nodes, Tree


class Pace:
    """The sizes of one request's drafts, round by round.

    A round goes: ``begin_round``, then either ``shape`` (levels or chains of one width) or ``expanded`` and
    ``worthwhile`` (a tree below a single text), then ``learn``. Only the first and the last change anything.

    Args:
        sizes: the sizes that drafts may have.
        unread: tokens that the draft has to read before its first guess.
    """

    def __init__(self, sizes: Sizes, unread: int = 0) -> None:
        self.sizes = sizes
        self.evidence = Evidence(sizes.widths)
        self.retry = RetryPolicy()
        self._unread = unread
        self._seconds = self._steps = 0.0  # of the latest rounds

    @property
    def most_guesses(self) -> int:
        """The largest number of guesses per pass of the target."""
        return self.sizes.most_guesses

    @property
    def most_drafted(self) -> int:
        """The largest number of nodes that a draft model evaluates per round. Some may not become guesses."""
        return self.sizes.most_drafted

    @property
    def most_drafted_at_once(self) -> int:
        """The largest number of nodes at which a pass of a draft model needs logits."""
        return self.sizes.most_drafted_at_once

    def begin_round(self) -> None:
        """Choose whether this round drafts, rests or probes."""
        if self.retry.is_due:
            sizes = self.sizes
            self.retry.consider(sizes.plain_cost(), sizes.best_cost(), sizes.probe_cost(self._unread))

    def shape(self, steps: float = math.inf) -> Shape:
        """Width and depth of this round's draft. A depth of 0 is no draft.

        Args:
            steps: how many are to come. They share the seconds in which the draft reads what it has not read.
        """
        if self.retry.phase is Phase.RESTING:
            return self.sizes.none
        if self.retry.phase is Phase.PROBING:
            return self.sizes.smallest
        return self.sizes.best(self.evidence.survival, self.sizes.draft_cost(self._unread) / steps)

    def chances(self, depth: int) -> NDArray[np.float64]:
        """The chances that guesses in chains become part of the text, by level, float64 [depth]."""
        return np.power(self.evidence.survival(self.sizes.widths[0]), np.arange(1, depth + 1), dtype=np.float64)

    def expanded(self, level: NDArray[np.float64], depth: int, chances: NDArray[np.float64], spent: float) -> int:
        """How many nodes of a level to guess below.

        Args:
            level: the nodes' probabilities by the draft, the likeliest first, float64 [n].
            depth: of the level below the tip.
            chances: the probabilities of all guesses so far, float64 [guesses].
            spent: seconds of the draft's passes so far.
        """
        if self.retry.phase is Phase.RESTING:
            return 0
        if self.retry.phase is Phase.PROBING:
            return int(depth == 0)
        return self.sizes.expanded(level, depth, chances, spent, self.evidence.trust)

    def worthwhile(self, chances: NDArray[np.float64], spent: float) -> int:
        """How many of the likeliest guesses the target should check, after this many seconds of drafting."""
        if self.sizes.guesses_are_fixed:
            return min(len(chances), self.sizes.most_guesses)
        if self.retry.phase is Phase.PROBING:
            return min(len(chances), 1)
        return self.sizes.worthwhile(chances, spent, self.evidence.trust)

    def seconds_per_step(self, steps: int) -> float:
        """Expected seconds per step of a round with drafts: of the latest rounds, and by the survival of guesses.

        Args:
            steps: how many are to come. They share the seconds in which the draft reads what it has not read.
        """
        sizes, evidence = self.sizes, self.evidence
        of_step = sizes.expected_cost(evidence.survival) if sizes.chains else sizes.best_cost() / evidence.trust
        of_latest = (self._seconds + PRIOR_STEPS * of_step) / (self._steps + PRIOR_STEPS)
        return of_latest + sizes.draft_cost(self._unread) / steps

    def forget(self) -> None:
        """Take in a step without drafts: the evidence about drafts loses weight."""
        self.evidence.forget()
        self._seconds *= FORGOTTEN
        self._steps *= FORGOTTEN
        self._unread += 1

    def learn(self, guesses: Guesses, tree: Tree, steps: list[Nodes]) -> None:
        """Learn which guesses were accepted, from the tips or the beams after each step of the round."""
        seconds = guesses.seconds + self.sizes.target_cost(1 + len(guesses.nodes))
        self._seconds = EVIDENCE_DECAY * self._seconds + seconds
        self._steps = EVIDENCE_DECAY * self._steps + max(1, len(steps))
        if guesses.declined:
            self.retry.rest()
            self.evidence.fade()
            self._unread += self.sizes.num_beams
        if not len(guesses.nodes):
            return  # a lookup found nothing, or nothing was likely: that says nothing about the next round
        depths = tree.depths(guesses.nodes)
        drafted_depth = int(depths.max() - depths.min()) + 1
        needed_widths = [needed_width(guesses, tree, tips, self.sizes.chains) for tips in steps[:-1]]
        missed = len(needed_widths) < drafted_depth
        width = max(guesses.width, self.sizes.widths[0])  # a budget may allow less than the narrowest width counted
        self.evidence.add(needed_widths, width, missed, float(guesses.chances.sum()))
        self.retry.drafted(accepted=bool(needed_widths))
        self._unread = 0
