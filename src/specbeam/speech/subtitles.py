"""Transcripts as files: txt, srt, vtt, tsv and json, as openai-whisper writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specbeam.speech.results import Segment, Transcript


def txt(segments: Iterable[Segment]) -> Iterator[str]:
    """One line for each segment."""
    for segment in segments:
        yield f"{segment.text.strip()}\n"


def srt(segments: Iterable[Segment]) -> Iterator[str]:
    """SubRip: numbers, times and texts."""
    for number, segment in enumerate(segments, 1):
        yield f"{number}\n{_cue(segment, hours=True, point=',')}\n"


def vtt(segments: Iterable[Segment]) -> Iterator[str]:
    """WebVTT."""
    yield "WEBVTT\n\n"
    for segment in segments:
        yield f"{_cue(segment)}\n"


def tsv(segments: Iterable[Segment]) -> Iterator[str]:
    """Tab-separated values: start and end in milliseconds, and the text."""
    yield "start\tend\ttext\n"
    for segment in segments:
        text = segment.text.strip().replace("\t", " ")
        yield f"{_milliseconds(segment.start)}\t{_milliseconds(segment.end)}\t{text}\n"


STREAMED: dict[str, Callable[[Iterable[Segment]], Iterator[str]]] = {"txt": txt, "srt": srt, "vtt": vtt, "tsv": tsv}
"""The formats whose text can be written while segments come. Each piece ends with a line."""


def document(transcript: Transcript) -> dict[str, Any]:
    """The object of the json format: the transcript, with a number for each segment."""
    whole = transcript.to_dict()
    segments = [{"id": number, **segment} for number, segment in enumerate(whole["segments"])]
    return whole | {"segments": segments}


def written(transcript: Transcript, form: str) -> str:
    """A whole transcript in one of the formats."""
    if form == "json":
        return json.dumps(document(transcript), ensure_ascii=False) + "\n"
    return "".join(STREAMED[form](transcript.segments))


def _cue(segment: Segment, hours: bool = False, point: str = ".") -> str:
    """The times of a segment, and below them its text, in which no arrow of times may occur."""
    times = f"{_clock(segment.start, hours, point)} --> {_clock(segment.end, hours, point)}"
    return f"{times}\n{segment.text.strip().replace('-->', '->')}\n"


def _clock(seconds: float, always_hours: bool, point: str) -> str:
    rest, milliseconds = divmod(_milliseconds(seconds), 1000)
    rest, second = divmod(rest, 60)
    hour, minute = divmod(rest, 60)
    return f"{f'{hour:02}:' if always_hours or hour else ''}{minute:02}:{second:02}{point}{milliseconds:03}"


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
