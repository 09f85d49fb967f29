"""How often guesses were accepted lately: the evidence by which sizes of drafts are chosen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbeam.drafting import Guesses
from specbeam.tree import Nodes, Tree

EVIDENCE_DECAY = 0.9
"""The weight of a round's observations is multiplied by this after every later round."""
FORGOTTEN = 0.98
"""A step without drafts leaves this share of the difference between evidence and first assumptions."""
PRIOR_STEPS, PRIOR_FOUND_STEPS = 3.0, 2.0
"""Before the first observation, assume this many steps, and that this many of them were found among the guesses."""
PRIOR_EXPECTED_TOKENS = 4.0
"""Before the first observation, assume that the draft expected this many tokens, and that all of them came."""


class Evidence:
    """How often guesses were accepted lately. Recent rounds count most.

    Two things are counted. For each width: the steps for which there were guesses, and how many of these steps chose
    among the guesses. For the draft's own probabilities: the tokens that it expected, and the tokens that came.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self._steps = dict.fromkeys(widths, PRIOR_STEPS)
        self._found_steps = dict.fromkeys(widths, PRIOR_FOUND_STEPS)
        self._expected_tokens = self._accepted_tokens = PRIOR_EXPECTED_TOKENS

    def survival(self, width: int) -> float:
        """The share of steps that chose among guesses of this width."""
        return self._found_steps[width] / self._steps[width]

    @property
    def trust(self) -> float:
        """The factor, at most 1, from the draft's probabilities to the observed shares."""
        return min(1.0, self._accepted_tokens / self._expected_tokens)

    def add(self, needed_widths: Sequence[int], drafted_width: int, missed: bool, expected_tokens: float) -> None:
        """Count one round with guesses.

        Args:
            needed_widths: for each step that chose among the guesses, the width that was needed.
            drafted_width: the width of the guesses.
            missed: a step then found nothing among guesses that were there for it.
            expected_tokens: the sum of the guesses' probabilities by the draft.
        """
        for width in self._steps:
            found = sum(width >= needed for needed in needed_widths)
            # Wider guesses might have contained the missed token. It is as likely that they would not.
            steps = len(needed_widths) + missed * (1.0 if width <= drafted_width else 0.5)
            self._found_steps[width] = EVIDENCE_DECAY * self._found_steps[width] + found
            self._steps[width] = EVIDENCE_DECAY * self._steps[width] + steps
        self._expected_tokens = EVIDENCE_DECAY * self._expected_tokens + expected_tokens
        self._accepted_tokens = EVIDENCE_DECAY * self._accepted_tokens + len(needed_widths)

    def forget(self) -> None:
        """Take in a step without drafts: evidence comes nearer to the first assumptions."""
        for width in self._steps:
            self._steps[width] += (1 - FORGOTTEN) * (PRIOR_STEPS - self._steps[width])
            self._found_steps[width] += (1 - FORGOTTEN) * (PRIOR_FOUND_STEPS - self._found_steps[width])
        self._expected_tokens += (1 - FORGOTTEN) * (PRIOR_EXPECTED_TOKENS - self._expected_tokens)
        self._accepted_tokens += (1 - FORGOTTEN) * (PRIOR_EXPECTED_TOKENS - self._accepted_tokens)

    def fade(self) -> None:
        """Count one round without guesses: evidence loses weight, down to the weight assumed at first."""
        for width in self._steps:
            if self._steps[width] > PRIOR_STEPS:
                self._found_steps[width] *= EVIDENCE_DECAY
                self._steps[width] *= EVIDENCE_DECAY
        if self._expected_tokens > PRIOR_EXPECTED_TOKENS:
            self._accepted_tokens *= EVIDENCE_DECAY
            self._expected_tokens *= EVIDENCE_DECAY


def needed_width(guesses: Guesses, tree: Tree, tips: Nodes, chains: bool) -> int:
    """How wide the guesses had to be to contain these tips, the text's end or the beams after a step."""
    if chains:
        return 1  # it is not known which chain was accepted: the first is the likeliest
    depths = tree.depths(guesses.nodes)  # the levels of the draft's search, each the likeliest first
    among = guesses.nodes[depths == depths[np.isin(guesses.nodes, tips)].max(initial=0)]
    return 1 + int(np.flatnonzero(np.isin(among, tips)).max(initial=0))
