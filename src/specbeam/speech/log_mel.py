"""Log-mel features of audio, as Whisper's encoder reads them (Radford et al. 2022, 2.2).

They are computed where they are asked for, so that hours of audio take no more memory than one window of 30 seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from specbeam.speech.audio import Samples, release
from specbeam.speech.av_decoder import SAMPLE_RATE

HOP = 160
"""Samples from one frame to the next: a frame is 10 ms."""
FFT = 400
FRAMES_PER_SECOND = SAMPLE_RATE // HOP
CHUNK, PIECE = 3000, 500
"""Frames whose powers are held at once, and whose spectra are, which take ten times the memory."""
MIN_POWER = 1e-10
RANGE = 8.0
"""Powers of 10 below the highest of the whole file where values are cut off."""


class LogMel:
    """The features of one file.

    Frame i is about the samples around sample 160 i. At both ends the samples are reflected, and the frame behind the
    last whole hop is left out, as in openai-whisper.

    Args:
        mel_bins: 80 or 128 in Whisper's models.

    Attributes:
        frames: how many there are.
    """

    def __init__(self, samples: Samples, mel_bins: int) -> None:
        self._samples = samples
        self._filters = mel_filters(mel_bins)
        self._window = np.hanning(FFT + 1)[:-1].astype(np.float32)
        self._latest: tuple[int, int, NDArray[np.float32]] | None = None  # the last powers, for a file of one window
        self.frames = len(samples) // HOP

    def window(self, pieces: Iterable[tuple[int, int]], frames: int) -> NDArray[np.float32]:
        """The features of pieces of the file, one after another, float32 [mel_bins, frames].

        Args:
            pieces: the first frame of each and the one after its last; together at most ``frames``. What they lack is
                filled with 0.0, as in the long form of openai-whisper and transformers.
        """
        features = np.zeros((len(self._filters), frames), np.float32)
        at = 0
        for first, end in pieces:
            features[:, at : at + end - first] = self._scaled(self._mel(first, end))
            at += end - first
        return features

    def _scaled(self, mel: NDArray[np.float32]) -> NDArray[np.float32]:
        log = np.log10(np.maximum(mel, np.float32(MIN_POWER)))
        scaled: NDArray[np.float32] = (np.maximum(log, self._floor) + np.float32(4)) / np.float32(4)
        return scaled

    @cached_property
    def _floor(self) -> np.float32:
        """The lowest logarithm, which depends on the whole file."""
        starts = range(0, self.frames, CHUNK)
        highest = [self._mel(first, min(first + CHUNK, self.frames)).max() for first in starts]
        return np.float32(np.log10(np.maximum(max(highest), np.float32(MIN_POWER))) - np.float32(RANGE))

    def _mel(self, first: int, end: int) -> NDArray[np.float32]:
        """The powers in the mel bins of some frames, float32 [mel_bins, end - first]."""
        if self._latest is not None and self._latest[:2] == (first, end):
            return self._latest[2]
        mel = np.empty((len(self._filters), end - first), np.float32)
        for start in range(first, end, PIECE):
            stop = min(start + PIECE, end)
            mel[:, start - first : stop - first] = self._filters @ self._power(start, stop).T
        release(self._samples)
        self._latest = first, end, mel
        return mel

    def _power(self, first: int, end: int) -> NDArray[np.float32]:
        """The power spectra of some frames, float32 [end - first, FFT // 2 + 1]."""
        begin, stop = first * HOP - FFT // 2, (end - 1) * HOP + FFT // 2
        samples = self._samples[max(0, begin) : stop]
        audio = samples.astype(np.float32)
        if samples.dtype == np.int16:
            audio /= np.float32(32768)
        beyond = max(0, -begin), max(0, stop - len(self._samples))
        around = np.pad(audio, beyond, mode="reflect") if len(audio) > 1 else np.resize(audio, stop - begin)
        spectrum = np.fft.rfft(sliding_window_view(around, FFT)[::HOP] * self._window)
        return (spectrum.real**2 + spectrum.imag**2).astype(np.float32)


def mel_filters(mel_bins: int) -> NDArray[np.float32]:
    """Triangular filters on the mel scale, each with the same area, float32 [mel_bins, FFT // 2 + 1].

    The scale is Slaney's (Auditory Toolbox, 1998), as in librosa: linear below 1000 Hz, and logarithmic above.
    """
    frequencies = np.linspace(0, SAMPLE_RATE / 2, FFT // 2 + 1)
    corners = _hertz(np.linspace(0, _mels(SAMPLE_RATE / 2), mel_bins + 2))
    widths = np.diff(corners)
    slopes = corners[:, None] - frequencies
    rising, falling = -slopes[:-2] / widths[:-1, None], slopes[2:] / widths[1:, None]
    triangles = np.maximum(0, np.minimum(rising, falling))
    return (triangles * (2 / (corners[2:] - corners[:-2]))[:, None]).astype(np.float32)


LINEAR_HERTZ = 200 / 3
"""Below 1000 Hz, for each mel."""
LOG_STEP = np.log(6.4) / 27
"""Above 1000 Hz, which is mel 15."""


def _mels(hertz: float) -> float:
    return float(hertz / LINEAR_HERTZ if hertz < 1000 else 15 + np.log(hertz / 1000) / LOG_STEP)


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(mels < 15, mels * LINEAR_HERTZ, 1000 * np.exp(LOG_STEP * (mels - 15)))
