"""Results of transcription."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


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
            that were allowed at its place.
        no_speech_prob: the probability that nobody speaks in the window.
        compression_ratio: the bytes of the window's text, by their number after compression. Repetitions make it large.
        temperature: the window's text was drawn at it; 0 for beam search or greedy search.
        rejected: why the texts of lower temperatures were rejected, in their order. Empty if the first one was taken.
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

    def to_dict(self) -> dict[str, Any]:
        """The transcript as plain data."""
        return {"text": self.text, **asdict(self)}
