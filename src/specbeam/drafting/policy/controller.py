"""How far to draft: as far as the acceptance rates and the costs of passes promise more steps per second.

Drafts differ in the buckets of their acceptance rates. A lookup has a bucket for each length of the match: a longer
match is likelier to continue in the same way, and each accepted token makes it longer.
Levels below beams have a bucket for each width. A tree below one tip has the draft's own probabilities, and one bucket
for how far they can be trusted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specbeam.core.tree import Nodes, Tree
from specbeam.drafting.policy import SKIPPED, Cost, DraftTokens
from specbeam.drafting.policy.acceptance import Acceptance, Rounds, match_bucket
from specbeam.options.declared import MAX_SIZES

MATCH_PRIOR = (0.2, 0.45, 0.65, 0.75, 0.9)
"""By the length of a match, the probability to assume below a single tip (docs/decisions/lookup-matches.md)."""
TYPICAL_MATCH = 2
"""The match to expect, in tokens, where none has been looked up yet."""
LEVEL_PRIOR = 2 / 3
"""The probability to assume that a step chooses among a level of draft tokens."""
MIN_GAIN = 1.05
"""Draft only if that promises this many times as many steps per second. The drafting itself takes time, too."""
FURTHER_TOKENS = 64
"""Sequences are expected to get this much longer at most. By then a draft model must have saved its prefill's time."""
MAX_ADAPTIVE_DEPTH = 12
"""Tokens drafted ahead, where ``num_draft_tokens`` adapts."""
MAX_ADAPTIVE_DRAFT_TOKENS = 128
"""Draft tokens per pass of the target, where sizes adapt."""
MAX_ADAPTIVE_DRAFT_TOKENS_PER_BEAM = 8
"""The same for many beams, if that is more."""

Shape = tuple[int, int]
"""Width and depth of a draft: draft tokens per level (with chains: chains per tip), and levels."""


def fewest_seconds(
    depths: Sequence[int], steps: Sequence[float], seconds: Callable[[int], float], fewest: float
) -> tuple[float, int]:
    """The depth that promises the fewest seconds per step, and these seconds. 0 if all promise ``fewest`` or more.

    Args:
        depths: to choose from, ascending: levels of draft tokens, or their number. Deeper ones take longer.
        steps: to be expected with 1, 2, ... levels; never fewer with more.
        seconds: of a round, by its depth.
        fewest: the seconds per step to fall below.
    """
    best = 0
    for depth in depths:
        taken = seconds(depth)
        if taken / steps[-1] >= fewest:
            break
        if taken / steps[depth - 1] < fewest:
            fewest, best = taken / steps[depth - 1], depth
    return fewest, best


@dataclass
class Drafts:
    """Drafts below one number of tips.

    Attributes:
        sizes: that they may have.
        acceptance: of their tokens.
        rounds: the latest ones with them.
    """

    sizes: Sizes
    acceptance: Acceptance
    rounds: Rounds = field(default_factory=Rounds)


