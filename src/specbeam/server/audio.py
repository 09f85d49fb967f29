"""``/v1/audio/transcriptions`` and ``/v1/audio/translations``: the text of an audio file that a client sends.

A file is decoded by a child process with limits (:mod:`specbeam.speech.audio`). Its windows are requests to the engine
of the model, among the requests of others. A thread submits them, since each window depends on the one before.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import UploadFile
from starlette.responses import PlainTextResponse, Response

from specbeam.engine import Engine
from specbeam.engine import Request as EngineRequest
from specbeam.errors import SpecbeamError
from specbeam.server.errors import Refusal, refusal_of, validated
from specbeam.server.http import frame, json_response, to_json
from specbeam.server.limits import Limits
from specbeam.server.models import ServedModel
from specbeam.server.tokens import token_log_prob
from specbeam.speech import Segment, Transcript, TranscriptStream, transcribe_stream
from specbeam.speech.audio import begin
from specbeam.speech.subtitles import written
from specbeam.speech.vocabulary import Vocabulary

T = TypeVar("T")
MAX_AT_ONCE = 8
"""Files that are transcribed at a time. All further files wait."""
MAX_FIELDS, MAX_FIELD_BYTES = 64, 1 << 16
FRAMES_PER_SECOND = 100
UNDETERMINED = "und"
"""The code of ISO 639-2 for the language of silence. Clients of OpenAI expect a text."""
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it warns of clients' mistakes, which are answered
PositiveInteger = Annotated[int, Field(ge=1, lt=2**31)]


class TranscriptionRequest(BaseModel):
    """The fields of a form beside the file: OpenAI's, and specbeam's after them. All of them come as texts."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: Annotated[float, Field(ge=0, le=1)] = 0.0
    timestamp_granularities: list[Literal["segment", "word"]] | None = None
    stream: bool = False
    chunking_strategy: Literal["auto"] | None = None
    include: list[Literal["logprobs"]] | None = None
    hotwords: str | None = None
    num_beams: PositiveInteger | None = None
    best_of: PositiveInteger | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    vad_filter: bool | None = None
    draft: str | None = None

    @classmethod
    async def of(cls, request: Request) -> tuple[TranscriptionRequest, UploadFile]:
        """The fields of a form, and its file."""
        form = await request.form(max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES)
        names = Counter(name for name, _ in form.multi_items())
        values: dict[str, Any] = {}
        for name, value in form.multi_items():
            bare = name.removesuffix("[]")
            if bare != name and bare not in names:
                values.setdefault(bare, []).append(value)
            elif bare != name or names[name] > 1:
                raise Refusal(f"{bare} is given twice: leave one out", bare, "invalid_value")
            else:
                values[name] = value
        if not isinstance(file := values.pop("file", None), UploadFile):
            says = "the file is missing: send multipart/form-data whose part file has a file name"
            raise Refusal(says, "file", "missing_parameter")
        fields = validated(cls, values)
        if fields.stream and fields.response_format not in ("json", "text"):
            raise Refusal(f"stream gives events: leave response_format={fields.response_format} out", "response_format")
        if fields.has_words and fields.response_format != "verbose_json":
            says = "timestamp_granularities: give response_format=verbose_json, which has the words"
            raise Refusal(says, "timestamp_granularities")
        if fields.include and fields.response_format != "json":
            raise Refusal("include: give response_format=json, which has the logprobs", "include")
        return fields, file

    @property
    def has_words(self) -> bool:
        return "word" in (self.timestamp_granularities or ())

    @property
    def has_segments(self) -> bool:
        return "segment" in (self.timestamp_granularities or ["segment"])

    def settings(self, task: str, limits: Limits) -> dict[str, Any]:
        """The options of a transcription."""
        for name in ("num_beams", "best_of"):
            if (getattr(self, name) or 1) > limits.max_beams:
                raise Refusal(f"{name} is more than this server's limit of {limits.max_beams}", name)
        settings = {name: getattr(self, name) for name in ("language", "hotwords", "num_beams", "best_of", "seed")}
        settings |= {"vad_filter": self.vad_filter, "initial_prompt": self.prompt, "task": task}
        settings |= {"word_timestamps": self.has_words, "top_logprobs": 0 if self.include else None}
        settings["temperature"] = self.temperature or None  # 0 stands for the default ones, as OpenAI documents
        return {name: value for name, value in settings.items() if value is not None}


