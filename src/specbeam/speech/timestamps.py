"""Whisper's rules for timestamps, and the segments that they cut a text into (Radford et al. 2022, 4.5)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specbeam.speech.vocabulary import Vocabulary
from specbeam.structured import Constraint
from specbeam.structured.constraint_mask import packed

FRAMES_PER_TIMESTAMP, SECONDS_PER_TIMESTAMP = 2, 0.02
START, OPENED, TEXT, CLOSED = range(4)
"""Nothing yet; behind the timestamp that begins a segment; behind text; behind the timestamp that ends a segment."""
State = tuple[int, int]
"""One of these, and the number of the lowest timestamp that may follow, if one may."""


class TranscriptRules(Constraint):
    """Which tokens may follow in a transcript: timestamps in pairs and in order, and no suppressed tokens.

    A transcript begins with a timestamp. Each pair after that ends one segment and begins the next, and the end token
    may take the place of the second. Where all timestamps together are likelier than each text token, one follows.

    Args:
        suppressed: tokens that never follow.
        suppressed_first: tokens that do not come first, unless there are timestamps.
        latest_first: the number of the latest timestamp that may come first. None without timestamps.
    """

    start: State = START, 0
    measures = True

    def __init__(
        self, tokens: Vocabulary, suppressed: Iterable[int], suppressed_first: Iterable[int], latest_first: int | None
    ) -> None:
        size, times = tokens.lm.backend.vocab_size, tokens.timestamps
        self._end, self._first_time, self._latest_first = tokens.end, times.start, latest_first
        self._has_times = latest_first is not None
        self.together = (times.start, times.stop) if self._has_times else None
        never = packed([*suppressed, tokens.no_timestamps], size)
        self._times = packed([*times], size) & ~never
        self._text = packed([*range(times.start)], size) & ~never
        self._no_text = self._text & ~packed([*range(tokens.end)], size)
        self._first_text = self._text & ~packed([*suppressed_first], size)

    def advance(self, state: State, token: int) -> State | None:
        kind, lowest = state
        if not self.mask(state, 0)[token // 8] >> token % 8 & 1:
            return None
        if not self._has_times or token < self._first_time:
            return TEXT, lowest
        number = token - self._first_time
        return (CLOSED, number) if kind == TEXT else (OPENED, number + 1)

    def mask(self, state: State, vocab_size: int) -> NDArray[np.uint8]:
        kind, lowest = state
        if not self._has_times:
            return self._first_text if kind == START else self._text
        if kind == START:
            return self._times_from(0) & ~self._times_from((self._latest_first or 0) + 1)
        if kind == OPENED:
            return self._text
        return (self._text if kind == TEXT else self._no_text) | self._times_from(lowest)

    def _times_from(self, number: int) -> NDArray[np.uint8]:
        """The timestamps from a number on, as packed bits."""
        place, bit = divmod(self._first_time + number, 8)
        mask = np.zeros_like(self._times)
        mask[place:] = self._times[place:]
        mask[place : place + 1] &= np.uint8(0xFF << bit & 0xFF)
        return mask

    def complete(self, state: State) -> bool:
        return False  # the masks have the end token, too


class WindowSegment(NamedTuple):
    """A segment of a window: its first frame and the one after its last, counted from the window's, and its tokens."""

    start: int
    end: int
    tokens: list[int]


def split(tokens: list[int], times: range, frames: int) -> tuple[list[WindowSegment], int]:
    """The segments of a window's text, and the frames after which the next window begins, as in openai-whisper.

    Two timestamps in a row end one segment and begin the next. What follows the last such pair is not finished, and
    belongs to the next window. A single timestamp at the end says that nobody speaks after it.

    Args:
        tokens: without the end token.
        times: the timestamps.
        frames: of audio in the window.
    """

    def frame(token: int) -> int:
        return FRAMES_PER_TIMESTAMP * (token - times.start)

    is_time = [token >= times.start for token in tokens]
    cuts = [place for place in range(1, len(tokens)) if is_time[place - 1] and is_time[place]]
    if not cuts:
        spoken = [frame(token) for token in tokens if token > times.start]
        return [WindowSegment(0, spoken[-1] if spoken else frames, tokens)], frames
    if is_finished := ends_with_silence(tokens, times):
        cuts.append(len(tokens))
    parts = [tokens[first:end] for first, end in zip([0, *cuts], cuts, strict=False)]
    segments = [WindowSegment(frame(part[0]), frame(part[-1]), part) for part in parts]
    return segments, frames if is_finished else segments[-1].end


def ends_with_silence(tokens: list[int], times: range) -> bool:
    """Whether a text ends with a single timestamp, which says that nobody speaks after it."""
    return [token >= times.start for token in tokens[-2:]] == [False, True]
