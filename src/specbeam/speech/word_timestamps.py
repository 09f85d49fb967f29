"""The words of a window's text and their times, by the rules of openai-whisper (``timing.py``, ``tokenizer.py``)."""

from __future__ import annotations

import string
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from specbeam.engine.features import Sound
from specbeam.speech.alignment import Heads, Listen
from specbeam.speech.clips import Clip
from specbeam.speech.log_mel import FRAMES_PER_SECOND
from specbeam.speech.requests import Attempt
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
class Spoken:
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
class Found:
    """The segments of a window with their words.

    Attributes:
        next_frame: of the clip, where the next window begins, if what is left out as never said decides that.
        is_silent_first: whether the window counts for nothing, and is read again behind its silence.
    """

    segments: list[Spoken]
    next_frame: int | None = None
    is_silent_first: bool = False


@dataclass
class WordFinder:
    """Finds the words of windows, one after another.

    It counts seconds from the start of the file, as if there was nothing between the pieces of a clip.

    Attributes:
        heads: of cross-attention that follow the sound.
        begin: the tokens that begin a prompt, up to the task.
        by_spaces: whether spaces part words.
        window: the most frames of a window.
        last_end: of the words so far, in seconds. The first words after a pause may not last too long.
        last_frame: the same, in frames of the clip.
    """

    vocabulary: Vocabulary
    settings: Settings
    heads: Heads
    begin: list[int]
    by_spaces: bool
    window: int
    last_end: float = 0.0
    last_frame: int = 0

    def find(
        self, sound: Sound, segments: list[Spoken], clip: Clip, start: int, frames: int
    ) -> Generator[Attempt, Any, Found]:
        """Find the words of a window's segments, and fit the times of both to each other.

        Args:
            start, frames: where the window begins in the clip, and how many frames it has.

        Yields:
            What is asked of the engine.
        """
        own = [[token for token in one.tokens if token < self.vocabulary.end] for one in segments]
        spoken = yield from self._timings(sound, own, frames)
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

        found, heard, before = [], list[Heard](), self.last_end
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
            found.append(Spoken(frame(begin), frame(end), segment.tokens, listed))
            heard.append(Heard(begin, end, words))
        if not timings:
            self.last_end = end
        self.last_frame = round(frame(self.last_end))
        if (threshold := self.settings.hallucination_silence_threshold) is None:
            return Found(found)
        end, window_end, whole = (offset + n / FRAMES_PER_SECOND for n in (frames, self.window, clip.frames - start))
        if (skipped := skip(heard, threshold, offset, end, window_end, whole, before)) is None:
            return Found(found)
        kept = heard[: skipped.kept]
        ends_of_words = [one.words[-1].end for one in kept if one.words]
        self.last_end = (ends_of_words or [one.end for one in kept] or [before])[-1]
        return Found(found[: skipped.kept], max(start + 1, round(frame(skipped.next_start))), skipped.is_all_silence)

    def _timings(
        self, sound: Sound, segments: list[list[int]], frames: int
    ) -> Generator[Attempt, Any, list[list[Timing]]]:
        """The words of each segment of a text, with times from the start of its window.

        Args:
            segments: the tokens of text of each.
        """
        text = [token for segment in segments for token in segment]
        if not text:
            return [[] for _ in segments]
        positions = max(1, frames // FRAMES_PER_TIMESTAMP)
        end, listen = self.vocabulary.end, Listen(self.heads, len(self.begin), text, self.vocabulary.end, positions)
        prompt = [*self.begin, self.vocabulary.no_timestamps, *text, end]
        yield Attempt(sound, prompt, {"max_new_tokens": 1, "eos_token_id": end}, listen, writes=False, drafts=False)
        times, found, first = listen.times(), list[list[Timing]](), 0
        for segment in segments:
            found.append([])
            for word, tokens in split_words(segment, self.vocabulary.decode, self.by_spaces):
                last = first + len(tokens)
                mean = float(np.mean(listen.probabilities[first:last]))
                found[-1].append(Timing(word, tokens, float(times[first]), float(times[last]), mean))
                first = last
        return found


def split_words(tokens: list[int], decode: Callable[[list[int]], str], by_spaces: bool) -> list[tuple[str, list[int]]]:
    """The words of tokens of text, each with its tokens.

    A word begins with a space. Punctuation marks are words, and become parts of others later.

    Args:
        decode: the text of tokens, in which U+FFFD stands for a part of a character.
        by_spaces: else each token, or several that make a character together, is a word.
    """
    pieces, waiting, whole, place = list[tuple[str, list[int]]](), list[int](), decode(tokens), 0
    for number, token in enumerate(tokens, 1):
        waiting.append(token)
        text = decode(waiting)
        at = text.find(UNKNOWN)  # it may be a part of a character, unless the whole text has it there, too
        if at < 0 or number == len(tokens) or whole[place + at : place + at + 1] == UNKNOWN:
            pieces.append((text, waiting))
            waiting, place = [], place + len(text)
    if not by_spaces:
        return pieces
    words = list[tuple[str, list[int]]]()
    for text, own in pieces:
        if not words or text.startswith(" ") or text.strip() in string.punctuation:
            words.append((text, own))
        else:
            words[-1] = words[-1][0] + text, words[-1][1] + own
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
    for place in range(len(timings) - 2, -1, -1):
        mark, word = timings[place], timings[following]
        if mark.text.startswith(" ") and mark.text.strip() in prepended:
            word.text, word.tokens = mark.text + word.text, mark.tokens + word.tokens
            mark.text, mark.tokens = "", []
        else:
            following = place
    before = 0
    for place in range(1, len(timings)):
        word, mark = timings[before], timings[place]
        if not word.text.endswith(" ") and mark.text in appended:
            word.text, word.tokens = word.text + mark.text, word.tokens + mark.tokens
            mark.text, mark.tokens = "", []
        else:
            before = place


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
