"""The options of transcription: one dataclass with faster-whisper's names, validated once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from inspect import Parameter, signature
from math import isfinite
from typing import Any

from specbeam.errors import SpecbeamError, not_allowed, shown, wrong_value
from specbeam.options.declared import OPTIONS, Need
from specbeam.options.generation_defaults import is_number
from specbeam.options.options import check_names
from specbeam.options.values import checked
from specbeam.speech.vocabulary import TASKS, code_of

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
PREPENDED, APPENDED = "\"'“¿([{-", "\"'.。,，!！?？:：”)]}、"
OTHERS: dict[str, tuple[tuple[Any, ...], str]] = {
    "beam_size": ((), "it is num_beams here"),
    "patience": ((None, 1), "beam search ends by the rules of transformers"),
    "prefix": ((None,), "give an initial_prompt"),
    "multilingual": ((False,), "a file has one language"),
    "chunk_length": ((None, 30), "a window is as long as the encoder reads"),
    "language_detection_segments": ((None, 1), "the first window decides"),
    "language_detection_threshold": ((None, 0.5), "the first window decides"),
    "log_progress": ((False,), "iterate over transcribe_stream to see the progress"),
    "batch_size": ((), "what can share passes does"),
    "fp16": ((), "load the model with dtype= or quantize="),
}
"""Options of openai-whisper and faster-whisper that are not here: the values that ask for nothing, and the reason."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of :func:`specbeam.transcribe`. Names and defaults are faster-whisper's, but that ``vad_filter`` is on.

    Attributes:
        language: the language that is spoken: its code or its English name, such as "en" or "English". None: the
            likeliest in the first window.
        task: "transcribe", or "translate" into English.
        num_beams: the beams of beam search; 1 for greedy search.
        best_of: how many texts are drawn at a temperature over 0. The likeliest is taken.
        length_penalty, repetition_penalty, no_repeat_ngram_size: as in :class:`specbeam.Options`.
        temperature: one, or several of which each is tried where a text of the one before is rejected. 0 searches, and
            any other draws.
        seed: of the draws. The same seed gives the same text.
        compression_ratio_threshold: a text is rejected whose compression ratio is above this; None for no limit.
        log_prob_threshold: a text is rejected whose average log-probability is below this; None for no limit.
        no_speech_threshold: a window is silent if the probability of no speech is above this, unless its text is
            likelier than ``log_prob_threshold``. None: no window is silent.
        condition_on_previous_text: the text of a window goes on from the text before it. Clips of ``vad_filter`` do not
            see each other's text.
        prompt_reset_on_temperature: a text that was drawn at a temperature above this is not gone on from.
        initial_prompt: text before the first window, or its token ids. Of a long one the end counts, as in
            openai-whisper: with ``hotwords``, one token less than half of the model's context.
        hotwords: text before every window.
        suppress_blank: no text begins with a space or the end.
        suppress_tokens: ids of tokens that never follow. -1 stands for symbols that nobody speaks.
        without_timestamps: the text of a window is one segment.
        max_initial_timestamp: the first timestamp of a window is at most this, in seconds.
        max_new_tokens: of a window. None for half of the model's context.
        word_timestamps: find the words and their times (:class:`specbeam.speech.Word`), by one more pass over the text
            of each window. As in openai-whisper, a window then begins where the last word before it ends.
        prepend_punctuations, append_punctuations: marks that become a part of the next word, or of the word before.
        hallucination_silence_threshold: segments of unlikely, very short or very long words are left out where silence
            of more than this, in seconds, is around them, and that silence is not read. It needs ``word_timestamps``.
            None: nothing is left out.
        num_return_sequences: how many different texts of each window are returned, at most
            (:attr:`specbeam.speech.Transcript.windows`): the best of ``num_beams`` beams, or of ``best_of`` draws.
        top_logprobs: also return how likely each token is, and this many of the likeliest tokens at its position. None
            for neither.
        vad_filter: leave out silence (Silero VAD). It has no effect beside ``clip_timestamps``.
        vad_parameters: arguments of :func:`specbeam.speech.vad.stretches`.
        clip_timestamps: the parts of the file to transcribe: start, end, start, end, ... in seconds, as numbers or as a
            text with commas. The last end may be left out. None for all of it.

    Raises:
        SpecbeamError: a value out of its range.
    """

    language: str | None = None
    task: str = "transcribe"
    num_beams: int = 5
    best_of: int = 5
    length_penalty: float = OPTIONS["length_penalty"].unset
    repetition_penalty: float = OPTIONS["repetition_penalty"].unset
    no_repeat_ngram_size: int = OPTIONS["no_repeat_ngram_size"].unset
    temperature: Any = TEMPERATURES
    seed: int = 0
    compression_ratio_threshold: float | None = 2.4
    log_prob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    condition_on_previous_text: bool = True
    prompt_reset_on_temperature: float = 0.5
    initial_prompt: Any = None
    hotwords: str | None = None
    suppress_blank: bool = True
    suppress_tokens: Any = (-1,)
    without_timestamps: bool = False
    max_initial_timestamp: float = 1.0
    max_new_tokens: int | None = None
    word_timestamps: bool = False
    prepend_punctuations: str = PREPENDED
    append_punctuations: str = APPENDED
    hallucination_silence_threshold: float | None = None
    num_return_sequences: int = 1
    top_logprobs: int | None = None
    vad_filter: bool = True
    vad_parameters: Mapping[str, Any] | None = None
    clip_timestamps: Any = None

    def __post_init__(self) -> None:
        self._check("task", self.task in TASKS, " or ".join(map(repr, TASKS)))
        self._check("language", self.language is None or isinstance(self.language, str), "a code such as 'en', or None")
        if self.language is not None:
            object.__setattr__(self, "language", code_of(self.language))
        for name, default in self._shared():
            if (value := getattr(self, name)) is not None or default is not None:
                object.__setattr__(self, name, checked(OPTIONS[name], value))
        self._check("best_of", _is_number(self.best_of, integer=True) and self.best_of >= 1, "at least 1")
        for name in ("compression_ratio_threshold", "log_prob_threshold", "no_speech_threshold"):
            value = getattr(self, name)
            self._check(name, value is None or _is_number(value), "a number, or None")
        self._check("prompt_reset_on_temperature", _is_number(self.prompt_reset_on_temperature), "a number")
        self._check("max_initial_timestamp", _is_number(self.max_initial_timestamp), "seconds")
        self._check("max_initial_timestamp", self.max_initial_timestamp >= 0, "seconds, at least 0")
        flags = ("condition_on_previous_text", "suppress_blank", "without_timestamps", "vad_filter", "word_timestamps")
        for name in flags:
            self._check(name, isinstance(getattr(self, name), bool), "true or false")
        silence = self.hallucination_silence_threshold
        if silence is not None:
            self._check("hallucination_silence_threshold", _is_number(silence) and silence >= 0, "seconds, or None")
            if not self.word_timestamps:
                raise SpecbeamError(
                    f"hallucination_silence_threshold={silence:g} needs word_timestamps",
                    option="hallucination_silence_threshold",
                )
        for name in ("prepend_punctuations", "append_punctuations"):
            self._check(name, isinstance(getattr(self, name), str), "a text")
        self._check("hotwords", self.hotwords is None or isinstance(self.hotwords, str), "a text, or None")
        self._check_vad_parameters()
        temperatures = self._numbers("temperature", "0, a number over 0, or several of them, such as (0.0, 0.2)")
        allowed = OPTIONS["temperature"].range
        assert allowed is not None
        self._check("temperature", temperatures and all(value in allowed for value in temperatures), allowed.words)
        limit = "num_beams" if 0 in temperatures else "best_of"
        several, maximum = self.num_return_sequences, getattr(self, limit)
        self._check("num_return_sequences", several <= maximum, f"at most {limit}={maximum}", limit)
        suppressed = () if self.suppress_tokens is None else self.suppress_tokens
        object.__setattr__(self, "suppress_tokens", suppressed)
        self._numbers("suppress_tokens", "token ids, and -1 for the usual ones", integer=True)
        self._make_clips()
        self._make_initial_prompt()

    def options_with(self, *needs: Need) -> dict[str, Any]:
        """The options of a search that have an effect with something, or always."""
        return {name: getattr(self, name) for name, _ in self._shared() if OPTIONS[name].needs == {*needs}}

    def _shared(self) -> Iterator[tuple[str, Any]]:
        """The names of the options that generation has, too, and their defaults here."""
        return ((one.name, one.default) for one in fields(self) if one.name in OPTIONS and OPTIONS[one.name].speech)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """Settings from options by their names.

        Raises:
            SpecbeamError: a name that is not known, or that cannot be honoured.
        """
        for name, (neutral, why) in OTHERS.items():
            if name in given and not any(given[name] is value or given[name] == value for value in neutral):
                raise wrong_value(name, given[name], f"cannot be honoured: {why}")
        own = {name: value for name, value in given.items() if name not in OTHERS}
        check_names(own, [one.name for one in fields(cls)], "option")
        return cls(**own)

    def _check_vad_parameters(self) -> None:
        given = self.vad_parameters
        self._check("vad_parameters", given is None or isinstance(given, Mapping), "arguments by their names, or None")
        if not given:
            return
        from specbeam.speech.vad import stretches

        defaults = {p.name: p.default for p in signature(stretches).parameters.values() if p.name != "check"}
        own = [name for name, default in defaults.items() if default is not Parameter.empty]
        check_names(given, own, "VAD parameter")
        for name, value in given.items():
            milliseconds = name.endswith("_ms")
            fits = _is_number(value, milliseconds) and value >= 0 if value is not None else defaults[name] is None
            allowed = "milliseconds, 0 or more" if milliseconds else "a number, 0 or more"
            if not fits:
                says = f"vad_parameters: {name}={shown(value)} is not allowed: give {allowed}"
                raise SpecbeamError(says, option="vad_parameters")

    def _make_clips(self) -> None:
        if isinstance(given := self.clip_timestamps, str):
            try:
                object.__setattr__(self, "clip_timestamps", [float(part) for part in given.split(",") if part.strip()])
            except ValueError:
                self._check("clip_timestamps", False, "seconds, such as '0,30,60,90'")
        if self.clip_timestamps is not None:
            self._numbers("clip_timestamps", "seconds, such as [0, 30, 60, 90]")
            if self.clip_timestamps in ((), (0.0,)):  # faster-whisper's default is "0"
                object.__setattr__(self, "clip_timestamps", None)

    def _make_initial_prompt(self) -> None:
        given = self.initial_prompt
        if given is not None and not isinstance(given, str):
            self._numbers("initial_prompt", "a text, or token ids", integer=True)

    def _numbers(self, name: str, allowed: str, integer: bool = False) -> tuple[Any, ...]:
        """Check one number or several, and make them a tuple."""
        given = getattr(self, name)
        several = isinstance(given, Iterable) and not isinstance(given, str | bytes)
        numbers = tuple(given) if several else (given,)
        self._check(name, all(_is_number(number, integer) for number in numbers), allowed)
        numbers = tuple(int(number) if integer else float(number) for number in numbers)
        object.__setattr__(self, name, numbers)
        return numbers

    def _check(self, name: str, holds: object, allowed: str, *named: str) -> None:
        if not holds:
            raise not_allowed(name, getattr(self, name), allowed, *named)


def _is_number(value: Any, integer: bool = False) -> bool:
    return is_number(value, integer) and isfinite(value)
