"""How far to draft: as far as the acceptance rates and the costs of passes promise more steps per second.

Drafts differ in the buckets of their acceptance rates. A lookup finds the end of the sequence where it stood before,
and the longer that match, the likelier the token after it follows again: an accepted token makes the match longer.
Levels below beams have a bucket for each width. A tree below one tip has the draft's own probabilities, and one bucket
for how far they can be trusted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specbeam.decoding.deferring import Cost as Cost
from specbeam.decoding.drafter import SKIPPED, DraftTokens
from specbeam.drafting.sizes import Shape, Sizes
from specbeam.tree import Nodes, Tree

MATCH_LENGTHS = (1, 2, 3, 4, 8)
"""The buckets of lookups: matches from each of these lengths to the next one, in tokens."""
MATCH_PRIOR = (0.2, 0.45, 0.65, 0.75, 0.9)
"""By these lengths, the chance to assume below a single tip (docs/decisions/lookup-matches.md)."""
TYPICAL_MATCH = 2
"""The match to expect, in tokens, where none has been looked up yet."""
LEVEL_PRIOR = 2 / 3
"""The chance to assume that a step chooses among a level of draft tokens."""
MIN_GAIN = 1.05
"""Draft only if that promises this many times as many steps per second. The drafting itself takes time, too."""
DECAY = 0.9
"""The share of their weight that a bucket's observations keep when later ones come."""
SKIP_DECAY = 0.98
"""The share of the distance to the prior that is left after a decode step without draft tokens."""
PRIOR_WEIGHT = 4.0
"""The weight of the prior, in observed tokens."""
PRIOR_PACE = 0.2
"""The prior follows rates below it, and goes back to where it began, at this share of their pace.

So a draft that fails each time it is tried again is tried ever more rarely.
"""


class Acceptance:
    """Acceptance rates by bucket. They begin at a prior, follow what is observed, and decay to it where nothing is.

    Args:
        prior: the rate to assume in each bucket, [buckets].
    """

    def __init__(self, prior: ArrayLike) -> None:
        self._first = np.asarray(prior, dtype=np.float64)
        self._prior, self._rates = self._first.copy(), self._first.copy()
        self._weights = np.full_like(self._first, PRIOR_WEIGHT)

    @property
    def chances(self) -> NDArray[np.float64]:
        """The chance that a draft token of each bucket is accepted, float64 [buckets]."""
        return np.minimum(self._rates, 1.0)

    def learn(self, bucket: int, accepted: float, proposed: float) -> None:
        """Take in how many of a bucket's draft tokens were accepted in a round."""
        before = DECAY * self._weights[bucket]
        weight = before + proposed
        self._rates[bucket] = (before * self._rates[bucket] + accepted) / weight
        self._weights[bucket] = weight
        if proposed:
            follows = self._prior[bucket] + PRIOR_PACE * (self._rates[bucket] - self._prior[bucket])
            self._prior[bucket] = min(self._first[bucket], follows)

    def skip(self) -> None:
        """Take in a decode step without draft tokens: decay towards the prior."""
        share = 1 - SKIP_DECAY
        self._prior += share * PRIOR_PACE * (self._first - self._prior)
        self._rates += share * (self._prior - self._rates)
        self._weights += share * (PRIOR_WEIGHT - self._weights)


@dataclass
class Drafts:
    """Drafts below one number of tips.

    Attributes:
        sizes: that they may have.
        acceptance: of their tokens.
        seconds, steps: of the latest rounds.
    """

    sizes: Sizes
    acceptance: Acceptance
    seconds: float = 0.0
    steps: float = 0.0


