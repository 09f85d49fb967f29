"""The sizes that a draft may have."""

from __future__ import annotations

from specbeam.options.declared import MAX_SIZES

MAX_ADAPTIVE_DEPTH = 12
"""Tokens drafted ahead, where ``num_draft_tokens`` adapts."""
MAX_ADAPTIVE_DRAFT_TOKENS = 128
"""Draft tokens per pass of the target, where sizes adapt."""
MAX_ADAPTIVE_DRAFT_TOKENS_PER_BEAM = 8
"""The same for many beams, if that is more."""

Shape = tuple[int, int]
"""Width and depth of a draft: draft tokens per level (with chains: chains per tip), and levels."""


class Sizes:
    """The sizes of drafts below some tips. A size that was asked for is fixed, and the others adapt.

    Args:
        num_draft_tokens: the draft length; None adapts.
        draft_width: draft tokens per level below all tips; with chains, chains per tip; None adapts.
        draft_budget: the most draft tokens per pass of the target; None adapts.
        num_tips: 1, or the number of beams.
        chains: draft tokens come in chains below each tip, not in levels below all of them.
        one_width: all chains that adapt have a width of 1.
        room: the most draft tokens whose logits fit into memory. Sizes that were asked for may have more.

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
        room: int = MAX_SIZES["draft_budget"],
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
            self._fit_into(room)
        most, depths = self.max_draft_tokens, [*filter(None, self.depths)]
        self.allowed = {w: [depth for depth in depths if self.draft_tokens(w, depth) <= most] for w in self.widths}
        self.allowed[self.widths[0]] = self.allowed[self.widths[0]] or depths[:1]

    def _fit_into(self, room: int) -> None:
        """Leave out the sizes that adapt and have more draft tokens than there is room for."""
        least_depth = self.num_draft_tokens or 1
        self.widths = [w for w in self.widths if self.draft_tokens(w, least_depth) <= room] or self.widths[:1]
        if self.num_draft_tokens is None:
            deepest = room // self.draft_tokens(self.widths[0], 1)
            self.depths = self.depths[: 1 + (deepest if self.draft_width is None else max(1, deepest))]
        self._max_adaptive = min(self._max_adaptive, max(room, self.draft_tokens(self.widths[0], least_depth)))

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
        """The most draft tokens in a pass of the target."""
        most = self.draft_tokens(self.widths[-1], self.depths[-1])
        if self.draft_budget is not None:
            return min(most, self.draft_budget)
        fixed = self.num_draft_tokens is not None and self.draft_width is not None
        return min(most, MAX_SIZES["draft_budget"] if fixed else self._max_adaptive)

    @property
    def max_drafted(self) -> int:
        """The most nodes that a draft model evaluates in a round. Some may not become draft tokens."""
        return self.widths[-1] * self.depths[-1]

    @property
    def max_drafted_at_once(self) -> int:
        """The most nodes at which a pass of a draft model needs logits: of one level."""
        return self.num_tips if self.chains else max(self.num_tips, self.widths[-1])

    @property
    def none(self) -> Shape:
        """No draft."""
        return self.widths[0], 0

    def within_budget(self, width: int, depth: int) -> Shape:
        """A shape, made smaller if it has more draft tokens than are allowed."""
        if not depth:
            return self.none
        most = self.max_draft_tokens
        return min(width, most), min(depth, max(1, most // self.draft_tokens(width, 1)))

    def draft_tokens(self, width: int, depth: int) -> int:
        """The number of draft tokens in a shape."""
        return width * depth * (self.num_tips if self.chains else 1)
