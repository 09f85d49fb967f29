"""Which sizes a draft may have, and which of them promises the most tokens per second."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from specbeam.options import MAX_DRAFT_SIZES

MAX_ADAPTIVE_DEPTH = 12
"""Tokens guessed ahead, where ``num_draft_tokens`` adapts."""
MAX_ADAPTIVE_GUESSES = 128
"""Guesses per pass of the target, where sizes adapt."""
MAX_ADAPTIVE_GUESSES_PER_BEAM = 8
"""The same for many beams, if that is more."""
MIN_GAIN = 1.1
"""Draft only if that promises this many times as many steps per second. The guessing itself takes time, too."""

Cost = Callable[[int], float]
"""The cost of a pass over a number of nodes, in seconds."""

Shape = tuple[int, int]
"""Width and depth of a draft: guesses per level (with chains: chains per beam), and levels."""


class Sizes:
    """The sizes of one request's drafts. A size that was asked for is fixed, the others are chosen by cost.

    A round costs the passes of the draft and one pass of the target. It yields one token (or one step of beam search),
    and one more per accepted guess. The best sizes yield the most tokens per second.

    Args:
        num_draft_tokens: how far to guess ahead; None adapts.
        draft_width: guesses per level below all beams; with chains, chains per beam; None adapts.
        draft_budget: the most guesses per pass of the target; None adapts.
        num_beams: 1 for a single text.
        target, draft: the costs of passes; draft is None for lookups, which are free. Only the ratios matter.
        chains: guesses are chains below each tip, not levels below all of them.
        room: the most guesses whose logits fit into memory. Sizes that were asked for may have more.

    Attributes:
        widths: the allowed widths, ascending.
        depths: the allowed depths, ascending. If the depth adapts, the first is 0, which is no draft. It is the only
            one if the narrowest level does not fit into memory.
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
        room: int = MAX_DRAFT_SIZES["draft_budget"],
    ) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.draft_width = draft_width
        self.draft_budget = draft_budget
        self.num_beams = num_beams
        self.target_cost = target
        self.chains = chains
        self._draft = draft
        b = num_beams
        levels = [1, 2, 4] if b == 1 else [b, b + (b + 1) // 2, 2 * b, 3 * b]
        adaptive = [1] if draft is None else [1, 2] if chains else levels
        self.widths = adaptive if draft_width is None else [draft_width]
        self.depths = [*range(MAX_ADAPTIVE_DEPTH + 1)] if num_draft_tokens is None else [num_draft_tokens]
        self._most_adaptive = max(MAX_ADAPTIVE_GUESSES, MAX_ADAPTIVE_GUESSES_PER_BEAM * num_beams)
        if draft_budget is None:
            self._fit_into(room)

    def _fit_into(self, room: int) -> None:
        """Leave out the sizes that adapt and have more guesses than there is room for."""
        least_depth = self.num_draft_tokens or 1
        self.widths = [w for w in self.widths if self.guesses(w, least_depth) <= room] or self.widths[:1]
        if self.num_draft_tokens is None:
            deepest = room // self.guesses(self.widths[0], 1)
            self.depths = self.depths[: 1 + (deepest if self.draft_width is None else max(1, deepest))]
        self._most_adaptive = min(self._most_adaptive, max(room, self.guesses(self.widths[0], least_depth)))

    @property
    def most_guesses(self) -> int:
        """The most guesses that a pass of the target may check."""
        most = self.guesses(self.widths[-1], self.depths[-1])
        if self.draft_budget is not None:
            return min(most, self.draft_budget)
        fixed = self.num_draft_tokens is not None and self.draft_width is not None
        return min(most, MAX_DRAFT_SIZES["draft_budget"] if fixed else self._most_adaptive)

    @property
    def most_drafted(self) -> int:
        """The most nodes that a draft model may evaluate in a round. Some of them may not become guesses."""
        return self.widths[-1] * self.depths[-1]

    @property
    def most_drafted_at_once(self) -> int:
        """The most nodes at which a pass of a draft model needs logits: of one level."""
        return self.num_beams if self.chains else max(self.num_beams, self.widths[-1])

    @property
    def guesses_are_fixed(self) -> bool:
        """Whether a width or a budget was asked for: the target then checks as many guesses as that allows."""
        return self.draft_width is not None or self.draft_budget is not None

    # Drafts with the same width at every level: each level survives with the same probability.

    @property
    def none(self) -> Shape:
        """No draft."""
        return self.widths[0], 0

    @property
    def smallest(self) -> Shape:
        """The smallest draft, for a probe."""
        return self.within_budget(self.widths[0], 1)

    def best(self, survival: Callable[[int], float], reading: float = 0.0) -> Shape:
        """The shape that promises the most steps per second.

        Args:
            survival: by width, the probability that a step chooses among the guesses for it.
            reading: seconds per step that the draft needs beside its guesses. No draft needs none.
        """
        best_rate, best, most = 0.0, self.none, self.most_guesses
        affordable = self.plain_cost() / MIN_GAIN - reading
        for width in self.widths:
            surviving = survival(width)
            for depth in self.depths:
                if self.guesses(width, depth) > most and best_rate:
                    break
                rate = self._steps_per_second(width, depth, surviving)
                if rate > best_rate and (not depth or 1 / rate < affordable or self.depths[0]):
                    best_rate, best = rate, (width, depth)
        return self.within_budget(*best)

    def expected_cost(self, survival: Callable[[int], float]) -> float:
        """Seconds per step with the best shape."""
        width, depth = self.best(survival)
        return 1 / self._steps_per_second(width, depth, survival(width))

    def within_budget(self, width: int, depth: int) -> Shape:
        """A shape, made smaller if it has more guesses than are allowed."""
        if not depth:
            return self.none
        most = self.most_guesses
        return min(width, most), min(depth, max(1, most // self.guesses(width, 1)))

    def guesses(self, width: int, depth: int) -> int:
        """The number of guesses in a shape."""
        return width * depth * (self.num_beams if self.chains else 1)

    def _steps_per_second(self, width: int, depth: int, survival: float) -> float:
        steps = sum(survival**i for i in range(depth + 1))
        drafting = self.draft_cost(self.num_beams) + (depth - 1) * self.draft_cost(width) if depth else 0.0
        return steps / (drafting + self.target_cost(self.num_beams + self.guesses(width, depth)))

    # The possible gain of a retry, and its cost.

    def plain_cost(self) -> float:
        """Seconds per step without drafts."""
        return self.target_cost(self.num_beams)

    def best_cost(self) -> float:
        """Seconds per step with the narrowest drafts, if every guess is accepted."""
        return 1 / max(self._steps_per_second(self.widths[0], depth, 1.0) for depth in self.depths[1:] or [0])

    def probe_cost(self, unread: int) -> float:
        """Seconds that the smallest draft adds to a round.

        Args:
            unread: tokens that the draft has to read first.
        """
        nodes = self.num_beams + self.guesses(self.widths[0], 1)
        return self.draft_cost(unread + self.num_beams) + self.target_cost(nodes) - self.plain_cost()

    # Drafts below a single text: the draft's probabilities say which guesses pay. Their sum, times how far the draft
    # can be trusted, is the expected number of accepted guesses.

    def draft_cost(self, nodes: int) -> float:
        """Seconds of a pass of the draft over a number of nodes."""
        return self._draft(nodes) if self._draft is not None and nodes else 0.0

    def expanded(
        self, level: NDArray[np.float64], depth: int, chances: NDArray[np.float64], spent: float, trust: float
    ) -> int:
        """How many nodes of a level to guess below. Arguments as for ``Pace.expanded``."""
        if depth >= self.depths[-1]:
            return 0
        if self.num_draft_tokens is not None and self.draft_width is not None:
            return len(level)
        guesses, tokens = self._best_count(chances, spent, trust)
        rate = tokens / (spent + self.target_cost(1 + guesses))
        one_more_guess = self.target_cost(2 + guesses) - self.target_cost(1 + guesses)
        nodes = 0
        for chance in level.tolist():
            cost = self.draft_cost(nodes + 1) - self.draft_cost(nodes) + one_more_guess
            if trust * chance <= rate * cost:
                break
            nodes += 1
        return max(nodes, int(self.num_draft_tokens is not None))

    def worthwhile(self, chances: NDArray[np.float64], spent: float, trust: float) -> int:
        """How many of the likeliest guesses to check. Arguments as for ``Pace.worthwhile``."""
        return min(self._best_count(chances, spent, trust)[0], self.most_guesses)

    def _best_count(self, chances: NDArray[np.float64], spent: float, trust: float) -> tuple[int, float]:
        """The number of guesses that gives the most tokens per second, and the tokens that it gives."""
        tokens = 1 + trust * np.cumsum(np.concatenate([[0.0], np.sort(chances)[::-1]]))
        rates = tokens / [spent + self.target_cost(1 + guesses) for guesses in range(len(tokens))]
        best = int(rates.argmax())
        return best, float(tokens[best])
