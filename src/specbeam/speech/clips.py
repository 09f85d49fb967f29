"""Which parts of a file are transcribed: all of it, the clips that a caller names, or the stretches of speech."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from specbeam.errors import SpecbeamError
from specbeam.speech.log_mel import FRAMES_PER_SECOND, HOP

Piece = tuple[int, int]
"""The first frame of a piece of the file, and the one after its last."""

INEXACT_FRAMES = 50
"""How far off Whisper's timestamps may be, by openai-whisper's rules for words."""


class Clip:
    """Pieces of a file that windows read one after another, as if there was nothing between them.

    Args:
        edge: the frames at the end of a piece that hold no segment of the next one, and the other way round.

    Attributes:
        frames: of all pieces together.
    """

    def __init__(self, pieces: Sequence[Piece], edge: int = 0) -> None:
        self.pieces = [*pieces]
        self._edge = edge
        self._starts = [*accumulate((end - first for first, end in pieces), initial=0)]
        self.frames = self._starts[-1]

    def __repr__(self) -> str:
        return f"Clip({self.pieces})"

    def part(self, first: int, end: int) -> list[Piece]:
        """The pieces of the file that some frames of the clip stand for."""
        pieces = []
        for (start, after), (begin, stop) in zip(pairwise(self._starts), self.pieces, strict=True):
            if start < end and first < after:
                pieces.append((begin + max(0, first - start), min(stop, begin + end - start)))
        return pieces

    def seconds(self, frame: float, is_end: bool = False) -> float:
        """The time in the file of a frame of the clip. Where two pieces meet, an end is in the first of them."""
        frame = min(max(frame, 0), self.frames)
        number = bisect_left(self._starts, frame) - 1 if is_end else bisect_right(self._starts, frame) - 1
        return self._seconds(min(max(number, 0), len(self.pieces) - 1), frame)

    def trimmed(self, first: float, end: float) -> tuple[float, float]:
        """The frames of a segment, without those in a piece where it is not spoken.

        Whisper's timestamps are not exact, and it sees no gap between two pieces: a segment may begin before the end of
        the piece before its own, which may be a minute earlier in the file. So a piece counts if the segment covers
        more than its edge, or half of it. If none does, the one counts of which it covers most.
        """
        if len(self.pieces) == 1:
            return first, end
        covered = [min(end, after) - max(first, start) for start, after in pairwise(self._starts)]
        sizes = [after - start for start, after in pairwise(self._starts)]
        spoken = [n for n, size in enumerate(sizes) if covered[n] > min(self._edge, size / 2)]
        spoken = spoken or [covered.index(max(covered))]
        return max(first, self._starts[spoken[0]]), min(end, self._starts[spoken[-1] + 1])

    def span(self, first: float, end: float, segment: tuple[float, float]) -> tuple[float, float]:
        """The times in the file of a word. It lies in one piece: that of its middle, or of its part in the segment."""
        middle = max(min((first + end) / 2, segment[1] - 1), segment[0])
        middle = min(max(middle, first, 0), end, self.frames)
        number = min(bisect_right(self._starts, middle), len(self.pieces)) - 1
        low, high = self._starts[number : number + 2]
        return self._seconds(number, min(max(first, low), high)), self._seconds(number, min(max(end, low), high))

    def _seconds(self, number: int, frame: float) -> float:
        return round((self.pieces[number][0] + frame - self._starts[number]) / FRAMES_PER_SECOND, 2)


def whole_file(frames: int) -> list[Clip]:
    """All of a file."""
    return [Clip([(0, frames)])] if frames else []


def named_clips(times: Sequence[float], frames: int) -> list[Clip]:
    """The clips that a caller names: the start of each and its end, in seconds. The last end may be left out."""
    points = [round(time * FRAMES_PER_SECOND) for time in times]
    if len(points) % 2:
        points.append(max(frames, points[-1]))
    clips = [*zip(points[::2], points[1::2], strict=True)]
    for start, end in clips:
        if not 0 <= start <= end:
            seconds = f"{start / FRAMES_PER_SECOND:g} to {end / FRAMES_PER_SECOND:g}"
            raise SpecbeamError(f"clip_timestamps has a clip from {seconds} seconds: give start, end, start, end, ...")
    return [Clip([(start, min(end, frames))]) for start, end in clips if start < min(end, frames)]


def spoken_clips(stretches: Iterable[tuple[int, int]], frames: int, window: int, pad: int) -> list[Clip]:
    """Stretches of speech as clips. Short ones are read together, as many as one window holds.

    Args:
        stretches: in samples.
        window: its frames.
        pad: frames of silence at both ends of a stretch.
    """
    clips: list[list[Piece]] = []
    left = 0
    for start, end in stretches:
        first, stop = start // HOP, min(-(-end // HOP), frames)
        if clips and clips[-1][-1][1] > first:  # rounding made them overlap
            first = clips[-1][-1][1]
        if stop <= first:
            continue
        if stop - first > left:
            clips.append([])
            left = window
        clips[-1].append((first, stop))
        left -= stop - first
    return [Clip(pieces, pad + INEXACT_FRAMES) for pieces in clips]
