"""The windows of a file, one after another: the last timestamp of a window says where the next one begins.

The rules are openai-whisper's (Radford et al. 2022, 4.5): for silence, for texts that are rejected and drawn again at a
higher temperature, and for the previous text that the next window's prompt begins with.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from specbeam.engine.shared_source import SharedSource
from specbeam.errors import SpecbeamError, wrong_value
from specbeam.results import Result
from specbeam.speech.alignment import AlignmentHeads, alignment_heads
from specbeam.speech.clips import Clip
from specbeam.speech.log_mel import LogMel
from specbeam.speech.requests import ScorePromptThen, Text, WindowRequest
from specbeam.speech.settings import Settings
from specbeam.speech.timestamps import SECONDS_PER_TIMESTAMP, TranscriptRules, ends_with_silence, split
from specbeam.speech.transcript import Segment, Window
from specbeam.speech.vocabulary import Vocabulary
from specbeam.speech.word_timestamps import WITHOUT_SPACES, TimedSegment, WordFinder


@dataclass(frozen=True)
class Transcriber:
    """What all windows of a call share.

    Attributes:
        hotwords, initial_prompt: their token ids.
        heads: alignment heads. Empty if nobody asks for the times of words.
    """

    vocabulary: Vocabulary
    settings: Settings
    rules: TranscriptRules
    hotwords: list[int]
    initial_prompt: list[int]
    heads: AlignmentHeads = ()

    @classmethod
    def of(cls, vocabulary: Vocabulary, settings: Settings) -> Transcriber:
        """Check the settings against the model."""
        _check_language(vocabulary, settings)
        hotwords = vocabulary.encode(settings.hotwords, "hotwords") if settings.hotwords else []
        prompt = settings.initial_prompt
        if isinstance(prompt, str):
            prompt = vocabulary.encode(prompt, "initial_prompt") if prompt.strip() else []
        latest = round(settings.max_initial_timestamp / SECONDS_PER_TIMESTAMP)
        transcriber = cls(
            vocabulary,
            settings,
            TranscriptRules(
                vocabulary,
                vocabulary.suppressed(settings.suppress_tokens) if settings.suppress_tokens else [],
                vocabulary.blank if settings.suppress_blank else [],
                None if settings.without_timestamps else min(latest, len(vocabulary.timestamps) - 1),
            ),
            hotwords,
            [*(prompt or ())],
            alignment_heads(vocabulary.lm) if settings.word_timestamps else (),
        )
        transcriber._check_lengths()
        return transcriber

    def _check_lengths(self) -> None:
        size = self.vocabulary.lm.backend.vocab_size
        if foreign := [token for token in self.initial_prompt if not 0 <= token < size]:
            says = f"initial_prompt: the token id {foreign[0]} is not in the vocabulary of {size}"
            raise SpecbeamError(says, option="initial_prompt")
        maximum = self.max_prompt - bool(self.initial_prompt)  # whose end counts
        if (words := len(self.hotwords)) > maximum:
            beside = " beside initial_prompt" if self.initial_prompt else ""
            raise SpecbeamError(
                f"hotwords: {words} tokens are too many, since a prompt holds at most {maximum}{beside}: give fewer",
                option=("hotwords", "initial_prompt"),
            )
        maximum = self.context // 2
        if (new := self.settings.max_new_tokens) is not None and new > maximum:
            raise wrong_value("max_new_tokens", new, f"is not allowed: a window has at most {maximum} new tokens")

    @property
    def context(self) -> int:
        return self.vocabulary.lm.backend.context_length

    @property
    def max_prompt(self) -> int:
        """The maximum length of hotwords and previous text: with the token before them, half of the context."""
        return self.context // 2 - 1

    @property
    def mel_bins(self) -> int:
        return self._shape[0]

    @property
    def frames(self) -> int:
        """Of a window."""
        return self._shape[1]

    @property
    def _shape(self) -> tuple[int, int]:
        assert self.vocabulary.lm.backend.features_shape is not None
        return self.vocabulary.lm.backend.features_shape

    def prompt(self, language: str | None, previous_text: list[int]) -> list[int]:
        """The prompt of a window: hotwords and the end of the previous text, then what begins its own text."""
        capacity = self.max_prompt - len(self.hotwords)
        before = [*self.hotwords, *(previous_text[-capacity:] if capacity else [])]
        begin = self.begin(language)
        if self.settings.without_timestamps:
            begin.append(self.vocabulary.no_timestamps)
        return [*([self.vocabulary.previous, *before] if before else []), *begin]

    def begin(self, language: str | None) -> list[int]:
        """What begins the text of a window: the start token, the language and the task."""
        if language is None or not self.vocabulary.is_multilingual:
            return [self.vocabulary.start]
        return [self.vocabulary.start, self.vocabulary.languages[language], self.vocabulary.tasks[self.settings.task]]

    def word_finder(self, language: str | None) -> WordFinder | None:
        """What finds the words of a text; None if nobody asks for them."""
        if not self.settings.word_timestamps:
            return None
        by_spaces = self.settings.task == "translate" or language not in WITHOUT_SPACES
        return WordFinder(self.vocabulary, self.settings, self.heads, self.begin(language), by_spaces, self.frames)

    def options(self, temperature: float, seed: int) -> dict[str, object]:
        """The options of one fallback attempt."""
        settings = self.settings
        method: dict[str, object] = {**settings.options_with("beams"), "distinct": False}
        if settings.num_return_sequences > 1:  # beams may differ in timestamps alone
            method["num_return_sequences"] = settings.num_beams
        if temperature:
            method = {"temperature": temperature, "seed": seed, "num_return_sequences": settings.best_of}
        elif settings.num_beams == 1:
            method = {}
        return {
            **method,
            **settings.options_with(),
            "max_new_tokens": settings.max_new_tokens or self.context // 2,
            "constraint": self.rules,
            "eos_token_id": self.vocabulary.end,
        }


def _check_language(vocabulary: Vocabulary, settings: Settings) -> None:
    source, language = vocabulary.lm.source, settings.language
    if vocabulary.is_multilingual:
        if language is not None and language not in vocabulary.languages:
            raise wrong_value("language", language, f"is not known: {source} knows {', '.join(vocabulary.languages)}")
        return
    if language not in (None, "en"):
        raise wrong_value("language", language, f"is not allowed: {source} knows English only")
    if settings.task != "transcribe":
        raise wrong_value("task", settings.task, f"is not allowed: {source} knows English only")


def detect_language(
    transcriber: Transcriber, first: SharedSource
) -> Generator[WindowRequest, Result, tuple[str, float]]:
    """The likeliest language of a window, and its probability among all languages."""
    languages = transcriber.vocabulary.languages
    scoring = ScorePromptThen(0, [*languages.values()], goes_on=False)
    options = {"max_new_tokens": 1, "eos_token_id": transcriber.vocabulary.end}
    yield WindowRequest(first, [transcriber.vocabulary.start], options, scoring, writes=False, drafts=False)
    highest = max(scoring.log_probs)
    total = math.fsum(math.exp(value - highest) for value in scoring.log_probs)
    return [*languages][scoring.log_probs.index(highest)], 1 / total


@dataclass
class Windows:
    """The windows of some clips of a file, which follow each other.

    Args:
        language: its code; None for an English-only model.
        first: the features of the first window, if the encoder has read them.
        transcribed: the tokens of all windows of the file so far, also of other clips. Windows add theirs.

    Attributes:
        previous_text: its tokens, with which the next window's prompt begins.
    """

    transcriber: Transcriber
    mel: LogMel
    clips: list[Clip]
    language: str | None
    first: SharedSource | None = None
    transcribed: list[int] = field(default_factory=list)
    previous_text: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.previous_text = [*self.transcriber.initial_prompt]
        self._words = self.transcriber.word_finder(self.language)

    def segments(self) -> Generator[WindowRequest | Segment, Any, None]:
        """Ask for texts of windows, and hand out their segments."""
        for clip in self.clips:
            start = 0
            while start < clip.frames:
                frames = min(self.transcriber.frames, clip.frames - start)
                features = self.first or window(self.transcriber, self.mel, clip, start, frames)
                self.first = None
                text, rejected = yield from self._text(features, clip, start)
                if self._is_silent(text):
                    start += frames
                    continue
                self.transcribed += text.tokens
                parts, step = split(text.tokens, self.transcriber.vocabulary.timestamps, frames)
                spoken = [
                    TimedSegment(*clip.trimmed(start + part.start, start + part.end), part.tokens) for part in parts
                ]
                if (finder := self._words) is not None:
                    timed = yield from finder.find(features, spoken, clip, start, frames)
                    ends = ends_with_silence(text.tokens, self.transcriber.vocabulary.timestamps)
                    if timed.next_frame is not None:
                        step = timed.next_frame - start
                    elif not ends and finder.last_frame > start:
                        step = finder.last_frame - start
                    if timed.starts_with_silence:
                        start += step
                        continue
                    spoken = timed.segments
                del features  # they hold the output of the encoder
                origin = self._origin(clip, start, frames, text)
                shown, index = [], 0
                for part in spoken:
                    written = self.transcriber.vocabulary.decode(part.tokens)
                    begin, end = clip.seconds(part.start), clip.seconds(part.end, is_end=True)
                    if part.words and self.transcriber.settings.vad_filter:  # as in faster-whisper
                        begin, end = part.words[0].start, part.words[-1].end
                    here, index = slice(index, index + len(part.tokens)), index + len(part.tokens)
                    if begin >= end or not written.strip():  # it has no length, or begins where the audio has ended
                        continue
                    shown += part.tokens
                    yield Segment(
                        start=begin,
                        end=end,
                        text=written,
                        tokens=part.tokens,
                        avg_logprob=text.avg_logprob,
                        no_speech_prob=text.no_speech_prob,
                        compression_ratio=text.compression_ratio,
                        temperature=text.temperature,
                        rejected=rejected,
                        words=part.words,
                        log_probs=None if text.top_logprobs is None else text.log_probs[here],
                        top_logprobs=None if text.top_logprobs is None else text.top_logprobs[here],
                        window=origin,
                    )
                self._go_on(shown, text.temperature)
                start += step

    def _origin(self, clip: Clip, start: int, frames: int, text: Text) -> Window:
        end = clip.seconds(start + frames, is_end=True)
        return Window(clip.seconds(start), end, text.alternatives[: self.transcriber.settings.num_return_sequences])

    def _text(
        self, features: SharedSource, clip: Clip, start: int
    ) -> Generator[WindowRequest, Result, tuple[Text, tuple[str, ...]]]:
        """The text of a window, and why others were rejected: the first that is good enough, or the last one."""
        transcriber, vocabulary = self.transcriber, self.transcriber.vocabulary
        prompt = transcriber.prompt(self.language, self.previous_text)
        scoring = ScorePromptThen(len(prompt) - 1 - prompt[::-1].index(vocabulary.start), [vocabulary.no_speech])
        rejected: list[str] = []
        for number, temperature in enumerate(transcriber.settings.temperature):
            options = transcriber.options(temperature, seed_of(transcriber.settings.seed, clip, start, number))
            drafts = not temperature or transcriber.settings.best_of == 1
            result = yield WindowRequest(
                features, prompt, options, None if number else scoring, drafts=drafts, transcribed=self.transcribed
            )
            text = Text.of(result, vocabulary, temperature, math.exp(scoring.log_probs[0]))
            reason = self._rejects(text)
            if reason is None:
                break
            if number + 1 < len(transcriber.settings.temperature):
                rejected.append(f"temperature {temperature:g}: {reason}")
        return text, tuple(rejected)

    def _rejects(self, text: Text) -> str | None:
        """Why a text is not good enough; None if it is, and for silence, whose text does not matter."""
        settings, reason = self.transcriber.settings, None
        if (maximum := settings.compression_ratio_threshold) is not None and text.compression_ratio > maximum:
            reason = f"compression_ratio {text.compression_ratio:.2f} > {maximum:g}"
        if (minimum := settings.log_prob_threshold) is not None and text.avg_logprob < minimum:
            if settings.no_speech_threshold is not None and text.no_speech_prob > settings.no_speech_threshold:
                return None
            reason = f"avg_logprob {text.avg_logprob:.2f} < {minimum:g}"
        return reason

    def _is_silent(self, text: Text) -> bool:
        minimum, maximum = self.transcriber.settings.log_prob_threshold, self.transcriber.settings.no_speech_threshold
        is_likely = minimum is not None and text.avg_logprob > minimum
        return maximum is not None and text.no_speech_prob > maximum and not is_likely

    def _go_on(self, tokens: list[int], temperature: float) -> None:
        settings = self.transcriber.settings
        self.previous_text += tokens
        if not settings.condition_on_previous_text or temperature > settings.prompt_reset_on_temperature:
            self.previous_text = []
        del self.previous_text[: -self.transcriber.max_prompt]


def window(transcriber: Transcriber, mel: LogMel, clip: Clip, start: int, frames: int) -> SharedSource:
    """The features of some frames of a clip."""
    return SharedSource(mel.window(clip.part(start, start + frames), transcriber.frames))


def seed_of(seed: int, clip: Clip, start: int, attempt: int) -> int:
    """The seed of an attempt's draws. It depends on the position in the file alone, and not on other files."""
    ((place, _), *_) = clip.part(start, start + 1)
    digest = hashlib.sha256(f"{seed} {place} {attempt}".encode()).digest()
    return int.from_bytes(digest[:7], "little")