class Controller:
    """Decides how far one request drafts, round by round: the :class:`DraftController` of every drafter.

    A round goes: ``shape``; for a tree below one tip also ``expanded`` and ``worthwhile``; then ``learn``.

    Args:
        sizes: that drafts may have, below one tip and below all beams.
        target: the cost of the target's passes.
        plain: the same without draft tokens, where the backend goes ahead if it can.
        draft: the cost of the draft model's passes. Lookups have none: they are free.
        unread: tokens that the draft model has to read before its first draft token.
        matches: the draft tokens are looked up, with the buckets of ``MATCH_LENGTHS``.
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
            steps: how many are to come. They share the seconds in which the draft model reads what it has not read.
            matched: the number of tokens at the end of the best sequence that a lookup found.
        """
        self._now, self._matched = self._drafts.get(num_tips, self._all), matched
        return self._now.sizes.within_budget(*self._best(self._now, steps, matched)[1])

    def no_draft(self) -> DraftTokens:
        """No draft tokens. The backend may go ahead, unless lookups paid lately: the next token may have a match."""
        now = self._now
        lookups_pay = self._matched is not None and now.seconds < now.steps * self._plain(now.sizes.num_tips)
        return DraftTokens() if lookups_pay else SKIPPED

    def chances(self, depth: int) -> NDArray[np.float64]:
        """The chances that this round's chains are accepted down to each level, float64 [depth]."""
        return self._surviving(self._now, self._now.sizes.widths[0], depth, self._matched)

    def draft_cost(self, nodes: int) -> float:
        """Seconds of a pass of the draft model."""
        return self._draft(nodes) if self._draft is not None and nodes else 0.0

    @property
    def tree_width(self) -> int:
        """The most tokens of a level of a tree."""
        return self._now.sizes.widths[-1]

    def expanded(self, level: NDArray[np.float64], depth: int, chances: NDArray[np.float64], spent: float) -> int:
        """How many nodes of a level to draft below.

        Args:
            level: the nodes' probabilities by the draft, the likeliest first, float64 [n].
            depth: of the level below the tip.
            chances: the probabilities of all draft tokens so far, float64 [n].
            spent: seconds of the draft's passes so far.
        """
        sizes = self._now.sizes
        if depth >= sizes.depths[-1]:
            return 0
        if sizes.num_draft_tokens is not None and sizes.draft_width is not None:
            return len(level)
        draft_tokens, tokens = self._best_count(chances, spent)
        rate = tokens / (spent + self._target(1 + draft_tokens))
        one_more_draft_token = self._target(2 + draft_tokens) - self._target(1 + draft_tokens)
        nodes = 0
        for chance in level.tolist():
            cost = self.draft_cost(nodes + 1) - self.draft_cost(nodes) + one_more_draft_token
            if self._trust * chance <= rate * cost:
                break
            nodes += 1
        return max(nodes, int(not depth or sizes.num_draft_tokens is not None))

    def worthwhile(self, chances: NDArray[np.float64], spent: float) -> int:
        """How many of the likeliest draft tokens to verify, after this many seconds of drafting."""
        sizes = self._now.sizes
        wanted = len(chances) if sizes.draft_tokens_are_fixed else self._best_count(chances, spent)[0]
        return min(wanted, sizes.max_draft_tokens)

    @property
    def reading_seconds(self) -> float:
        return self.draft_cost(self._unread)

    def seconds_per_step(self, steps: int) -> float:
        alone = self._drafts[1]
        matched = None if self._matched is None else TYPICAL_MATCH
        expected, _ = self._best(alone, math.inf, matched)
        of_latest = (alone.seconds + PRIOR_WEIGHT * expected) / (alone.steps + PRIOR_WEIGHT)
        return of_latest + self.reading_seconds / steps

    def skip(self, num_tips: int = 1) -> None:
        """Take in a step without draft tokens: statistics below this number of tips decay to the prior."""
        drafts = self._drafts[num_tips]
        drafts.acceptance.skip()
        drafts.seconds *= SKIP_DECAY
        drafts.steps *= SKIP_DECAY
        self._unread += num_tips

    def learn(self, draft_tokens: DraftTokens, tree: Tree, steps: list[Nodes]) -> None:
        now, sizes = self._now, self._now.sizes
        if draft_tokens.skipped:
            return self.skip(sizes.num_tips)
        self._unread = 0
        count = len(draft_tokens.nodes)
        now.seconds = DECAY * now.seconds + draft_tokens.seconds + self._target(sizes.num_tips + count)
        now.steps = DECAY * now.steps + max(1, len(steps))
        if not count:
            return None  # a lookup found nothing, or nothing was likely: that says nothing about the next round
        depths = tree.depths(draft_tokens.nodes)
        levels = int(depths.max() - depths.min()) + 1
        accepted = min(levels, max(0, len(steps) - 1))
        proposed = min(levels, accepted + 1)  # no level below a rejected one was verified
        if self._matched is not None:
            for level, bucket in enumerate(self._buckets(now, 0, proposed, self._matched).tolist()):
                now.acceptance.learn(bucket, level < accepted, 1)
        elif sizes.is_tree:
            now.acceptance.learn(0, accepted, float(draft_tokens.chances.sum()))
        else:
            needed = [_needed_width(draft_tokens, tree, tips, sizes.chains) for tips in steps[:accepted]]
            for bucket, width in enumerate(sizes.widths):
                # A wider level might have had the missing token. It is as likely that it would not.
                missed = (proposed - accepted) * (1.0 if width <= max(draft_tokens.width, sizes.widths[0]) else 0.5)
                now.acceptance.learn(bucket, sum(width >= one for one in needed), accepted + missed)
        return None

    def _best(self, drafts: Drafts, steps: float, matched: int | None) -> tuple[float, Shape]:
        """The least seconds per step, and their shape. No draft, if its gain is too small and the size is not fixed."""
        sizes, reading = drafts.sizes, self.reading_seconds / steps
        plain, best = self._plain(sizes.num_tips), sizes.none
        least = math.inf if sizes.depths[0] else plain / MIN_GAIN
        if matched == 0 and not sizes.depths[0]:
            return plain, best
        for width in sizes.widths:
            chosen = (1 + np.cumsum(self._surviving(drafts, width, sizes.depths[-1], matched))).tolist()
            for depth in filter(None, sizes.depths):
                draft_tokens = sizes.draft_tokens(width, depth)
                if draft_tokens > sizes.max_draft_tokens and best[1]:
                    break
                drafting = self.draft_cost(sizes.num_tips) + (depth - 1) * self.draft_cost(width)
                seconds = drafting + self._target(sizes.num_tips + draft_tokens)
                if seconds / chosen[-1] + reading >= least:
                    break  # deeper drafts take longer
                cost = seconds / chosen[depth - 1] + reading
                if cost < least:
                    least, best = cost, (width, depth)
        return (least if best[1] else plain), best

    def _surviving(self, drafts: Drafts, width: int, depth: int, matched: int | None) -> NDArray[np.float64]:
        """The chances that draft tokens down to each level are accepted, float64 [depth]."""
        buckets = self._buckets(drafts, drafts.sizes.widths.index(width), depth, matched)
        return np.cumprod(drafts.acceptance.chances[buckets], dtype=np.float64)

    @staticmethod
    def _buckets(drafts: Drafts, place: int, depth: int, matched: int | None) -> NDArray[np.int64]:
        """The bucket of each level, int64 [depth].

        Args:
            place: of the width, among the allowed ones.
        """
        if matched is None:
            return np.full(depth, 0 if drafts.sizes.is_tree else place)
        return np.searchsorted(MATCH_LENGTHS, np.arange(depth) + max(1, matched), side="right") - 1

    @property
    def _trust(self) -> float:
        """The factor from the draft's probabilities in a tree to the observed rates."""
        return float(self._now.acceptance.chances[0])

    def _best_count(self, chances: NDArray[np.float64], spent: float) -> tuple[int, float]:
        """The number of draft tokens that gives the most tokens per second, and the tokens that it gives."""
        tokens = 1 + self._trust * np.cumsum(np.concatenate([[0.0], np.sort(chances)[::-1]]))
        rates = tokens / [spent + self._target(1 + draft_tokens) for draft_tokens in range(len(tokens))]
        best = int(rates.argmax())
        return best, float(tokens[best])


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