class Controller:
    """Decides how far one request drafts, round by round.

    A round goes: ``shape``; for a tree below one tip also ``expanded`` and ``worthwhile``; then ``learn``.

    Args:
        sizes: that drafts may have, below one tip and below all beams.
        target: the cost of the target's passes.
        plain: the same without draft tokens, where the backend goes ahead if it can.
        draft: the cost of the draft model's passes. Lookups have none: they are free.
        unread: tokens that the draft model has to read before its first draft token.
        matches: the draft tokens are looked up, with a bucket for each length of a match.

    Attributes:
        max_draft_tokens: the maximum number of draft tokens in a pass of the target.
        max_drafted: how many nodes the draft model evaluates in a round at most. Some may not become draft tokens.
        max_drafted_at_once: the maximum number of nodes at which a pass of the draft model needs logits.
    """

    def __init__(
        self,
        sizes: Sequence[Sizes],
        target: Cost,
        plain: Cost,
        draft: Cost | None = None,
        unread: int = 0,
        matches: bool = False,
    ) -> None:
        self._drafts = {one.num_tips: Drafts(one, Acceptance(_prior(one, matches))) for one in sizes}
        self._now = self._all = self._drafts[sizes[-1].num_tips]  # the drafts of this round, and those below all beams
        self._target, self._plain, self._draft = target, plain, draft
        self._unread = unread
        self._matched = TYPICAL_MATCH if matches else None
        self.max_draft_tokens = max(one.max_draft_tokens for one in sizes)
        self.max_drafted = max(one.max_drafted for one in sizes)
        self.max_drafted_at_once = max(one.max_drafted_at_once for one in sizes)

    def shape(self, num_tips: int, steps: float = math.inf, matched: int | None = None) -> Shape:
        """Begin a round: the width and the draft length that promise the most. A length of 0 is no draft.

        Args:
            num_tips: below which to draft. Any other number than of ``sizes`` counts as all beams.
            steps: how many are to come. Up to ``FURTHER_TOKENS`` steps share the seconds of the draft's prefill.
            matched: the number of tokens at the end of the best sequence that a lookup found.
        """
        self._now, self._matched = self._drafts.get(num_tips, self._all), matched
        return self._now.sizes.within_budget(*self._best(self._now, steps, matched)[1])

    def no_draft(self) -> DraftTokens:
        """No draft tokens. The backend may go ahead, unless lookups saved time: the next token may have a match."""
        rounds, plain = self._now.rounds, self._plain(self._now.sizes.num_tips)
        lookups_pay = self._matched is not None and rounds.seconds < rounds.steps * plain
        return DraftTokens() if lookups_pay else SKIPPED

    def draft_cost(self, nodes: int) -> float:
        """Seconds of a pass of the draft model."""
        return self._draft(nodes) if self._draft is not None and nodes else 0.0

    @property
    def tree_width(self) -> int:
        """The maximum number of tokens of a level of a tree."""
        return self._now.sizes.widths[-1]

    def expanded(self, level: NDArray[np.float64], depth: int, probabilities: NDArray[np.float64], spent: float) -> int:
        """How many nodes of a level to draft below.

        Args:
            level: the nodes' probabilities by the draft, the likeliest first, float64 [n].
            depth: of the level below the tip.
            probabilities: of all draft tokens so far, float64 [n].
            spent: seconds of the draft's passes so far.
        """
        sizes = self._now.sizes
        if depth >= sizes.depths[-1]:
            return 0
        if sizes.num_draft_tokens is not None and sizes.draft_width is not None:
            return len(level)
        seconds_per_token, draft_tokens = self._best_count(probabilities, spent)
        one_more_draft_token = self._target(2 + draft_tokens) - self._target(1 + draft_tokens)
        nodes = 0
        for probability in level.tolist():
            cost = self.draft_cost(nodes + 1) - self.draft_cost(nodes) + one_more_draft_token
            if self._trust * probability * seconds_per_token <= cost:
                break
            nodes += 1
        return max(nodes, int(not depth or sizes.num_draft_tokens is not None))

    def worthwhile(self, probabilities: NDArray[np.float64], spent: float) -> int:
        """How many of the likeliest draft tokens to verify, after this many seconds of drafting."""
        sizes = self._now.sizes
        wanted = len(probabilities) if sizes.draft_tokens_are_fixed else self._best_count(probabilities, spent)[1]
        return min(wanted, sizes.max_draft_tokens)

    @property
    def reading_seconds(self) -> float:
        """Expected seconds of the draft model's prefill of the tokens that it lacks: 0 for lookups."""
        return self.draft_cost(self._unread)

    def _reading(self, steps: float) -> float:
        """Each step's share of these seconds. With infinitely many steps it is 0."""
        return 0.0 if steps == math.inf else self.reading_seconds / max(1, min(steps, FURTHER_TOKENS))

    def seconds_per_step(self, steps: int) -> float:
        """Expected seconds per step of rounds with drafts below one tip, if this many steps are to come."""
        alone = self._drafts[1]
        expected, _ = self._best(alone, math.inf, None if self._matched is None else TYPICAL_MATCH)
        return alone.rounds.seconds_per_step(expected) + self._reading(steps)

    def skip(self, num_tips: int = 1) -> None:
        """Take in a step without draft tokens: statistics below this number of tips decay to the prior."""
        drafts = self._drafts[num_tips]
        drafts.acceptance.skip()
        drafts.rounds.skip()
        self._unread += num_tips

    def learn(self, draft_tokens: DraftTokens, tree: Tree, steps: list[Nodes]) -> None:
        """Learn which draft tokens were accepted.

        Args:
            steps: the tips or the beams after each step of the round, int64 [b] each.
        """
        now, sizes = self._now, self._now.sizes
        if draft_tokens.certain:
            self._unread += sum(map(len, steps))
            return None
        if draft_tokens.skipped:
            return self.skip(sizes.num_tips)
        self._unread = 0
        count = len(draft_tokens.nodes)
        now.rounds.add(draft_tokens.seconds + self._target(sizes.num_tips + count), max(1, len(steps)))
        if not count:
            return None  # a lookup found nothing, or nothing was likely: that says nothing about the next round
        depths = tree.depths(draft_tokens.nodes)
        levels = int(depths.max() - depths.min()) + 1
        accepted = min(levels, max(0, len(steps) - 1))
        proposed = min(levels, accepted + 1)  # no level below a rejected one was verified
        if self._matched is not None:
            for level in range(proposed):
                now.acceptance.learn(match_bucket(max(1, self._matched) + level), level < accepted, 1)
        elif sizes.is_tree:
            now.acceptance.learn(0, accepted, float(draft_tokens.probabilities.sum()))
        else:
            needed = [_needed_width(draft_tokens, tree, tips, sizes.chains) for tips in steps[:accepted]]
            for bucket, width in enumerate(sizes.widths):
                # A wider level might have had the missing token. It is as likely that it would not.
                missed = (proposed - accepted) * (1.0 if width <= max(draft_tokens.width, sizes.widths[0]) else 0.5)
                now.acceptance.learn(bucket, sum(width >= one for one in needed), accepted + missed)
        return None

    def _best(self, drafts: Drafts, steps: float, matched: int | None) -> tuple[float, Shape]:
        """The least seconds per step, and their shape. No draft, if its gain is too small and the size is not fixed."""
        sizes, reading, best = drafts.sizes, self._reading(steps), drafts.sizes.none
        plain = self._plain(sizes.num_tips)
        if matched == 0 and not sizes.depths[0]:
            return plain, best
        fewest = math.inf if sizes.depths[0] else plain / MIN_GAIN - reading
        for width, depths in sizes.allowed.items():

            def seconds(depth: int, width: int = width) -> float:
                drafting = self.draft_cost(sizes.num_tips) + (depth - 1) * self.draft_cost(width)
                return drafting + self._target(sizes.num_tips + sizes.draft_tokens(width, depth))

            chosen = (1 + np.cumsum(self._surviving(drafts, width, sizes.depths[-1], matched))).tolist()
            fewest, depth = fewest_seconds(depths, chosen, seconds, fewest)
            if depth:
                best = (width, depth)
        return (fewest + reading if best[1] else plain), best

    def _surviving(self, drafts: Drafts, width: int, depth: int, matched: int | None) -> NDArray[np.float64]:
        """The probabilities that draft tokens down to each level are accepted, float64 [depth]."""
        if matched is not None:
            return drafts.acceptance.surviving(matched, depth)
        rate = drafts.acceptance.rates[0 if drafts.sizes.is_tree else drafts.sizes.widths.index(width)]
        return np.cumprod(np.full(depth, rate))

    @property
    def _trust(self) -> float:
        """The factor from the draft's probabilities in a tree to the observed rates."""
        return float(self._now.acceptance.rates[0])

    def _best_count(self, probabilities: NDArray[np.float64], spent: float) -> tuple[float, int]:
        """The number of draft tokens that gives the most tokens per second, and the seconds per token."""
        tokens = (1 + self._trust * np.cumsum(np.sort(probabilities)[::-1])).tolist()
        counts = range(1, 1 + len(tokens))
        return fewest_seconds(counts, tokens, lambda count: spent + self._target(1 + count), spent + self._target(1))


