"""How much to draft: as much as recent acceptance and the measured cost of passes make worthwhile."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from specbeam.drafting import Guesses
from specbeam.options import MOST_DRAFTED
from specbeam.tree import Tree

DEEPEST = 12
"""Tokens guessed ahead at most when that is not said."""
MOST = 128
"""Guesses a pass at most when that is not said; for many beams, eight a beam."""
MEMORY = 0.9
"""What a round's observation is worth one round later."""
PROBED = 16
"""Rounds without drafts after which a small one is tried: costs and texts change."""
TRIED, FOUND = 3.0, 2.0
"""What is taken for seen at first, so that drafting is tried."""

Cost = Callable[[int], float]
"""Seconds of a pass over so many nodes."""


class Pace:
    """The sizes of one request's drafts. What was asked for is fixed; the rest adapts.

    A round yields one token (or beam step) and those that guesses add, and costs the draft's passes and one of the
    target: sizes are chosen for the most tokens a second.

    Args:
        num_draft_tokens: how far to guess ahead; None adapts.
        draft_width: guesses a level below all beams; with chains, chains a beam; None adapts.
        draft_budget: the most guesses a pass; None adapts.
        num_beams: 1 for a single text.
        target, draft: the costs of passes; draft is None for lookups, which cost none. Only the ratios matter.
        chains: guesses are chains below each tip, not levels below all of them.
    """

    def __init__(
        self,
        num_draft_tokens: int | None,
        draft_width: int | None,
        draft_budget: int | None,
        num_beams: int,
        target: Cost,
        draft: Cost | None,
        chains: bool,
    ) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.draft_width = draft_width
        self.draft_budget = draft_budget
        self.num_beams = num_beams
        self.target = target
        self.draft = draft
        self.chains = chains
        b = num_beams
        adaptive = [1, 2] if chains else [1, 2, 4] if b == 1 else [b, b + (b + 1) // 2, 2 * b, 3 * b]
        self.widths = [draft_width] if draft_width is not None else adaptive
        self.depths = [num_draft_tokens] if num_draft_tokens is not None else [*range(DEEPEST + 1)]
        # Evidence, fading: steps for which there were guesses, and those of them whose tokens were among the guesses.
        self._tried = dict.fromkeys(self.widths, TRIED)
        self._found = dict.fromkeys(self.widths, FOUND)
        self._hoped = self._came = 1.0
        self._shape = (self.widths[0], self.depths[0])
        self._idle = 0  # rounds without guesses

    @property
    def most_nodes(self) -> int:
        """The most guesses a pass may have."""
        most = self._nodes(self.widths[-1], self.depths[-1])
        if self.draft_budget is not None:
            return min(most, self.draft_budget)
        fixed = len(self.widths) == len(self.depths) == 1
        return min(most, MOST_DRAFTED["draft_budget"] if fixed else max(MOST, 8 * self.num_beams))

    @property
    def most_drafted(self) -> int:
        """The most nodes a draft model may come to evaluate for a round, some of which may not become guesses."""
        return self.widths[-1] * self.depths[-1]

    def survival(self, width: int) -> float:
        """The share of steps that found their tokens among guesses so wide, lately."""
        return self._found[width] / self._tried[width]

    def shape(self) -> tuple[int, int]:
        """Width and depth that promise the most steps a second, if every step survives like those before."""
        best, most = 0.0, self.most_nodes
        for width in self.widths:
            survival = self.survival(width)
            for depth in self.depths:
                nodes = self._nodes(width, depth)
                if nodes > most and best:
                    break
                steps = sum(survival**i for i in range(depth + 1))
                rate = steps / (self._drafting(width, depth) + self.target(self.num_beams + nodes))
                if rate > best:
                    best, self._shape = rate, (width, depth)
        if self._probes:
            self._shape = self.widths[0], self.depths[1]
        width, depth = self._shape
        depth = min(depth, max(1, most // self._nodes(width, 1)))
        return min(width, most), depth

    @property
    def _probes(self) -> bool:
        return self._idle >= PROBED and len(self.depths) > 1

    def learn(self, guesses: Guesses, tree: Tree, tip: int) -> None:
        """Take in how a round ended: the text, or the beams, are now as long as the text that ends at this tip."""
        if not len(guesses.nodes):  # what was seen before grows stale, until drafting is worth a try again
            for width in self.widths:
                self._found[width] = MEMORY * self._found[width] + (1 - MEMORY) * FOUND
                self._tried[width] = MEMORY * self._tried[width] + (1 - MEMORY) * TRIED
            self._idle += 1
            return
        self._idle = 0
        depths = tree.depths(guesses.nodes)
        above = int(depths.min()) - 1
        drafted = int(depths.max()) - above
        found = min(int(tree.depths(tip)) - above - 1, drafted)
        missed = found < drafted
        for width in self.widths:
            # What was found among fewer guesses is found among more, and what was missed among more is missed among
            # fewer.
            found_here, missed_here = found * (width >= self._shape[0]), missed * (width <= self._shape[0])
            if found_here or missed_here:
                self._found[width] = MEMORY * self._found[width] + found_here
                self._tried[width] = MEMORY * self._tried[width] + found_here + missed_here
        self._hoped = MEMORY * self._hoped + float(guesses.chances.sum())
        self._came = MEMORY * self._came + found

    def _nodes(self, width: int, depth: int) -> int:
        return width * depth * (self.num_beams if self.chains else 1)

    def _drafting(self, width: int, depth: int) -> float:
        if self.draft is None or not depth:
            return 0.0
        return self.draft(self.num_beams) + (depth - 1) * self.draft(width)

    # Below a single text the draft's probabilities say which guesses are worth it: their sum is the number of tokens
    # that are expected, as far as the draft can be trusted.

    def goes_deeper(self, depth: int, chances: NDArray[np.float64], level: NDArray[np.float64]) -> bool:
        """Whether to draft a level below this one, with these chances, after so many levels and guesses with those."""
        if self.num_draft_tokens is not None or depth >= DEEPEST:
            return depth < self.depths[-1]
        if self._probes:
            return depth == 0
        spent = self._drafting(self.widths[-1], depth)
        n, expected = self._best(chances, spent)
        gain = self._trust * float(level.max())
        cost = self._drafting(self.widths[-1], depth + 1) - spent + self.target(2 + n) - self.target(1 + n)
        return gain * (spent + self.target(1 + n)) > cost * expected

    def worthwhile(self, chances: NDArray[np.float64], depth: int) -> int:
        """How many of the likeliest guesses to put to the target after so many levels."""
        if self.draft_width is not None or self.draft_budget is not None:
            return min(len(chances), self.most_nodes)
        if self._probes:
            return min(len(chances), 1)
        return self._best(chances, self._drafting(self.widths[-1], depth))[0]

    def _best(self, chances: NDArray[np.float64], spent: float) -> tuple[int, float]:
        """How many guesses give the most tokens a second, and how many tokens."""
        expected = 1 + self._trust * np.cumsum(np.concatenate([[0.0], np.sort(chances)[::-1]]))
        rates = expected / [spent + self.target(1 + n) for n in range(len(expected))]
        n = int(rates.argmax())
        return n, float(expected[n])

    @property
    def _trust(self) -> float:
        return min(1.0, self._came / self._hoped)
