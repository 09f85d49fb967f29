"""Log-mel features, against transformers' and, for their filters, librosa's formula."""

import tracemalloc

import numpy as np
import pytest

from specbeam.speech.log_mel import LogMel, mel_filters


def tone(seconds, seed=0):
    """Noise with a tone that grows and falls, float32 [16000 seconds]."""
    rng, times = np.random.default_rng(seed), np.arange(int(seconds * 16_000)) / 16_000
    loudness = 0.3 * np.sin(times / 3) ** 2
    return (loudness * np.sin(700 * times) + 0.003 * rng.normal(size=len(times))).astype(np.float32)


def long_form(samples, bands):
    """The features that transformers' long form makes of a file, float32 [mel bins, frames]."""
    extract = pytest.importorskip("transformers").WhisperFeatureExtractor(feature_size=bands)
    made = extract(samples, sampling_rate=16_000, truncation=False, padding="longest", return_attention_mask=True)
    return made.input_features[0]


@pytest.mark.parametrize("bands", [80, 128])
def test_filters_are_those_of_transformers(bands):
    extract = pytest.importorskip("transformers").WhisperFeatureExtractor(feature_size=bands)
    np.testing.assert_allclose(mel_filters(bands), np.transpose(extract.mel_filters), atol=1e-7)


@pytest.mark.parametrize("bands", [80, 128])
@pytest.mark.parametrize("seconds", [0.05, 0.3, 29.99, 30, 71.234])
def test_features_are_those_of_the_long_form(seconds, bands):
    samples = tone(seconds)
    expected, mel = long_form(samples, bands), LogMel(samples, bands)
    assert mel.frames == expected.shape[1] == len(samples) // 160
    found = np.concatenate(
        [mel.window([(at, min(at + 700, mel.frames))], 700) for at in range(0, mel.frames, 700)], axis=1
    )
    np.testing.assert_allclose(found[:, : mel.frames], expected, atol=1e-4)
    assert not found[:, mel.frames :].any()  # what windows lack is 0.0 after the logarithm


def test_whole_numbers_stand_for_their_samples():
    whole = (tone(8) * 32768).astype(np.int16)
    one, other = (LogMel(samples, 80).window([(0, 800)], 3000) for samples in (whole, whole / np.float32(32768)))
    np.testing.assert_array_equal(one, other)


def test_a_window_depends_on_the_file_and_its_place_alone():
    mel = LogMel(tone(65), 80)
    window = mel.window([(3100, 6100)], 3000)
    mel.window([(0, 3000)], 3000)
    np.testing.assert_array_equal(mel.window([(3100, 6100)], 3000), window)
    np.testing.assert_array_equal(LogMel(tone(65), 80).window([(3100, 6100)], 3000), window)


def test_pieces_follow_each_other():
    mel = LogMel(tone(20), 80)
    joined = mel.window([(100, 400), (900, 1000)], 500)
    for place, piece in ((slice(0, 300), (100, 400)), (slice(300, 400), (900, 1000))):
        np.testing.assert_allclose(joined[:, place], mel.window([piece], 3000)[:, : piece[1] - piece[0]], atol=1e-6)
    assert not joined[:, 400:].any()


def test_spectra_of_hours_take_no_more_memory_than_those_of_seconds():
    def peak(seconds):
        samples = tone(seconds)
        tracemalloc.start()
        LogMel(samples, 80).window([(0, 3000 if seconds > 30 else 100 * seconds)], 3000)
        _, highest = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return highest

    peak(5)  # what is made once
    assert peak(200) < 2 * peak(11)  # the features of a whole window are most of the difference


def test_silence_is_all_floor():
    np.testing.assert_allclose(LogMel(np.zeros(16_000, np.int16), 80).window([(0, 100)], 100), -1.5, atol=1e-6)
