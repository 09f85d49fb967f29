"""How much to draft: as much as recent acceptance and the measured cost of passes make worthwhile."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from specbeam.drafting import Guesses
from specbeam.options import MOST_DRAFTED
from specbeam.tree import Nodes, Tree

DEEPEST = 12
"""Tokens guessed ahead at most when that is not said."""
MOST = 128
"""Guesses a pass at most when that is not said; for many beams, eight a beam."""
MEMORY = 0.9
"""What a round's observation is worth one round later."""
PROBED, MOST_PROBED = 8, 128
"""Rounds without drafts after which a small one is tried, for costs and texts change; twice as many after each that
found nothing, up to the most."""
WORTH = 1.1
"""How much more guesses would have to bring if all of them came true, to be tried again."""
STAKE = 0.25
"""How much of that may be spent on trying."""
TRIED, FOUND, HOPED = 3.0, 2.0, 4.0
"""What is taken for seen at first, so that drafting is tried; and what is left of what was seen long ago."""

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
        unread: tokens that the draft would have to read first.
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
        unread: int = 0,
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
        self._hoped = self._came = HOPED
        self._shape = (self.widths[0], self.depths[0])
        self._unread = unread
        self._declines = False  # to draft at all, this round
        self._idle, self._wait = 0, PROBED  # rounds that it did, and how many there are to be at least
        self._probes = False  # this round

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
        self._begin()
        if not self._rests:
            self._choose()
        (width, depth), most = self._shape, self.most_nodes
        self._declines = not depth
        depth = min(depth, max(1, most // self._nodes(width, 1)))
        return min(width, most), depth

    def _choose(self) -> None:
        best, most = 0.0, self.most_nodes
        for width in self.widths:
            survival = self.survival(width)
            for depth in self.depths:
                if self._nodes(width, depth) > most and best:
                    break
                rate = self._rate(width, depth, survival)
                if rate > best:
                    best, self._shape = rate, (width, depth)
        if self._probes:
            self._shape = self.widths[0], self.depths[1]

    def _begin(self) -> None:
        """Settle whether to try again this round, after those without drafts.

        If all guesses came true, those rounds would have been shorter: a part of what they lost pays for the try.
        """
        self._probes = False
        if self._rests or self._idle < self._wait or len(self.depths) == 1:
            return
        plain, nodes = self.target(self.num_beams), self._nodes(self.widths[0], self.depths[1])
        shortest = 1 / max(self._rate(self.widths[0], depth, 1.0) for depth in self.depths[1:])
        if shortest * WORTH > plain:
            self._idle = 0
            return
        price = self.draft_seconds(self._unread + self.num_beams) + self.target(self.num_beams + nodes) - plain
        self._wait = max(self._wait, int(price / (STAKE * (plain - shortest))))
        self._probes = not self._rests

    def _rate(self, width: int, depth: int, survival: float) -> float:
        """Steps a second."""
        steps = sum(survival**i for i in range(depth + 1))
        return steps / (self._drafting(width, depth) + self.target(self.num_beams + self._nodes(width, depth)))

    @property
    def _rests(self) -> bool:
        return 0 < self._idle < self._wait and len(self.depths) > 1

    def learn(self, guesses: Guesses, tree: Tree, steps: list[Nodes]) -> None:
        """Take in what became of guesses: the tips, or beams, after each step of the round."""
        if not len(guesses.nodes):
            if self._declines:  # else there was nothing to look up, or nothing likely, this time
                self._idle += 1
                self._unread += self.num_beams
                self._fade()
            return
        self._idle = self._unread = 0
        depths = tree.depths(guesses.nodes)
        drafted = int(depths.max() - depths.min()) + 1
        needed = [self._needed(guesses, depths, tree, tips) for tips in steps[:-1]]
        missed = len(needed) < drafted
        if self._probes:
            self._wait = PROBED if needed else min(2 * self._wait, MOST_PROBED)
        for width in self.widths:
            found = sum(width >= at_least for at_least in needed)
            # More guesses might have found what was missed; as like as not they would have missed it too.
            tried = len(needed) + missed * (1.0 if width <= self._shape[0] else 0.5)
            self._found[width] = MEMORY * self._found[width] + found
            self._tried[width] = MEMORY * self._tried[width] + tried
        self._hoped = MEMORY * self._hoped + float(guesses.chances.sum())
        self._came = MEMORY * self._came + len(needed)

    def _fade(self) -> None:
        """What was seen long ago counts for less, down to what was taken for seen at first."""
        for width in self.widths:
            if self._tried[width] > TRIED:
                self._found[width], self._tried[width] = MEMORY * self._found[width], MEMORY * self._tried[width]
        if self._hoped > HOPED:
            self._came, self._hoped = MEMORY * self._came, MEMORY * self._hoped

    def _needed(self, guesses: Guesses, depths: NDArray[np.int64], tree: Tree, tips: Nodes) -> int:
        """How wide guesses had to be for a step that they were found for."""
        if self.chains:
            return 1  # which chain it was is not known: the first is the likeliest
        if guesses.drawn_from:  # as many as were drawn below its parent up to it
            among = guesses.nodes[tree.parents(guesses.nodes) == tree.parents(tips[0])]
        else:  # a level of a search, the likeliest first
            among = guesses.nodes[depths == depths[np.isin(guesses.nodes, tips)].max(initial=0)]
        return 1 + int(np.flatnonzero(np.isin(among, tips)).max(initial=0))

    def _nodes(self, width: int, depth: int) -> int:
        return width * depth * (self.num_beams if self.chains else 1)

    def _drafting(self, width: int, depth: int) -> float:
        return self.draft_seconds(self.num_beams) + (depth - 1) * self.draft_seconds(width) if depth else 0.0

    # Below a single text the draft's probabilities say which guesses are worth it: their sum is the number of tokens
    # that are expected, as far as the draft can be trusted.

    def draft_seconds(self, nodes: int) -> float:
        """What a pass of the draft over so many nodes costs."""
        return self.draft(nodes) if self.draft is not None and nodes else 0.0

    def expanded(self, level: NDArray[np.float64], depth: int, chances: NDArray[np.float64], spent: float) -> int:
        """How many nodes of a level to guess below.

        Args:
            level: their chances, the likeliest first.
            depth: of the level below the tip.
            chances: those of all guesses so far.
            spent: seconds of the draft's passes so far.
        """
        if depth == 0:
            self._begin()
        nodes = 0 if self._rests else self._expanded(level, depth, chances, spent)
        if depth == 0:
            self._declines = not nodes
        return nodes

    def _expanded(self, level: NDArray[np.float64], depth: int, chances: NDArray[np.float64], spent: float) -> int:
        if depth >= self.depths[-1]:
            return 0
        if self._probes:
            return int(depth == 0)
        if self.num_draft_tokens is not None and self.draft_width is not None:
            return len(level)
        n, expected = self._best(chances, spent)
        rate = expected / (spent + self.target(1 + n))
        one_more = self.target(2 + n) - self.target(1 + n)
        nodes = 0
        for chance in level.tolist():
            cost = self.draft_seconds(nodes + 1) - self.draft_seconds(nodes) + one_more
            if self._trust * chance <= rate * cost:
                break
            nodes += 1
        return max(nodes, int(self.num_draft_tokens is not None))

    def worthwhile(self, chances: NDArray[np.float64], spent: float) -> int:
        """How many of the likeliest guesses to put to the target after so many seconds of drafting."""
        if self.draft_width is not None or self.draft_budget is not None:
            return min(len(chances), self.most_nodes)
        if self._probes:
            return min(len(chances), 1)
        return self._best(chances, spent)[0]

    def _best(self, chances: NDArray[np.float64], spent: float) -> tuple[int, float]:
        """How many guesses give the most tokens a second, and how many tokens."""
        expected = 1 + self._trust * np.cumsum(np.concatenate([[0.0], np.sort(chances)[::-1]]))
        rates = expected / [spent + self.target(1 + n) for n in range(len(expected))]
        n = int(rates.argmax())
        return n, float(expected[n])

    @property
    def _trust(self) -> float:
        return min(1.0, self._came / self._hoped)