def _prior(sizes: Sizes, matches: bool) -> NDArray[np.float64]:
    """What to assume at first. A step of beam search chooses a token for each beam, and needs all of them."""
    if matches:
        return np.array(MATCH_PRIOR) ** sizes.num_tips
    return np.full(len(sizes.widths), 1.0 if sizes.is_tree else LEVEL_PRIOR)


def _needed_width(draft_tokens: DraftTokens, tree: Tree, tips: Nodes, chains: bool) -> int:
    """How wide a level had to be to contain these tips, or the beams after a step."""
    if chains:
        return 1  # it is not known which chain was accepted: the first is the likeliest
    depths = tree.depths(draft_tokens.nodes)  # the levels of the draft's search, each the likeliest first
    among = draft_tokens.nodes[depths == depths[np.isin(draft_tokens.nodes, tips)].max(initial=0)]
    return 1 + int(np.flatnonzero(np.isin(among, tips)).max(initial=0))


class Sizes:
    """The sizes of drafts below some tips. A size that was asked for is fixed, and the others adapt.

    Args:
        num_draft_tokens: the draft length; None adapts.
        draft_width: draft tokens per level below all tips; with chains, chains per tip; None adapts.
        draft_budget: the maximum number of draft tokens per pass of the target; None adapts.
        num_tips: 1, or the number of beams.
        chains: draft tokens come in chains below each tip, not in levels below all of them.
        one_width: all chains that adapt have a width of 1.
        max_rows: how many draft tokens' logits fit into memory. Sizes that were asked for may have more.

    Attributes:
        widths: the allowed widths, ascending.
        depths: the allowed depths, ascending. If the depth adapts, the first is 0, which is no draft. It is the only
            one if the narrowest level does not fit into memory.
        allowed: by width, the depths of drafts that have no more than ``max_draft_tokens``, ascending. The narrowest
            has one at least, which :meth:`within_budget` cuts.
    """

    def __init__(
        self,
        num_draft_tokens: int | None,
        draft_width: int | None,
        draft_budget: int | None,
        num_tips: int,
        chains: bool,
        one_width: bool = False,
        max_rows: int = MAX_SIZES["draft_budget"],
    ) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.draft_width = draft_width
        self.draft_budget = draft_budget
        self.num_tips = n = num_tips
        self.chains = chains
        levels = [1, 2, 4] if n == 1 else [n, n + (n + 1) // 2, 2 * n, 3 * n]
        adaptive = [1] if one_width else [1, 2] if chains else levels
        self.widths = adaptive if draft_width is None else [draft_width]
        self.depths = [*range(MAX_ADAPTIVE_DEPTH + 1)] if num_draft_tokens is None else [num_draft_tokens]
        self._max_adaptive = max(MAX_ADAPTIVE_DRAFT_TOKENS, MAX_ADAPTIVE_DRAFT_TOKENS_PER_BEAM * n)
        if draft_budget is None:
            self._fit_into(max_rows)
        maximum, depths = self.max_draft_tokens, [*filter(None, self.depths)]
        self.allowed = {w: [depth for depth in depths if self.draft_tokens(w, depth) <= maximum] for w in self.widths}
        self.allowed[self.widths[0]] = self.allowed[self.widths[0]] or depths[:1]

    def _fit_into(self, max_rows: int) -> None:
        """Leave out the sizes that adapt and have more draft tokens than fit into memory."""
        least_depth = self.num_draft_tokens or 1
        self.widths = [w for w in self.widths if self.draft_tokens(w, least_depth) <= max_rows] or self.widths[:1]
        if self.num_draft_tokens is None:
            deepest = max_rows // self.draft_tokens(self.widths[0], 1)
            self.depths = self.depths[: 1 + (deepest if self.draft_width is None else max(1, deepest))]
        self._max_adaptive = min(self._max_adaptive, max(max_rows, self.draft_tokens(self.widths[0], least_depth)))

    @property
    def is_tree(self) -> bool:
        """Whether drafts are trees, of the likeliest tokens below one tip."""
        return self.num_tips == 1 and not self.chains

    @property
    def draft_tokens_are_fixed(self) -> bool:
        """Whether a width or a budget was asked for: the target then verifies as many draft tokens as that allows."""
        return self.draft_width is not None or self.draft_budget is not None

    @property
    def max_draft_tokens(self) -> int:
        """The maximum number of draft tokens in a pass of the target."""
        in_shape = self.draft_tokens(self.widths[-1], self.depths[-1])
        if self.draft_budget is not None:
            return min(in_shape, self.draft_budget)
        fixed = self.num_draft_tokens is not None and self.draft_width is not None
        return min(in_shape, MAX_SIZES["draft_budget"] if fixed else self._max_adaptive)

    @property
    def max_drafted(self) -> int:
        """The maximum number of nodes that a draft model evaluates in a round. Some may not become draft tokens."""
        return self.widths[-1] * self.depths[-1]

    @property
    def max_drafted_at_once(self) -> int:
        """The maximum number of nodes at which a pass of a draft model needs logits: of one level."""
        return self.num_tips if self.chains else max(self.num_tips, self.widths[-1])

    @property
    def none(self) -> Shape:
        """No draft."""
        return self.widths[0], 0

    def within_budget(self, width: int, depth: int) -> Shape:
        """A shape, made smaller if it has more draft tokens than are allowed."""
        if not depth:
            return self.none
        budget = self.max_draft_tokens
        return min(width, budget), min(depth, max(1, budget // self.draft_tokens(width, 1)))

    def draft_tokens(self, width: int, depth: int) -> int:
        """The number of draft tokens in a shape."""
        return width * depth * (self.num_tips if self.chains else 1)
