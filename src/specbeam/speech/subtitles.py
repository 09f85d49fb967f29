"""Transcripts as files: txt, srt, vtt, tsv and json, as openai-whisper writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from specbeam.errors import not_allowed, wrong_value

if TYPE_CHECKING:
    from specbeam.speech.transcript import Segment, Transcript, Word

LONG_PAUSE = 3.0
"""Seconds between the starts of two words. A new subtitle begins there if lines are counted."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How words become subtitles, with openai-whisper's names. Without any of these a segment is a subtitle.

    Attributes:
        highlight_words: show each subtitle once for each of its words, which is underlined while it is spoken.
        max_line_width: the characters of a line.
        max_line_count: the lines of a subtitle. With a width, subtitles are filled across segments.
        max_words_per_line: the words of a subtitle.

    Raises:
        SpecbeamError: a number that is not at least 1, or two that do not go together.
    """

    highlight_words: bool = False
    max_line_width: int | None = None
    max_line_count: int | None = None
    max_words_per_line: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_line_width", "max_line_count", "max_words_per_line"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise not_allowed(name, value, "at least 1")
        if self.max_line_count is not None and self.max_line_width is None:
            raise wrong_value("max_line_count", self.max_line_count, "needs max_line_width")
        if self.max_words_per_line is not None and self.max_line_width is not None:
            says = "and max_line_width do not go together: leave one out"
            raise wrong_value("max_words_per_line", self.max_words_per_line, says)


PLAIN = Layout()


class Cue(NamedTuple):
    """A text and when it is shown, in seconds."""

    start: float
    end: float
    text: str


def cues(segments: Iterable[Segment], layout: Layout) -> Iterator[Cue]:
    """The subtitles of segments. All layouts but the plain one need words."""
    if layout == PLAIN:
        for segment in segments:
            yield Cue(segment.start, segment.end, segment.text.strip())
        return
    for words in _filled(segments, layout):
        cue = Cue(words[0].start, words[-1].end, "".join(word.word for word in words))
        if not layout.highlight_words:
            yield cue
            continue
        last = cue.start
        for index, word in enumerate(words):
            if _milliseconds(last) != _milliseconds(word.start):
                yield cue._replace(start=last, end=word.start)
            texts = [one.word for one in words]
            texts[index] = re.sub(r"^(\s*)(.*)$", r"\1<u>\2</u>", word.word)
            yield Cue(word.start, word.end, "".join(texts))
            last = word.end


def _filled(segments: Iterable[Segment], layout: Layout) -> Iterator[list[Word]]:
    """The words of each subtitle. Where a line begins, the space before a word is a line break, or nothing."""
    crosses = layout.max_line_count is not None
    width, maximum = layout.max_line_width or 1000, layout.max_words_per_line or 1000
    subtitle, used, lines, before = list["Word"](), 0, 1, None
    for segment in segments:
        for number, word in enumerate(segment.words or ()):
            has_paused = crosses and before is not None and word.start - before > LONG_PAUSE
            begins = not crosses and number % maximum == 0 and bool(subtitle)
            before = word.start
            if used and used + len(word.word) <= width and not has_paused and not begins:
                used += len(word.word)
                subtitle.append(word)
                continue
            text = word.word.strip()
            if begins or (subtitle and crosses and (has_paused or lines >= (layout.max_line_count or 1))):
                yield subtitle
                subtitle, lines = [], 1
            elif used:
                lines, text = lines + 1, f"\n{text}"
            subtitle.append(replace(word, word=text))
            used = len(text.strip())
    if subtitle:
        yield subtitle


def txt(segments: Iterable[Segment], layout: Layout = PLAIN) -> Iterator[str]:
    """One line for each segment."""
    for segment in segments:
        yield f"{segment.text.strip()}\n"


def srt(segments: Iterable[Segment], layout: Layout = PLAIN) -> Iterator[str]:
    """SubRip: numbers, times and texts."""
    for number, cue in enumerate(cues(segments, layout), 1):
        yield f"{number}\n{_written(cue, hours=True, point=',')}\n"


def vtt(segments: Iterable[Segment], layout: Layout = PLAIN) -> Iterator[str]:
    """WebVTT."""
    yield "WEBVTT\n\n"
    for cue in cues(segments, layout):
        yield f"{_written(cue)}\n"


def tsv(segments: Iterable[Segment], layout: Layout = PLAIN) -> Iterator[str]:
    """Tab-separated values: start and end in milliseconds, and the text."""
    yield "start\tend\ttext\n"
    for segment in segments:
        text = segment.text.strip().replace("\t", " ")
        yield f"{_milliseconds(segment.start)}\t{_milliseconds(segment.end)}\t{text}\n"


Write = Callable[[Iterable["Segment"], Layout], Iterator[str]]
STREAMED: dict[str, Write] = {"txt": txt, "srt": srt, "vtt": vtt, "tsv": tsv}
"""The formats whose text can be written while segments come. Each piece ends with a line."""


def document(transcript: Transcript) -> dict[str, Any]:
    """The object of the json format: the transcript, with a number for each segment."""
    whole = transcript.to_dict()
    segments = [{"id": number, **segment} for number, segment in enumerate(whole["segments"])]
    return whole | {"segments": segments}


def written(transcript: Transcript, form: str, layout: Layout = PLAIN) -> str:
    """A whole transcript in one of the formats. The layout is that of srt and vtt."""
    if form == "json":
        return json.dumps(document(transcript), ensure_ascii=False) + "\n"
    return "".join(STREAMED[form](transcript.segments, layout))


def _written(cue: Cue, hours: bool = False, point: str = ".") -> str:
    """The times of a subtitle, and below them its text, in which no arrow of times may occur."""
    times = f"{_clock(cue.start, hours, point)} --> {_clock(cue.end, hours, point)}"
    return f"{times}\n{cue.text.replace('-->', '->')}\n"


def _clock(seconds: float, always_hours: bool, point: str) -> str:
    rest, milliseconds = divmod(_milliseconds(seconds), 1000)
    rest, second = divmod(rest, 60)
    hour, minute = divmod(rest, 60)
    return f"{f'{hour:02}:' if always_hours or hour else ''}{minute:02}:{second:02}{point}{milliseconds:03}"


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