NAMES = {name: name for name in TranscriptionRequest.model_fields} | {"initial_prompt": "prompt"}
"""Fields by the options that they set."""
_SCHEMA = TranscriptionRequest.model_json_schema()
_FILE = {"type": "string", "format": "binary"}
_PROPERTIES = {"properties": {"file": _FILE, **_SCHEMA["properties"]}, "required": ["file"]}
FORM = {"requestBody": {"content": {"multipart/form-data": {"schema": _SCHEMA | _PROPERTIES}}, "required": True}}
"""The form, for ``/openapi.json``."""


class Cancelled(Exception):
    """A call that nobody waits for any more used the engine."""


class CancellableEngine:
    """The engine for one call. Once it is cancelled, the call's requests end, and further ones are refused."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._requests: set[EngineRequest] = set()
        self.is_cancelled = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def check(self) -> None:
        """End the work of a cancelled call between its requests."""
        if self.is_cancelled:
            raise Cancelled

    def submit(self, *args: Any, **kwargs: Any) -> EngineRequest:
        self.check()
        request = self._engine.submit(*args, **kwargs)
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)
        if self.is_cancelled:  # meanwhile
            request.cancel()
        return request

    def cancel(self) -> None:
        self.is_cancelled = True
        for request in [*self._requests]:
            request.cancel()


class Transcribers:
    """The threads in which files are transcribed."""

    def __init__(self, limits: Limits) -> None:
        self._pool = ThreadPoolExecutor(MAX_AT_ONCE, "specbeam-transcribing")
        self._max_files = MAX_AT_ONCE + limits.max_waiting
        self._count = 0

    async def do(self, work: Callable[[], T]) -> T:
        if self._count >= self._max_files:
            raise Refusal("the server has as many files as it takes: try again later", None, "queue_full", 429)
        self._count += 1
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        future.add_done_callback(self._done)
        return await asyncio.shield(future)  # a thread cannot be cancelled: the call is

    def _done(self, future: asyncio.Future[Any]) -> None:
        self._count -= 1
        if not future.cancelled():
            future.exception()  # asyncio logs an exception that nobody took


class TranscriptionCall:
    """A file that is transcribed for a client."""

    def __init__(
        self, fields: TranscriptionRequest, task: str, model: ServedModel, limits: Limits, threads: Transcribers
    ) -> None:
        if model.lm.backend.encoder_reads != "audio":
            raise Refusal(f"{model.name} reads no audio: name a Whisper model", "model")
        self._fields, self._task, self._model, self._limits, self._threads = fields, task, model, limits, threads
        self._settings = fields.settings(task, limits)
        self._draft = model.draft(fields.draft)
        self._engine: Any = CancellableEngine(model.engine)
        self._stream: TranscriptStream | None = None
        self._segments: list[Segment] = []

    def cancel(self) -> None:
        """End the call, after the pass that runs."""
        self._engine.cancel()

    async def prepare(self, file: BinaryIO) -> None:
        """Decode the file and check the options."""
        await self._threads.do(partial(self._prepare, file))

    def _prepare(self, file: BinaryIO) -> None:
        try:
            with begin(file, name="the file", max_seconds=self._limits.max_audio_seconds) as decoding:
                samples = decoding.samples()
        except SpecbeamError as error:
            raise Refusal(str(error), "file", "invalid_file") from error
        try:
            options = {"draft": self._draft, "engine": self._engine, "check": self._engine.check, **self._settings}
            self._stream = transcribe_stream(self._model.lm, samples, **options)
        except SpecbeamError as error:
            raise refusal_of(error, NAMES) from error

    async def segments(self) -> AsyncIterator[Segment]:
        """The segments as they come. The call ends after the server's timeout, with the text so far."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Segment | None]()

        def work() -> None:
            assert self._stream is not None
            try:
                for segment in self._stream:
                    if self._engine.is_cancelled:  # the segment may be cut
                        return
                    self._segments.append(segment)
                    loop.call_soon_threadsafe(queue.put_nowait, segment)
            except Cancelled:
                pass
            except Exception as error:
                raise refusal_of(error, NAMES) from error

        def ended(working: asyncio.Future[None]) -> None:
            if not working.cancelled():
                working.exception()  # asyncio logs an exception that nobody took
            queue.put_nowait(None)

        end = None if self._limits.timeout is None else loop.call_later(self._limits.timeout, self.cancel)
        working = asyncio.ensure_future(self._threads.do(work))
        working.add_done_callback(ended)
        try:
            while (segment := await queue.get()) is not None:
                yield segment
            await working
        finally:
            if end is not None:
                end.cancel()

    async def transcript(self) -> Transcript:
        async for _ in self.segments():
            pass
        return self._transcript

    @property
    def _transcript(self) -> Transcript:
        assert self._stream is not None
        return replace(self._stream.transcript, segments=self._segments)

    @property
    def _usage(self) -> dict[str, Any]:
        return {"type": "duration", "seconds": round(self._transcript.duration, 3)}

    def answer(self, transcript: Transcript) -> Response:
        form = self._fields.response_format
        if form == "json":
            return json_response({"text": transcript.text, "usage": self._usage} | self._log_probs(transcript.segments))
        if form == "verbose_json":
            return json_response(self._verbose(transcript))
        text = transcript.text + "\n" if form == "text" else written(transcript, form)
        return PlainTextResponse(text.encode(errors="replace"))

    def _verbose(self, transcript: Transcript) -> dict[str, Any]:
        segments = [
            {
                "id": number,
                "seek": round(FRAMES_PER_SECOND * segment.start),
                "start": segment.start,
                "end": segment.end,
                "text": segment.text,
                "tokens": segment.tokens,
                "temperature": segment.temperature,
                "avg_logprob": segment.avg_logprob,
                "compression_ratio": segment.compression_ratio,
                "no_speech_prob": segment.no_speech_prob,
            }
            for number, segment in enumerate(transcript.segments)
        ]
        words = [
            {"word": word.word.strip(), "start": word.start, "end": word.end}
            for segment in transcript.segments
            for word in segment.words or ()
        ]
        return {
            "task": self._task,
            "language": "en" if self._task == "translate" else transcript.language or UNDETERMINED,
            "duration": transcript.duration,
            "text": transcript.text,
            **({"segments": segments} if self._fields.has_segments else {}),
            **({"words": words} if self._fields.has_words else {}),
            "usage": self._usage,
        }

    def _log_probs(self, segments: list[Segment]) -> dict[str, Any]:
        """The log-probabilities of the tokens of text, if the request includes them."""
        if not self._fields.include:
            return {}
        end = Vocabulary.of(self._model.lm).end
        return {
            "logprobs": [
                token_log_prob(self._model.texts, token, log_prob)
                for segment in segments
                for token, log_prob in zip(segment.tokens, segment.log_probs or (), strict=True)
                if token < end
            ]
        }

    async def frames(self) -> AsyncIterator[bytes]:
        """OpenAI's events: the text of each segment, and then all of the text."""
        async for segment in self.segments():
            yield frame(to_json({"type": "transcript.text.delta", "delta": segment.text} | self._log_probs([segment])))
        done = {"type": "transcript.text.done", "text": self._transcript.text}
        yield frame(to_json(done | self._log_probs(self._segments)))
