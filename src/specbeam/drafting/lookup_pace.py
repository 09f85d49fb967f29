"""How far to guess from a lookup, which finds the end of the text where it stood before.

The longer this end is, the likelier the same token follows again. A right guess makes it one token longer. So the
shares of right guesses by length, as seen lately, give the chances of a whole chain.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specbeam.drafting import DECLINED, Guesses
from specbeam.drafting.evidence import EVIDENCE_DECAY, FORGOTTEN, PRIOR_STEPS
from specbeam.drafting.sizes import Cost, Shape, Sizes
from specbeam.tree import Nodes, Tree

MATCH_LENGTHS = (1, 2, 3, 4, 8)
"""Matches are counted together from each of these lengths to the next one, in tokens."""
PRIOR_CHANCES = (0.2, 0.45, 0.65, 0.75, 0.9)
"""By these lengths, assume at first that such a share of guesses below a single text is right."""
PRIOR_CHECKS = 4.0
"""The weight of this assumption, in checked guesses."""
TYPICAL_MATCH_TOKENS = 2
"""Before the first round, expect a match of this length."""
MIN_GAIN = 1.05
"""Guess only if that promises this many times as many steps per second."""


class LookupPace:
    """The sizes of one request's drafts from lookups, round by round.

    A round goes: ``shape``, perhaps ``no_guesses``, then ``learn``.

    Args:
        sizes: the sizes that drafts may have.
        plain: the cost of a pass without guesses, where the backend goes ahead if it can.
    """

    def __init__(self, sizes: Sizes, plain: Cost) -> None:
        self.sizes = sizes
        self._plain = plain
        self._prior = np.array(PRIOR_CHANCES) ** sizes.num_beams  # a step of beam search chooses a token for each beam
        self._chances = self._prior.copy()
        self._checks = np.full(len(MATCH_LENGTHS), PRIOR_CHECKS)
        self._seconds = self._steps = 0.0  # of the latest rounds that did not rest
        self._matched = 0  # tokens at the end of the best text that stood before, in this round

    @property
    def most_guesses(self) -> int:
        """The largest number of guesses per pass of the target."""
        return self.sizes.most_guesses

    @property
    def most_drafted(self) -> int:
        """Lookups evaluate no nodes."""
        return 0

    @property
    def most_drafted_at_once(self) -> int:
        """Lookups need no logits."""
        return 0

    def shape(self, matched: int) -> Shape:
        """Width and depth of this round's chains. A depth of 0 is no draft.

        Args:
            matched: the number of tokens at the end of the best text that stood before.
        """
        width, depth = self.sizes.widths[0], 0
        if self.sizes.depths[0]:
            width, depth = self.sizes.within_budget(width, self.sizes.depths[0])
        elif matched:
            depth = self._best_depth(matched)
        self._matched = matched
        return width, depth

    def chances(self, depth: int) -> NDArray[np.float64]:
        """The chances that this round's guesses become part of the text, by level, float64 [depth]."""
        return self._surviving(self._matched, depth)

    def no_guesses(self) -> Guesses:
        """No guesses. The backend may go ahead, unless the latest rounds show that lookups are worth their time."""
        lookups_pay = self._seconds < self._steps * self._plain(self.sizes.num_beams)
        return Guesses() if lookups_pay else DECLINED

    def seconds_per_step(self, steps: int) -> float:
        """Expected seconds per step of a round with lookups."""
        depth = self._best_depth(TYPICAL_MATCH_TOKENS)
        of_step = self._cost(depth) / (1 + self._surviving(TYPICAL_MATCH_TOKENS, depth).sum())
        return float((self._seconds + PRIOR_STEPS * of_step) / (self._steps + PRIOR_STEPS))

    def forget(self) -> None:
        """Take in a step without guesses: the evidence loses weight."""
        self._chances += (1 - FORGOTTEN) * (self._prior - self._chances)
        self._checks += (1 - FORGOTTEN) * (PRIOR_CHECKS - self._checks)
        self._seconds *= FORGOTTEN
        self._steps *= FORGOTTEN

    def learn(self, guesses: Guesses, tree: Tree, steps: list[Nodes]) -> None:
        """Learn which guesses were right, from the tips or the beams after each step of the round."""
        if guesses.declined:
            self.forget()
            return
        seconds = self.sizes.target_cost(self.sizes.num_beams + len(guesses.nodes))
        self._seconds = EVIDENCE_DECAY * self._seconds + seconds
        self._steps = EVIDENCE_DECAY * self._steps + max(1, len(steps))
        if len(guesses.nodes):
            depths = tree.depths(guesses.nodes)
            levels, right = int(depths.max() - depths.min()) + 1, max(0, len(steps) - 1)
            for level, kind in enumerate(_kinds(self._matched, min(levels, right + 1)).tolist()):
                self._checks[kind] = EVIDENCE_DECAY * self._checks[kind] + 1
                self._chances[kind] += ((level < right) - self._chances[kind]) / self._checks[kind]

    def _best_depth(self, matched: int) -> int:
        """The depth that promises the most steps per second, if that is more than without guesses."""
        best_rate, best, steps = MIN_GAIN / self._plain(self.sizes.num_beams), 0, 1.0
        most = self.sizes.most_guesses // self.sizes.guesses(self.sizes.widths[0], 1)
        for depth, chance in enumerate(self._surviving(matched, min(self.sizes.depths[-1], most)).tolist(), 1):
            steps += chance
            if (rate := steps / self._cost(depth)) > best_rate:
                best_rate, best = rate, depth
        return best

    def _surviving(self, matched: int, depth: int) -> NDArray[np.float64]:
        """The chances that all guesses down to each level are right, float64 [depth]."""
        return np.cumprod(self._chances[_kinds(matched, depth)])

    def _cost(self, depth: int) -> float:
        return self.sizes.target_cost(self.sizes.num_beams + self.sizes.guesses(self.sizes.widths[0], depth))


def _kinds(matched: int, depth: int) -> NDArray[np.int64]:
    """The places in ``MATCH_LENGTHS`` of the matches before each guess of a chain, int64 [depth]."""
    return np.searchsorted(MATCH_LENGTHS, np.arange(depth) + max(1, matched), side="right") - 1
