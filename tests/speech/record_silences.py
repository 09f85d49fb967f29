"""What faster-whisper leaves out as never said, written to silences.json beside this file. Needs its package::

    python tests/speech/record_silences.py

A script stands in for the model: what each window says, and when its words are spoken.
"""

import json
import random
from pathlib import Path

WINDOW = 3000
"""Frames. A timestamp is 2 of them."""
TIMES, END = 267, 256
"""The first timestamp, and the end token. Tokens below it are bytes."""
CASES = 30


def script_of(number):
    """The frames of a file, the threshold, and its windows: segments, how the text ends, and words by segment."""
    rng = random.Random(number)
    threshold, frames = rng.choice((0.0, 0.5, 2.0, 4.0)), rng.choice((2000, 7000, 12000))
    windows = []
    for _ in range(40):
        place, segments, words = rng.choice((0.0, 0.5, 3.0, 8.0)), [], []
        for _ in range(rng.randint(1, 4)):
            begin = min(place, 29)
            strange, own = rng.random() < 0.5, []
            for _ in range(rng.randint(0, 5)):
                seconds = rng.choice((0.02, 0.04, 2.5)) if strange else rng.choice((0.2, 0.3, 0.5))
                end = min(place + seconds, 29.9)
                odds = rng.choice((0.05, 0.1, 0.6)) if strange else rng.choice((0.1, 0.8, 0.9))
                own.append((rng.choice((" one", " two", " three,")), round(place, 2), round(end, 2), odds))
                place = end
            place = min(place + rng.choice((0.0, 0.3, 1.5, 3.0, 6.0)), 29.9)
            segments.append((round(begin * 50), round(place * 50)))
            words.append(own)
        windows.append((segments, rng.choice(("closed", "silence", "cut")), words))
    return frames, threshold, windows


def tokens_of(window):
    """The tokens that a window says."""
    segments, ending, words = window
    tokens = []
    for (begin, end), own in zip(segments, words, strict=True):
        tokens += [TIMES + begin, *"".join(word for word, *_ in own).encode(), TIMES + end]
    return tokens + {"closed": [TIMES + segments[-1][1]], "silence": [], "cut": [TIMES + segments[-1][1], 97]}[ending]


def main():
    from dataclasses import fields
    from types import SimpleNamespace

    import numpy as np
    from faster_whisper.transcribe import TranscriptionOptions, WhisperModel

    class Scripted(WhisperModel):
        def __init__(self, windows):
            self.windows, self.read = iter(windows), []
            self.feature_extractor = SimpleNamespace(time_per_frame=0.01, nb_max_frames=WINDOW)
            self.frames_per_second, self.time_precision, self.input_stride = 100, 0.02, 2
            self.logger = SimpleNamespace(isEnabledFor=lambda _: False, debug=print)

        def encode(self, segment):
            return None

        def get_prompt(self, *_, **__):
            return []

        def generate_with_fallback(self, *_):
            self.now = next(self.windows)
            return SimpleNamespace(no_speech_prob=0.0, sequences_ids=[tokens_of(self.now)]), -0.1, 0.0, 1.0

        def _split_segments_by_timestamps(self, **how):
            self.read.append(how["seek"])
            return super()._split_segments_by_timestamps(**how)

        def find_alignment(self, *_):
            names = ("word", "start", "end", "probability")
            words = [dict(zip(names, word, strict=True)) for own in self.now[2] for word in own]
            return [[word | {"tokens": [*word["word"].encode()]} for word in words]]

    tokenizer = SimpleNamespace(
        eot=END, timestamp_begin=TIMES, decode=lambda tokens: bytes(t for t in tokens if t < END).decode()
    )
    recorded = []
    for number in range(CASES):
        frames, threshold, windows = script_of(number)
        options = dict.fromkeys(one.name for one in fields(TranscriptionOptions)) | {
            **{"word_timestamps": True, "hallucination_silence_threshold": threshold, "clip_timestamps": []},
            **{"condition_on_previous_text": True, "prompt_reset_on_temperature": 0.5, "multilingual": False},
            **{"prepend_punctuations": "", "append_punctuations": ","},
        }
        model = Scripted(windows)
        features = np.zeros((80, frames + 1), np.float32)
        found = model.generate_segments(features, tokenizer, TranscriptionOptions(**options), False, 1)
        segments = [[s.start, s.end, [[w.word, w.start, w.end] for w in s.words]] for s in found]
        recorded.append({"read": model.read, "segments": segments})
    text = json.dumps(recorded, separators=(",", ":"), default=float)
    Path(__file__).with_name("silences.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
