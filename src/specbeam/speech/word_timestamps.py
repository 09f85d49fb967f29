"""The words of a window's text and their times, by the rules of openai-whisper (``timing.py``, ``tokenizer.py``).

Segments of unlikely, very short or very long words with silence around them are hallucinations, which faster-whisper's
rule for ``hallucination_silence_threshold`` leaves out.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specbeam.engine.shared_source import SharedSource
from specbeam.speech.alignment import AlignmentHeads, AlignText
from specbeam.speech.clips import Clip
from specbeam.speech.log_mel import FRAMES_PER_SECOND
from specbeam.speech.requests import WindowRequest
from specbeam.speech.timestamps import FRAMES_PER_TIMESTAMP, SECONDS_PER_TIMESTAMP
from specbeam.speech.transcript import Word
from specbeam.speech.vocabulary import Vocabulary

if TYPE_CHECKING:
    from specbeam.speech.settings import Settings

WITHOUT_SPACES = ("zh", "ja", "th", "lo", "my", "yue")
"""Languages without spaces between words: each character that ends with a token counts as one."""
SENTENCE_ENDS = ".。!！?？"
LONGEST_MEDIAN = 0.7
"""Seconds."""
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
LEAST_PROBABILITY, SHORTEST, LONGEST = 0.15, 0.133, 2.0
"""A word is conspicuous below this probability, or if it takes less or more seconds than these."""
IGNORED_MARKS = "\"'“¿([{-\"'.。,，!！?？:：”)]}、"
FIRST_WORDS = 8
"""The words of a segment that count, without those marks."""
EDGE = 2.0
"""Seconds at both ends of a window that count as silence."""


@dataclass
class Timing:
    """A word while its times are found. Without text and tokens it has become a part of another one.

    Attributes:
        start, end: in seconds, first from the start of the window, then from that of the file.
        probability: the mean of its tokens'.
    """

    text: str
    tokens: list[int]
    start: float
    end: float
    probability: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class TimedSegment:
    """A segment of a text.

    Attributes:
        start, end: in frames of the clip.
        words: None if nobody asks for them.
    """

    start: float
    end: float
    tokens: list[int]
    words: list[Word] | None = None


@dataclass
class WindowWords:
    """The segments of a window with their words.

    Attributes:
        next_frame: of the clip, where the next window begins, if a hallucination that is left out decides that.
        starts_with_silence: whether the window counts for nothing, and is read again behind its silence.
    """

    segments: list[TimedSegment]
    next_frame: int | None = None
    starts_with_silence: bool = False


class SegmentTiming(NamedTuple):
    """A segment of a window, in seconds."""

    start: float
    end: float
    words: Sequence[Timing]


class Skip(NamedTuple):
    """What is left of a window.

    Attributes:
        kept: how many of its segments are.
        next_start: where the next window begins, in seconds.
        starts_with_silence: whether the window begins with silence, so that it is read again behind it.
    """

    kept: int
    next_start: float
    starts_with_silence: bool = False


@dataclass
class WordFinder:
    """Finds the words of windows, one after another.

    It counts seconds from the start of the file, as if there was nothing between the pieces of a clip.

    Attributes:
        heads: alignment heads.
        begin: the tokens that begin a prompt, up to the task.
        by_spaces: whether spaces part words.
        window: the maximum number of frames of a window.
        last_end: of the words so far, in seconds. The first words after a pause may not last too long.
        last_frame: the same, in frames of the clip.
    """

    vocabulary: Vocabulary
    settings: Settings
    heads: AlignmentHeads
    begin: list[int]
    by_spaces: bool
    window: int
    last_end: float = 0.0
    last_frame: int = 0

    def find(
        self, features: SharedSource, segments: list[TimedSegment], clip: Clip, start: int, frames: int
    ) -> Generator[WindowRequest, Any, WindowWords]:
        """Find the words of a window's segments, and fit the times of both to each other.

        Args:
            start, frames: where the window begins in the clip, and how many frames it has.

        Yields:
            What is asked of the engine.
        """
        text = [[token for token in one.tokens if token < self.vocabulary.end] for one in segments]
        spoken = yield from self._timings(features, text, frames)
        timings = [timing for some in spoken for timing in some]
        durations = [timing.seconds for timing in timings if timing.seconds]
        median = min(LONGEST_MEDIAN, float(np.median(durations)) if durations else 0.0)
        if durations:
            shorten_at_sentence_ends(timings, 2 * median)
        for some in spoken:  # no word lies in two segments
            merge_punctuation(some, self.settings.prepend_punctuations, self.settings.append_punctuations)
        first_frame = clip.pieces[0][0]
        offset = (first_frame + start) / FRAMES_PER_SECOND

        def seconds(frame: float) -> float:
            return offset + SECONDS_PER_TIMESTAMP * ((frame - start) / FRAMES_PER_TIMESTAMP)

        def frame(seconds: float) -> float:
            return round(seconds * FRAMES_PER_SECOND, 3) - first_frame

        timed, segment_timings, before = [], list[SegmentTiming](), self.last_end
        last_end = before
        for segment, some in zip(segments, spoken, strict=True):
            words = [timing for timing in some if timing.text]
            for word in words:
                word.start, word.end = round(offset + word.start, 2), round(offset + word.end, 2)
            begin, end = seconds(segment.start), seconds(segment.end)
            if words:
                begin, end = fit(words, begin, end, last_end, median)
                last_end, self.last_end = end, words[-1].end
            spoken_in = segment.start, segment.end
            spans = [clip.span(frame(one.start), frame(one.end), spoken_in) for one in words]
            listed = [Word(one.text, *span, one.probability) for one, span in zip(words, spans, strict=True)]
            timed.append(TimedSegment(frame(begin), frame(end), segment.tokens, listed))
            segment_timings.append(SegmentTiming(begin, end, words))
        if not timings:
            self.last_end = end
        self.last_frame = round(frame(self.last_end))
        if (threshold := self.settings.hallucination_silence_threshold) is None:
            return WindowWords(timed)
        end, window_end, audio_end = (
            offset + n / FRAMES_PER_SECOND for n in (frames, self.window, clip.frames - start)
        )
        if (skipped := skip(segment_timings, threshold, offset, end, window_end, audio_end, before)) is None:
            return WindowWords(timed)
        kept = segment_timings[: skipped.kept]
        ends_of_words = [one.words[-1].end for one in kept if one.words]
        self.last_end = (ends_of_words or [one.end for one in kept] or [before])[-1]
        return WindowWords(
            timed[: skipped.kept], max(start + 1, round(frame(skipped.next_start))), skipped.starts_with_silence
        )

    def _timings(
        self, features: SharedSource, segments: list[list[int]], frames: int
    ) -> Generator[WindowRequest, Any, list[list[Timing]]]:
        """The words of each segment of a text, with times from the start of its window."""
        text = [token for segment in segments for token in segment]
        if not text:
            return [[] for _ in segments]
        positions = max(1, frames // FRAMES_PER_TIMESTAMP)
        end = self.vocabulary.end
        alignment = AlignText(self.heads, len(self.begin), text, end, positions)
        prompt = [*self.begin, self.vocabulary.no_timestamps, *text, end]
        yield WindowRequest(
            features, prompt, {"max_new_tokens": 1, "eos_token_id": end}, alignment, writes=False, drafts=False
        )
        times, timings, first = alignment.times(), list[list[Timing]](), 0
        for segment in segments:
            timings.append([])
            for word, tokens in split_words(segment, self.vocabulary.decode, self.by_spaces):
                last = first + len(tokens)
                mean = float(np.mean(alignment.probabilities[first:last]))
                timings[-1].append(Timing(word, tokens, float(times[first]), float(times[last]), mean))
                first = last
        return timings


def split_words(tokens: list[int], decode: Callable[[list[int]], str], by_spaces: bool) -> list[tuple[str, list[int]]]:
    """The words of tokens of text, each with its tokens.

    A word begins with a space. Punctuation marks are words, and become parts of others later.

    Args:
        decode: the text of tokens, in which U+FFFD stands for a part of a character.
        by_spaces: else each token, or several that make a character together, is a word.
    """
    pieces, waiting, full_text, index = list[tuple[str, list[int]]](), list[int](), decode(tokens), 0
    for number, token in enumerate(tokens, 1):
        waiting.append(token)
        text = decode(waiting)
        at = text.find(UNKNOWN)  # it may be a part of a character, unless the whole text has it there, too
        if at < 0 or number == len(tokens) or full_text[index + at : index + at + 1] == UNKNOWN:
            pieces.append((text, waiting))
            waiting, index = [], index + len(text)
    if not by_spaces:
        return pieces
    words = list[tuple[str, list[int]]]()
    for text, of_piece in pieces:
        if not words or text.startswith(" ") or text.strip() in string.punctuation:
            words.append((text, of_piece))
        else:
            words[-1] = words[-1][0] + text, words[-1][1] + of_piece
    return words


def shorten_at_sentence_ends(timings: list[Timing], longest: float) -> None:
    """Shorten marks that end a sentence, and the words after them. A pause lies there."""
    for before, timing in pairwise(timings):
        if timing.seconds > longest:
            if timing.text in SENTENCE_ENDS:
                timing.end = timing.start + longest
            elif before.text in SENTENCE_ENDS:
                timing.start = timing.end - longest


def merge_punctuation(timings: list[Timing], prepended: str, appended: str) -> None:
    """Make punctuation marks a part of the word that they belong to, which keeps its times.

    Args:
        prepended: marks that belong to the next word, behind a space.
        appended: marks that belong to the word before.
    """
    following = len(timings) - 1
    for index in range(len(timings) - 2, -1, -1):
        mark, word = timings[index], timings[following]
        if mark.text.startswith(" ") and mark.text.strip() in prepended:
            word.text, word.tokens = mark.text + word.text, mark.tokens + word.tokens
            mark.text, mark.tokens = "", []
        else:
            following = index
    before = 0
    for index in range(1, len(timings)):
        word, mark = timings[before], timings[index]
        if not word.text.endswith(" ") and mark.text in appended:
            word.text, word.tokens = word.text + mark.text, word.tokens + mark.tokens
            mark.text, mark.tokens = "", []
        else:
            before = index


def fit(words: list[Timing], start: float, end: float, last_end: float, median: float) -> tuple[float, float]:
    """Fit the words of a segment to its times, or the segment to its words.

    Args:
        start, end: of the segment.
        last_end: of the segments before.
        median: of the durations of words.

    Returns:
        The start and the end of the segment.
    """
    first, last, longest = words[0], words[-1], 2 * median
    second = words[1] if len(words) > 1 else None
    too_long = first.seconds > longest or (second is not None and second.end - first.start > 2 * longest)
    if first.end - last_end > 4 * median and too_long:  # after a pause
        if second is not None and second.seconds > longest:
            first.end = second.start = max(second.end / 2, second.end - longest)
        first.start = max(0, first.end - longest)
    if start < first.end and start - 0.5 > first.start:
        first.start = max(0, min(first.end - median, start))
    else:
        start = first.start
    if end > last.start and end + 0.5 < last.end:
        last.end = max(last.start + median, end)
    else:
        end = last.end
    return start, end


def skip(
    segments: Sequence[SegmentTiming],
    threshold: float,
    start: float,
    end: float,
    window_end: float,
    audio_end: float,
    last: float,
) -> Skip | None:
    """What to leave out of a window; None if everything counts.

    Args:
        threshold: silence is at least this long, in seconds.
        start, end: of the audio in the window.
        window_end: where it would end if it was full.
        audio_end: in the clip.
        last: where the speech before the window ends.
    """
    spoken = [number for number, one in enumerate(segments) if one.words]
    for index, number in enumerate(spoken):
        one, following = segments[number], [segments[later] for later in spoken[index + 1 :]][:1]
        if is_conspicuous(one):
            if index == 0 and one.start - start > threshold:
                return Skip(0, one.start, starts_with_silence=True)
            next_start = following[0].words[0].start if following else end
            before = one.start - last > threshold or one.start < threshold or one.start - start < EDGE
            after = next_start - one.end > threshold or window_end - one.end < EDGE
            if before and (after or any(map(is_conspicuous, following))):
                return Skip(number, audio_end if audio_end - one.end < threshold else max(start + 1, one.start))
        last = one.end
    return None


def is_conspicuous(segment: SegmentTiming) -> bool:
    """Whether a segment may be a hallucination."""
    words = [word for word in segment.words if word.text not in IGNORED_MARKS][:FIRST_WORDS]
    score = sum(map(_strangeness, words))
    return score >= 3 or score + 0.01 >= len(words)


def _strangeness(word: Timing) -> float:
    seconds = word.end - word.start
    short, long = max(0.0, SHORTEST - seconds) * 15, max(0.0, seconds - LONGEST)
    return (word.probability < LEAST_PROBABILITY) + short + long
