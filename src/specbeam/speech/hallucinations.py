"""Texts that nobody said: segments of unlikely, very short or very long words with silence around them.

The rule for ``hallucination_silence_threshold`` is faster-whisper's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

MARKS = "\"'“¿([{-\"'.。,，!！?？:：”)]}、"
"""Words that do not count."""
LEAST_PROBABILITY, SHORTEST, LONGEST = 0.15, 0.133, 2.0
"""Words are conspicuous below the first, or if they take less or more seconds than the others."""
WORDS = 8
"""The first words of a segment, which count."""
EDGE = 2.0
"""Seconds at both ends of a window that count as silence."""


class Timed(Protocol):
    """A word with its times in seconds."""

    text: str
    start: float
    end: float
    probability: float


class Heard(NamedTuple):
    """A segment of a window, in seconds."""

    start: float
    end: float
    words: Sequence[Timed]


class Skip(NamedTuple):
    """What is left of a window.

    Attributes:
        kept: how many of its segments are.
        next_start: where the next window begins, in seconds.
        is_all_silence: whether the window begins with silence, so that it is read again behind it.
    """

    kept: int
    next_start: float
    is_all_silence: bool = False


def skip(
    segments: Sequence[Heard], threshold: float, start: float, end: float, window_end: float, whole: float, last: float
) -> Skip | None:
    """What to leave out of a window; None if everything counts.

    Args:
        threshold: silence is at least this long, in seconds.
        start, end: of the sound in the window.
        window_end: where it would end if it was full.
        whole: where the sound ends.
        last: where the speech before the window ends.
    """
    spoken = [number for number, one in enumerate(segments) if one.words]
    for place, number in enumerate(spoken):
        one, following = segments[number], [segments[later] for later in spoken[place + 1 :]][:1]
        if is_conspicuous(one):
            if place == 0 and one.start - start > threshold:
                return Skip(0, one.start, is_all_silence=True)
            next_start = following[0].words[0].start if following else end
            before = one.start - last > threshold or one.start < threshold or one.start - start < EDGE
            after = next_start - one.end > threshold or window_end - one.end < EDGE
            if before and (after or any(map(is_conspicuous, following))):
                return Skip(number, whole if whole - one.end < threshold else max(start + 1, one.start))
        last = one.end
    return None


def is_conspicuous(segment: Heard) -> bool:
    """Whether nobody may have said a segment."""
    words = [word for word in segment.words if word.text not in MARKS][:WORDS]
    score = sum(map(_strangeness, words))
    return score >= 3 or score + 0.01 >= len(words)


def _strangeness(word: Timed) -> float:
    seconds = word.end - word.start
    short, long = max(0.0, SHORTEST - seconds) * 15, max(0.0, seconds - LONGEST)
    return (word.probability < LEAST_PROBABILITY) + short + long
