"""When the tokens of a window's text are spoken, by openai-whisper's method (``timing.py``).

Alignment heads are heads of cross-attention that follow the audio from token to token. One forward pass over the text
shows their attention.
Dynamic time warping (Sakoe and Chiba 1978) then finds the path through it that takes tokens and audio in their order.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from specbeam.core.selection import AttentionProbe, Selection, SelectionRequest
from specbeam.core.strategy import Evaluate, Hypothesis, Strategy
from specbeam.drafting.drafter import Drafter
from specbeam.engine import Setup
from specbeam.errors import SpecbeamError
from specbeam.models.model import LanguageModel

POSITIONS_PER_SECOND = 50
"""Of the encoder's output."""
MEDIAN_WIDTH = 7
"""Positions."""
NODES_AT_ONCE = 64
"""Logits are held for this many nodes."""
AlignmentHeads = tuple[tuple[int, int], ...]
"""The layer and the head of each."""


def alignment_heads(lm: LanguageModel) -> AlignmentHeads:
    """The alignment heads: the checkpoint's, or as in openai-whisper all of the last half of the layers."""
    if lm.backend.cross_heads is None:
        raise SpecbeamError(
            f"word_timestamps needs attention weights, which the backend {lm.backend.name} does not show: load the "
            "model with backend='cpu' or 'torch'",
            option=("word_timestamps", "backend"),
        )
    layers, heads = lm.backend.cross_heads
    pairs = lm.generation_defaults.get("alignment_heads")
    if not pairs:
        return tuple((layer, head) for layer in range(layers // 2, layers) for head in range(heads))

    def exists(pair: Any) -> bool:
        return (
            isinstance(pair, list | tuple)
            and len(pair) == 2
            and all(type(n) is int and 0 <= n < limit for n, limit in zip(pair, (layers, heads), strict=True))
        )

    if not isinstance(pairs, list | tuple) or not all(map(exists, pairs)):
        raise lm.generation_defaults.refused(
            "alignment_heads", f"pairs of a layer below {layers} and a head of {heads}"
        )
    return tuple((layer, head) for layer, head in pairs)


class AlignText:
    """A strategy that generates nothing. It reads a text, and notes how it attends to the audio.

    Args:
        begin: how many tokens of the prompt are before the one that asks for a text without timestamps.
        text: its tokens. They follow that token, and the end token follows them.
        positions: of the encoder's output, from its start.

    Attributes:
        probe: how the prompt attends.
        probabilities: of the text's tokens, each among all tokens of text.
    """

    def __init__(self, heads: AlignmentHeads, begin: int, text: list[int], end: int, positions: int) -> None:
        self._begin, self._text, self._end = begin, text, end
        rows = begin + 1 + len(text) + 1
        self.probe = AttentionProbe(heads, np.zeros((len(heads), rows, positions), np.float32))
        self.probabilities: list[float] = []

    def __call__(self, setup: Setup, drafter: Drafter | None) -> Strategy:
        return self._strategy(setup)

    def _strategy(self, setup: Setup) -> Generator[Any, Selection, list[Hypothesis]]:
        nodes, given = setup.tree.prefix.copy(), np.zeros((len(setup.tree.prefix), 1), np.int64)
        given[self._begin : self._begin + len(self._text), 0] = self._text  # after the token before each
        log_probs: list[float] = []
        for first in range(0, len(nodes), NODES_AT_ONCE):
            part = slice(first, first + NODES_AT_ONCE)
            request = SelectionRequest(top=0, given=given[part], vocab=self._end)
            selection = yield Evaluate(nodes[part], request, probe=self.probe)
            assert selection.given is not None
            log_probs += selection.given[:, 0].tolist()
        self.probabilities = np.exp(log_probs[self._begin : self._begin + len(self._text)]).tolist()
        return [Hypothesis(setup.tree.tip, 0.0, "stop")]

    def times(self) -> NDArray[np.float64]:
        """When each token of the text begins, and when the last one ends, in seconds from the start of the window.

        Returns:
            float64 [tokens + 1], ascending.
        """
        return token_times(attention(self.probe.scores)[self._begin : -1])


def attention(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """How much each token attends to each position, compared with the other tokens: the mean of some heads.

    Args:
        scores: of the heads, before the softmax, float32 [heads, tokens, positions].

    Returns:
        float32 [tokens, positions].
    """
    total = np.zeros(scores.shape[1:], np.float32)
    for head in scores:
        weights = np.exp(head - head.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        deviation = weights.std(0)
        # Without any deviation, no token stands out.
        weights = (weights - weights.mean(0)) / np.where(deviation > 0, deviation, np.float32(1))
        total += median_filter(weights)
    return total / np.float32(len(scores))


def median_filter(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """The median of the numbers around each, float32 [rows, n]. At the ends, rows are reflected. Short rows stay."""
    half = MEDIAN_WIDTH // 2
    if rows.shape[-1] <= half:
        return rows
    around = sliding_window_view(np.pad(rows, ((0, 0), (half, half)), mode="reflect"), MEDIAN_WIDTH, axis=-1)
    medians: NDArray[np.float32] = np.sort(around, axis=-1)[..., half]
    return medians


def token_times(matrix: NDArray[np.float32]) -> NDArray[np.float64]:
    """Where the best path through a matrix comes to each row, in seconds, float64 [rows].

    Args:
        matrix: how well each row fits each position, float32 [rows, positions].
    """
    rows, positions = warp(-matrix.astype(np.float64))
    begins = np.diff(rows, prepend=-1) > 0
    return positions[begins] / POSITIONS_PER_SECOND


def warp(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """The path of the least cost from the first row and column to the last, in steps to the next row, column or both.

    Of equal sums, a step to the next column is taken, as in openai-whisper. Sums are of float32. All cells of a
    diagonal are computed at once.

    Args:
        costs: float64 [n, m], both at least 1.

    Returns:
        The rows and columns of the path, int64 [2, length].
    """
    n, m = costs.shape
    steps = np.empty((n + m - 1, n), np.int8)  # by row + column, and row: 0 for both, 1 for a row, 2 for a column
    infinite = np.full(n + 1, np.inf, np.float32)
    before, latest = infinite.copy(), infinite.copy()  # sums of the two diagonals before, by row + 1
    before[0] = 0
    for diagonal in range(n + m - 1):
        low, high = max(0, diagonal - m + 1), min(n, diagonal + 1)
        rows = np.arange(low, high)
        both, row, column = before[low:high], latest[low:high], latest[low + 1 : high + 1]
        kind = np.where((both < row) & (both < column), 0, np.where((row < both) & (row < column), 1, 2))
        lowest = np.where(kind == 0, both, np.where(kind == 1, row, column))
        steps[diagonal, low:high] = kind
        current = infinite.copy()
        current[low + 1 : high + 1] = costs[rows, diagonal - rows] + lowest
        before, latest = latest, current
    at, place = n - 1, m - 1
    path = [(at, place)]
    while at > 0 or place > 0:
        step = 2 if at == 0 else 1 if place == 0 else steps[at + place, at]
        at, place = at - (step != 2), place - (step != 1)
        path.append((at, place))
    return np.array(path[::-1], np.int64).T
