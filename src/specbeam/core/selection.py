"""Selection requests and selections: the few numbers that a strategy needs of the logits at some nodes.

Strategies make requests, the engine collects the requests of a forward pass, and a backend selects where the logits
are. ``specbeam.backends.torch.sampling`` does so in PyTorch on any device. It is the reference for other backends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

MASKED = float("-inf")
"""The score of a token that has no chance."""
Logits = Any
"""Rows of logits as a backend keeps them. Slices and ``len`` count rows; all else is the backend's own."""


@dataclass(frozen=True)
class Edit:
    """A change of single scores. All scores are read before any is changed, so a score may be named twice.

    Attributes:
        kind: "add" adds a value. "repeat" divides a positive score by the value, and multiplies a negative score by it
            (CTRL, Keskar et al. 2019, 4.1). "ban" sets -inf, and "set" sets the value. "raise" adds the score's
            absolute value times the value, unless the score is not finite.
        rows, tokens: which scores, int32 [m] each. Tokens that the logits lack are ignored.
        values: float32 [m]; empty for a ban.
    """

    kind: Literal["add", "repeat", "ban", "set", "raise"]
    rows: NDArray[np.int32]
    tokens: NDArray[np.int32]
    values: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))


@dataclass(slots=True)
class Noise:
    """Gumbel noise for draws. It is the same for the same seed, stream, position and token, whatever else happens.

    Attributes:
        seed: below 2**64.
        streams: tell the sequences of one request apart, uint32 [n].
        positions: of the tokens to be drawn, in their sequences, uint32 [n].
    """

    seed: int
    streams: NDArray[np.uint32]
    positions: NDArray[np.uint32]


@dataclass(slots=True)
class SelectionRequest:
    """The numbers that a strategy needs of the logits at its n nodes.

    The logits are changed in the order of the attributes from ``normalize`` to ``renormalize``. Then noise is added,
    and the highest are selected. Of equal ones, the lower token ids come first.

    Attributes:
        top: how many of the highest tokens of each row; 0 for none.
        given: tokens whose log-probabilities are needed, too, int64 [n, m].
        vocab: use the logits of the first ``vocab`` tokens only, as if there were no others; None for all.
        normalize: change log-probabilities (beams), not logits.
        edits: changes of single scores, in this order.
        allowed: packed bits, the lowest bit first, uint8 [n, at least ceil(vocab / 8)]. Tokens with bit 0 become -inf.
            A mask of the target's vocabulary serves a draft that has fewer tokens, too.
        functions: take all scores, float32 [n, vocab], and return new ones.
        one_of: in each row only the likeliest of these tokens keeps its score.
        together: the first of some adjacent tokens, and the one after the last. Where these together are likelier than
            each other token, no other token keeps its score (the timestamps of Whisper, Radford et al. 2022, 4.5).
        warpers: the names and values of the options that shape the distribution of draws, in this order.
        renormalize: make log-probabilities of the changed scores.
        noise: rank by score and noise. The highest is then a draw from the softmax of the scores (Gumbel-max). The k
            highest are k draws without replacement (Kool et al. 2019, "Stochastic Beams and Where to Find Them", 2.3).
        total: ask for the logsumexp of the changed scores, too.
    """

    top: int = 1
    given: NDArray[np.int64] | None = None
    vocab: int | None = None
    normalize: bool = False
    edits: tuple[Edit, ...] = ()
    allowed: NDArray[np.uint8] | None = None
    functions: tuple[Callable[[NDArray[np.float32]], NDArray[np.float32]], ...] = ()
    one_of: tuple[int, ...] = ()
    together: tuple[int, int] | None = None
    warpers: tuple[tuple[str, Any], ...] = ()
    renormalize: bool = False
    noise: Noise | None = None
    total: bool = False

    def after(self, passes: int) -> SelectionRequest:
        """The same request this many tokens later: the positions of its noise have grown."""
        if self.noise is None or not passes:
            return self
        return replace(self, noise=replace(self.noise, positions=self.noise.positions + np.uint32(passes)))


@dataclass(frozen=True, slots=True, eq=False)
class AttentionProbe:
    """Heads of cross-attention whose scores are wanted. The passes over a tree fill them in.

    Attributes:
        heads: the layer and the head of each.
        scores: float32 [heads, positions of the tree, p]. The scores of a node at the first p positions of the source,
            before the softmax, lie in the row of its position. A pass writes them for its wanted nodes, and perhaps for
            others.
    """

    heads: Sequence[tuple[int, int]]
    scores: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class NextBeams:
    """How the n nodes of a request go on as beams. Continuations are ranked by the score of the beam plus the token's.

    The next beams are the n best continuations, ties resolved by the beam, then by the token's rank in its row. If one
    of them is an end token, the strategy has to look.

    Attributes:
        scores: of the beams, float32 [n].
        best_above: the strategy has to look if the best next beam scores no more than this.
        all_above: the strategy has to look if some next beam scores no more than this.
    """

    scores: NDArray[np.float32]
    best_above: float
    all_above: float


