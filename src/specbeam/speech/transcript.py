"""Results of transcription."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from specbeam.results import TopLogProbs


@dataclass(frozen=True)
class Word:
    """A word, with the punctuation marks beside it.

    Attributes:
        word: its text. Most words begin with a space.
        start, end: in the file, in seconds.
        probability: the mean of the probabilities of its tokens, each among all tokens of text.
    """

    word: str
    start: float
    end: float
    probability: float


@dataclass(frozen=True)
class Alternative:
    """One of the texts of a window.

    Attributes:
        text: without timestamps.
        tokens: token ids, timestamps included. What follows the last segment belongs to the next window.
        score: what beams are ranked by, as in :class:`specbeam.Sequence`.
        avg_logprob, compression_ratio: as in :class:`Segment`.
    """

    text: str
    tokens: list[int]
    score: float
    avg_logprob: float
    compression_ratio: float


@dataclass(frozen=True)
class Window:
    """Up to 30 seconds of a file, which were read together.

    Attributes:
        start, end: in the file, in seconds.
        alternatives: its texts. The best, which its segments have, is the first. Beams are ranked by ``score``,
            draws by their log-probability per token. Texts that differ in timestamps alone count once.
    """

    start: float
    end: float
    alternatives: list[Alternative]


@dataclass(frozen=True)
class Segment:
    """A piece of text with its times, about a sentence.

    The window of up to 30 seconds that it comes from has one temperature and one value of each measure. All of them are
    openai-whisper's.

    Attributes:
        start, end: in the file, in seconds.
        text: as the tokenizer decodes it. Most texts begin with a space.
        tokens: token ids, timestamps included.
        avg_logprob: the mean of the log-probabilities of the window's tokens and its end token, each among the tokens
            that were allowed at its position.
        no_speech_prob: the probability that nobody speaks in the window.
        compression_ratio: the bytes of the window's text, by their number after compression. Repetitions make it large.
        temperature: the window's text was drawn at it; 0 for beam search or greedy search.
        rejected: why the texts of lower temperatures were rejected, in their order. Empty if the first one was taken.
        words: with ``word_timestamps``, its words. Otherwise None.
        log_probs, top_logprobs: with ``top_logprobs``, of its tokens, as in :class:`specbeam.Sequence`. They are the
            model's own, before the rules for timestamps and suppressed tokens. Otherwise None.
        window: the window that it comes from, with its other texts if ``num_return_sequences`` asks for them.
    """

    start: float
    end: float
    text: str
    tokens: list[int]
    avg_logprob: float
    no_speech_prob: float
    compression_ratio: float
    temperature: float
    rejected: tuple[str, ...] = ()
    words: list[Word] | None = None
    log_probs: list[float] | None = None
    top_logprobs: TopLogProbs | None = None
    window: Window | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The segment as plain data. Fields that nobody asked for are left out; its window is beside the segments."""
        fields = asdict(self)
        del fields["window"]
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True)
class Transcript:
    """The text of one file.

    Attributes:
        language: its code, such as "en": the given one, or the likeliest. None if nobody speaks, and none was given.
        language_probability: 1 for a given language.
        duration: of the file, in seconds.
        segments: in their order.
    """

    language: str | None
    language_probability: float
    duration: float
    segments: list[Segment] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of the text, without space at its ends."""
        return "".join(segment.text for segment in self.segments).strip()

    @property
    def windows(self) -> list[Window]:
        """The windows that the segments come from, in their order."""
        windows = {id(one.window): one.window for one in self.segments if one.window is not None}
        return [*windows.values()]

    def to_dict(self) -> dict[str, Any]:
        """The transcript as plain data. Fields that nobody asked for are left out."""
        return {
            "text": self.text,
            "language": self.language,
            "language_probability": self.language_probability,
            "duration": self.duration,
            "segments": [segment.to_dict() for segment in self.segments],
            "windows": [asdict(window) for window in self.windows],
        }
