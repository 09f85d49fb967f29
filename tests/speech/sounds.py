"""Audio files for tests, and the audio that real ones hold."""

import wave
from pathlib import Path

import numpy as np
import pytest

RECORDED = Path(__file__).parents[3] / "shared/data/audio"


def recorded(name):
    """A file of real speech."""
    path = RECORDED / name
    if not path.is_file():
        pytest.skip(f"needs ../shared/data/audio/{name}")
    return path


def tones(seconds=1.0, rate=16_000, channels=1):
    """Samples of int16, [time, channel]: a chord of integers, which no library rounds otherwise."""
    time = np.arange(int(seconds * rate), dtype=np.int64)
    saws = [(time * frequency * 65536 // rate) % 65536 - 32768 for frequency in (220, 331, 479)]
    return np.stack([saw // 3 for saw in saws[:channels]], axis=1).astype(np.int16)


def write_wav(path, samples, rate=16_000, bytes_per_sample=2):
    """Write samples [time, channel] of int16. With 3 bytes each, the lowest is 0x55."""
    data = samples.astype("<i2").view(np.uint8).reshape(-1, 2)
    if bytes_per_sample == 3:
        data = np.concatenate([np.full((len(data), 1), 0x55, np.uint8), data], axis=1)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(bytes_per_sample)
        file.setframerate(rate)
        file.writeframes(data.tobytes())
    return path