@dataclass(eq=False, slots=True)
class Selection:
    """The result of a selection request at n nodes. Arrays are on the CPU.

    If the backend has gone ahead, there are n rows for each pass, and only the last pass has rows of logits.

    The rows of logits exist only until the strategy has taken its step, so a strategy that keeps selections keeps no
    logits alive.

    Attributes:
        tokens: the highest ones, the highest first, int64 [n, top].
        log_probs: their log-probabilities by the model itself, before any change, float32 [n, top].
        scores: their scores after all changes, without noise, float32 [n, top].
        normalizers: the logsumexp of the logits, float32 [n]. A log-probability is a logit minus this.
        noise: the noise of these tokens, float64 [n, top], if there was any.
        given: the log-probabilities of the tokens that were given, float32 [n, m].
        totals: the logsumexp of the scores after all changes, float32 [n].
        sources: where the rows of logits are: logits of passes, and rows of each, in this order. Empty after the step.
        join: makes one copy of several pieces of the backend's logits.
    """

    tokens: NDArray[np.int64]
    log_probs: NDArray[np.float32]
    scores: NDArray[np.float32]
    normalizers: NDArray[np.float32]
    noise: NDArray[np.float64] | None
    given: NDArray[np.float32] | None
    totals: NDArray[np.float32] | None
    sources: tuple[tuple[Logits, slice], ...]
    join: Callable[[list[Logits]], Logits] = np.concatenate

    @property
    def logits(self) -> Logits:
        """The n rows of logits, as the backend keeps them. They are gathered when they are asked for.

        Raises:
            RuntimeError: the step is over.
        """
        if not self.sources:
            raise RuntimeError("a selection has its rows of logits only until the strategy has taken its step")
        rows = [logits[which] for logits, which in self.sources]
        return rows[0] if len(rows) == 1 else self.join(rows)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arrays with a row for each node. None stands for an array that was not asked for."""
        return self.tokens, self.log_probs, self.scores, self.normalizers, self.noise, self.given, self.totals

    @property
    def finite(self) -> bool:
        """Whether each row of logits has probabilities: no logit is NaN or +inf, and not all are -inf."""
        return bool(np.isfinite(self.normalizers).all())

    def passes(self, n: int) -> Iterator[Selection]:
        """The selections of the passes, at n nodes each."""
        for first in range(0, len(self.tokens), n):
            rows = slice(first, first + n)
            sources = self.sources if rows.stop == len(self.tokens) else ()
            arrays: list[Any] = [None if array is None else array[rows] for array in self.arrays]
            yield Selection(*[*arrays, sources, self.join])

    def take(self, rows: NDArray[np.int64]) -> Selection:
        """The selection at some of the nodes, given by their rows, int64 [k]."""
        return gather([(self, row) for row in rows.tolist()])

    def copy(self, row: int) -> Selection:
        """The selection at one of the nodes, with a copy of its row of logits."""
        copied = gather([(self, row)])
        copied.sources = ((self.join([copied.logits]), slice(0, 1)),)
        return copied

    def source(self, row: int) -> tuple[Logits, slice]:
        """Where one of the rows of logits is."""
        for logits, which in self.sources:
            if row < (count := which.stop - which.start):
                return logits, slice(which.start + row, which.start + row + 1)
            row -= count
        raise IndexError("no such row")


def gather(rows: Sequence[tuple[Selection, int]]) -> Selection:
    """One selection of rows of several, whose requests must be of one kind."""
    first, indices = rows[0][0], [row for _, row in rows]
    if all(selection is first for selection, _ in rows):
        arrays: list[Any] = [None if array is None else array[indices] for array in first.arrays]
    else:
        each = zip(*(selection.arrays for selection, _ in rows), strict=True)
        arrays = [None if parts[0] is None else np.stack([*map(getitem, parts, indices)]) for parts in each]
    have_logits = all(selection.sources for selection, _ in rows)
    sources = tuple(selection.source(row) for selection, row in rows) if have_logits else ()
    return Selection(*[*arrays, sources, first.join])


def one_after_another(selections: Sequence[Selection]) -> Selection:
    """The selections of several passes at the same nodes as one, with the logits of the last."""
    each = zip(*(selection.arrays for selection in selections), strict=True)
    arrays: list[Any] = [None if parts[0] is None else np.concatenate(parts) for parts in each]
    return Selection(*[*arrays, selections[-1].sources, selections[-1].join])
