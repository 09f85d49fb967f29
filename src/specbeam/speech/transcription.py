"""Transcription of files: which parts of them are read, in which language, and in which order their text comes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, BinaryIO, overload

import numpy as np

from specbeam.engine import Engine
from specbeam.engine.drafts import Draft, check_draft, load_draft
from specbeam.models.model import LanguageModel
from specbeam.models.prompts import as_list
from specbeam.options.generation_defaults import GenerationDefaults
from specbeam.options.options import Options
from specbeam.speech.audio import Samples, load
from specbeam.speech.av_decoder import SAMPLE_RATE
from specbeam.speech.clips import Clip, named_clips, spoken_clips, whole_file
from specbeam.speech.log_mel import FRAMES_PER_SECOND, LogMel
from specbeam.speech.requests import Steps, Task, run_together
from specbeam.speech.settings import Settings
from specbeam.speech.transcript import Segment, Transcript
from specbeam.speech.vocabulary import Vocabulary
from specbeam.speech.windows import Transcriber, Windows, detect_language, window

Audio = str | os.PathLike[str] | BinaryIO | Samples | Any
"""A path, a binary file, or samples at 16 kHz."""
MAX_REQUESTS = 8
"""Windows that share passes."""


@overload
def transcribe(
    lm: LanguageModel,
    audio: Sequence[Audio],
    language: str | None = None,
    task: str = "transcribe",
    num_beams: int = 5,
    *,
    draft: Draft | None = None,
    **options: Any,
) -> list[Transcript]: ...
@overload
def transcribe(
    lm: LanguageModel,
    audio: Audio,
    language: str | None = None,
    task: str = "transcribe",
    num_beams: int = 5,
    *,
    draft: Draft | None = None,
    **options: Any,
) -> Transcript: ...
def transcribe(
    lm: LanguageModel,
    audio: Any,
    language: str | None = None,
    task: str = "transcribe",
    num_beams: int = 5,
    *,
    draft: Draft | None = None,
    **options: Any,
) -> Transcript | list[Transcript]:
    """Transcribe a file, or several.

    Args:
        lm: a Whisper model that :func:`specbeam.load` returned.
        audio: a path, a binary file, or samples at 16 kHz (int16, or float32 from -1 to 1), or a list of these. Files
            need the extra ``speech``.
        language: the spoken language, such as "en" or "English". None: each file has the likeliest in its first window.
        task: "transcribe", or "translate" into English.
        num_beams: the beams of beam search; 1 for greedy search.
        draft: another Whisper with the same vocabulary, or its source; "ngram" or "suffix", which look into the text of
            the file so far; or what else :func:`specbeam.generate` takes. It changes no text and no score.
        options: the other fields of :class:`specbeam.speech.Settings`, with faster-whisper's names.

    Returns:
        A :class:`specbeam.speech.Transcript`; for a list of files a list of them in the same order. A file's transcript
        does not depend on the other files.

    Raises:
        SpecbeamError: no Whisper model, a file that cannot be read, an option that is not known or that cannot be
            honoured, too many hotwords, a draft with another vocabulary or other features.
    """
    settings = Settings.of({**options, "language": language, "task": task, "num_beams": num_beams})
    is_one = hasattr(audio, "read") or (isinstance(audio, np.ndarray) and audio.dtype.kind not in "OUT")
    several = isinstance(listed := audio if is_one else as_list(audio), list)
    files = [_File(one, number) for number, one in enumerate(listed if several else [audio])]
    for _ in _run(Transcriber.of(Vocabulary.of(lm), settings), files, _checked(lm, draft)):
        pass
    transcripts = [file.transcript for file in files]
    return transcripts if several else transcripts[0]


def transcribe_stream(
    lm: LanguageModel,
    audio: Audio,
    language: str | None = None,
    task: str = "transcribe",
    num_beams: int = 5,
    *,
    draft: Draft | None = None,
    engine: Engine | None = None,
    check: Callable[[], object] | None = None,
    **options: Any,
) -> TranscriptStream:
    """Transcribe a file. Its segments come as soon as they are final, in their order.

    Args:
        engine: one that :func:`speech_engine` made, to share with others. Arguments else as for :func:`transcribe`.
        check: called while speech is looked for, every 8 seconds of audio. An error of it ends the stream.
    """
    settings = Settings.of({**options, "language": language, "task": task, "num_beams": num_beams})
    file = _File(audio, 0, check)
    transcriber = Transcriber.of(Vocabulary.of(lm), settings)
    return TranscriptStream(file, _run(transcriber, [file], _checked(lm, draft), engine))


class TranscriptStream(Iterator[Segment]):
    """The segments of a file, as they come."""

    def __init__(self, file: _File, segments: Iterator[tuple[_File, Segment]]) -> None:
        self._file, self._segments = file, segments

    def __next__(self) -> Segment:
        return next(self._segments)[1]

    @property
    def transcript(self) -> Transcript:
        """What is known so far. Its language and its duration are there with the first segment."""
        return self._file.transcript


def speech_engine(lm: LanguageModel, **limits: Any) -> Engine:
    """An engine for transcription: what a checkpoint suppresses by default is an option here.

    Args:
        limits: arguments of :class:`specbeam.Engine`.
    """
    return Engine(replace(lm, generation_defaults=GenerationDefaults()), **limits)


class _File:
    """A file that is being transcribed.

    Args:
        number: among the files of the call.
        check: as for :func:`transcribe_stream`.

    Attributes:
        transcript: its final segments so far.
    """

    def __init__(self, audio: Audio, number: int, check: Callable[[], object] | None = None) -> None:
        self._audio, self.number, self._check = audio, number, check
        self.transcript = Transcript(None, 1.0, 0.0)
        self._parts: list[deque[Segment | None]] = []  # segments that may still move, and None at the end of each
        self._shown = 0  # parts whose segments are all final

    def steps(self, transcriber: Transcriber) -> Steps:
        """Read the file, find the language, and begin the parts."""
        settings, vocabulary = transcriber.settings, transcriber.vocabulary
        samples = load(self._audio)
        mel = LogMel(samples, transcriber.mel_bins)
        chains = _chains(samples, mel, transcriber, self._check)
        first, probability = None, 1.0
        language = settings.language if vocabulary.is_multilingual else "en"
        if language is None and chains:
            clip = chains[0][0]
            first = window(transcriber, mel, clip, 0, min(transcriber.frames, clip.frames))
            language, probability = yield from detect_language(transcriber, first)
        self.transcript = Transcript(language, probability, len(samples) / SAMPLE_RATE)
        tasks, transcribed = [], list[int]()
        for part, clips in enumerate(chains):
            tasks.append(
                Task(Windows(transcriber, mel, clips, language, first, transcribed).segments(), self.number, part)
            )
            first = None
        self._parts = [deque() for _ in tasks]
        yield tasks

    def final(self, part: int | None, segment: Segment | None) -> Iterator[Segment]:
        """Take in a segment of a part, or its end. Yields final segments: no other can come before them any more."""
        if part is not None:
            self._parts[part].append(segment)
        while self._shown < len(self._parts) and self._parts[self._shown]:
            if (following := self._parts[self._shown].popleft()) is None:
                self._shown += 1
            else:
                self.transcript.segments.append(following)
                yield following


def _checked(lm: LanguageModel, draft: Draft | None) -> Draft | None:
    """The draft that a caller means, refused before a file is read if it cannot draft for the model."""
    loaded: Draft | None = load_draft(lm, draft)
    check_draft(lm, loaded, Options())
    return loaded


def _run(
    transcriber: Transcriber, files: Sequence[_File], draft: Draft | None, engine: Engine | None = None
) -> Iterator[tuple[_File, Segment]]:
    """Transcribe files together. Yields the segments of each in their order."""
    lm = transcriber.vocabulary.lm
    engine = engine or speech_engine(lm, max_requests=MAX_REQUESTS)
    tasks = (Task(file.steps(transcriber), file.number) for file in files)
    for task, segment in run_together(engine, tasks, MAX_REQUESTS, draft):
        file = files[task.file]
        for final in file.final(task.part, segment):
            yield file, final


def _chains(
    samples: Samples, mel: LogMel, transcriber: Transcriber, check: Callable[[], object] | None
) -> list[list[Clip]]:
    """The clips of a file, in chains whose windows follow each other. Chains do not depend on each other."""
    settings = transcriber.settings
    if settings.clip_timestamps is not None:
        clips = named_clips(settings.clip_timestamps, mel.frames)
        return [clips] if clips else []
    if not settings.vad_filter:
        clips = whole_file(mel.frames)
        return [clips] if clips else []
    from specbeam.speech.vad import SPEECH_PAD_MS, stretches  # it is an extra

    parameters = settings.vad_parameters or {}
    speech = stretches(samples, check=check, **parameters)
    pad = parameters.get("speech_pad_ms", SPEECH_PAD_MS) * FRAMES_PER_SECOND // 1000
    return [[clip] for clip in spoken_clips(speech, mel.frames, transcriber.frames, pad)]
