"""Samples of files equal faster-whisper's, and no file does harm. Recorded with faster-whisper 1.2.1."""

import hashlib
import io
import os
import re
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from specbeam import SpecbeamError
from specbeam.speech import audio
from specbeam.system import child_processes
from tests.speech.sounds import recorded, tones, write_wav

av = pytest.importorskip("av")


def digest(samples):
    assert samples.dtype == np.int16
    return hashlib.sha256(samples.tobytes()).hexdigest()[:16]


def refusal(source, **how):
    with pytest.raises(SpecbeamError) as error:
        audio.load(source, **how)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture(scope="module")
def wav(tmp_path_factory):
    return write_wav(tmp_path_factory.mktemp("sound") / "tones.wav", tones(4))


@pytest.mark.parametrize(
    ("rate", "channels", "size", "expected"),
    [
        (8000, 1, 2, "49badc275f2a2c55"),
        (11025, 2, 2, "e8748d02fb58903f"),
        (44100, 2, 2, "a074aeecfafb29e5"),
        (48000, 3, 3, "37ff64027e55a712"),
        (96000, 1, 3, "b711d0156d3af93d"),
        (96000, 2, 2, "4df30bd7894ef9d2"),
        (16000, 1, 2, "371e7b8e0f2c6a99"),
    ],
)
def test_samples_equal_faster_whispers(rate, channels, size, expected, tmp_path):
    path = write_wav(tmp_path / "x.wav", tones(1.25, rate, channels), rate, size)
    samples = audio.load(path)
    assert (len(samples), digest(samples)) == (20_000, expected)


def test_samples_of_speech_equal_faster_whispers(caplog):
    found = [
        (len(samples), digest(samples)) for samples in map(audio.load, map(recorded, ("jfk.flac", "hotwords.mp3")))
    ]
    assert found == [(176_000, JFK), (64_000, HOTWORDS)]
    assert not caplog.records


JFK, HOTWORDS = "252fca5b7c2acd89", "9107c8fd1f815ea2"


def test_an_open_file_a_pipe_and_a_path_give_the_same(wav, tmp_path):
    content = wav.read_bytes()
    expected = tones(4)[:, 0]
    with wav.open("rb") as file:
        given = [str(wav), io.BytesIO(content), file]
        assert all(np.array_equal(audio.load(source), expected) for source in given)
    os.mkfifo(pipe := tmp_path / "pipe")
    writer = threading.Thread(target=pipe.write_bytes, args=[content])
    writer.start()
    assert np.array_equal(audio.load(pipe), expected)
    writer.join()


def test_no_temporary_file_is_left(wav, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    samples = [audio.load(wav), audio.load(io.BytesIO(wav.read_bytes()))]
    refusal(io.BytesIO(b"no sound"))
    assert not [*tmp_path.iterdir()]
    assert np.array_equal(*samples)
    with pytest.raises(ValueError, match="read-only"):
        samples[0][0] = 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process from /proc")
def test_the_memory_of_a_file_is_given_back(tmp_path):
    def mapped():
        lines = Path("/proc/self/status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("RssFile", "RssShmem"))) * 1024

    samples = audio.load(write_wav(tmp_path / "long.wav", tones(300)))
    total, before = samples.sum(), mapped()
    audio.release(samples[5:])
    assert before - mapped() > 0.9 * samples.nbytes
    assert samples.sum() == total
    audio.release(tones(1))  # of no file


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
def test_a_disk_that_takes_a_part_of_the_samples_is_full(wav, monkeypatch):
    import resource

    monkeypatch.setenv("PYTHONUNBUFFERED", "1")  # usual in images
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        decoding = audio.begin(wav)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with decoding, pytest.raises(SpecbeamError, match="its samples cannot be written: File too large"):
        decoding.samples()


def test_arrays_are_checked_and_given_back():
    for samples in (np.zeros(5, np.int16), np.array([-1, 1], np.float32), np.zeros(0, np.float32)):
        assert audio.load(samples) is samples
    assert "2 x 3: give one dimension" in refusal(np.zeros((2, 3), np.float32))
    assert "int32: give floats from -1 to 1, or int16" in refusal(np.zeros(3, np.int32))
    assert "from -2.5 to 1" in refusal(np.array([-2.5, 1], np.float32))
    for value in (np.nan, np.inf, -np.inf):
        assert f"the one at 2.00 s is {value:g}: give numbers" in refusal(np.r_[np.zeros(32_000), value, np.nan])
    assert "more than 1 seconds" in refusal(np.zeros(16_001, np.int16), max_seconds=1)
    assert "give a path, an open file, or an array" in refusal([0.0, 0.1])


def test_arrays_of_other_libraries_are_taken():
    """float64, one channel as torchaudio and soundfile have it, and what resampling leaves above 1."""
    samples = np.array([-1.0005, 0.25, 1.0005])
    for given in (samples, samples[None], samples[:, None], samples.astype(np.float16), samples[None].astype(">f8")):
        found = audio.load(given)
        assert (found.dtype, found.shape) == (np.float32, (3,))
        assert np.array_equal(found, given.ravel().astype(np.float32))


def encoded(tmp_path, name, codec, pipe=False, samples=None):
    """A file that FFmpeg writes, or what it writes to a pipe, where it cannot go back to the header."""
    samples, out = tones(3) if samples is None else samples, io.BytesIO()
    target = SimpleNamespace(write=out.write) if pipe else out
    with av.open(target, "w", format=name) as container:
        stream = container.add_stream(codec, rate=16_000, layout="mono")
        resampler = av.AudioResampler(stream.format.name, "mono", 16_000, stream.frame_size or 1024)
        frame = av.AudioFrame.from_ndarray(samples.T, "s16", "mono")
        frame.sample_rate = 16_000
        for part in (*resampler.resample(frame), *resampler.resample(None), None):
            container.mux(stream.encode(part))
    (path := tmp_path / f"x.{name}").write_bytes(out.getvalue())
    return path


@pytest.mark.parametrize(
    ("name", "codec"), [("wav", "pcm_s16le"), ("wav", "pcm_f32le"), ("caf", "pcm_s16be"), ("wav", "adpcm_ima_wav")]
)
def test_a_file_from_a_pipe_is_not_damaged(name, codec, tmp_path, caplog):
    path = encoded(tmp_path, name, codec, pipe=True)
    assert np.array_equal(audio.load(path), audio.load(encoded(tmp_path, name, codec)))
    assert not caplog.records


def test_samples_that_are_no_numbers_are_silent(tmp_path, caplog):
    """FFmpeg makes them full-scale clicks."""
    path = encoded(tmp_path, "wav", "pcm_f32le")
    content, at = path.read_bytes(), path.read_bytes().find(b"data") + 8
    samples = np.frombuffer(content[at:], "<f4").copy()
    samples[32_000:32_003] = np.nan, np.inf, -np.inf
    path.write_bytes(content[:at] + samples.tobytes())
    expected = tones(3)[:, 0].copy()
    expected[32_000:32_003] = 0
    assert np.array_equal(audio.load(path), expected)
    assert [one.getMessage() for one in caplog.records] == [
        f"{path} is damaged at 2.0 s: 3 samples are no numbers, and are silent"
    ]


def test_a_cut_mp4_is_incomplete(tmp_path):
    """Its index is at its end. FFmpeg calls it invalid."""
    content = encoded(tmp_path, "mp4", "aac").read_bytes()
    for size in (len(content) // 2, content.find(b"moov") + 300):  # before the index, and within it
        (cut := tmp_path / "cut.m4a").write_bytes(content[:size])
        assert refusal(cut) == f"{cut}: it is incomplete: its index, which is at the end, is missing. Fetch it again"


def test_bad_files_get_one_line_with_their_name(tmp_path, wav):
    noise = np.random.default_rng(0).bytes(50_000)
    files = {
        "empty.mp3": b"",
        "noise.flac": noise,
        "noise": noise,
        "text.txt": b"Four score and seven years ago\n" * 99,
    }
    files["headless.wav"] = wav.read_bytes()[:20]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        assert refusal(tmp_path / name).startswith(f"{tmp_path / name}: it ")
    assert refusal(tmp_path / "nowhere.mp3") == f"{tmp_path}/nowhere.mp3: it cannot be read: No such file or directory"
    assert refusal(tmp_path) == f"{tmp_path}: it is a folder"
    assert refusal("/dev/zero") == "/dev/zero: it is no file"
    assert refusal("a\0b").endswith("it cannot be read: embedded null byte")
    assert refusal(io.StringIO("text"), name="talk") == "talk: it gives text: open it for reading bytes"
    assert refusal(io.BytesIO(b"")) == "the file: it is empty"
    assert refusal(wav, max_seconds=3.5).endswith("it has more than 3.5 seconds of audio")


def test_a_video_without_sound(tmp_path):
    path = tmp_path / "silent.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 32
        frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8))
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            container.mux(packet)
    assert refusal(path) == f"{path}: it has no audio"


def test_a_cut_file_gives_what_comes_before_the_cut(tmp_path, wav, caplog):
    cut = tmp_path / "cut.wav"
    cut.write_bytes(wav.read_bytes()[: 44 + 2 * 40_000])
    samples = audio.load(cut)
    assert np.array_equal(samples, tones(4)[: len(samples), 0])
    assert 39_000 < len(samples) <= 40_000
    assert [record.getMessage() for record in caplog.records] == [
        f"{cut} is damaged at 2.5 s: 2.5 seconds of audio could be read"
    ]


def test_speech_that_is_cut(tmp_path, caplog):
    cut = tmp_path / "cut.flac"
    cut.write_bytes(recorded("jfk.flac").read_bytes()[:500_000])
    assert (len(samples := audio.load(cut)), digest(samples)) == (73_561, CUT)
    assert "of 11.0 seconds of audio, 4.6 could be read" in caplog.text


CUT = "cc6946c4feed9d32"


def sweep(seconds, rate):
    """Samples of int16, [time, 1]: a tone that rises, so that each moment differs from the others."""
    time = np.arange(seconds * rate) / rate
    return (9000 * np.sin(2 * np.pi * (200 + 90 * time) * time)).astype(np.int16)[:, None]


def encode(path, codec, samples, rate):
    """Write samples of one channel in the format that the file's name says."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples.T), format="s16", layout="mono")
        frame.sample_rate = rate
        size = stream.codec_context.frame_size or 1024
        resampler = av.AudioResampler(format=stream.format, layout="mono", rate=rate, frame_size=size)
        for part in (*resampler.resample(frame), *resampler.resample(None), None):
            container.mux(stream.encode(part))


def test_an_ogg_file_that_is_cut_between_its_pages(tmp_path, caplog):
    """FFmpeg takes the place of the last page for the length."""
    path, rate = tmp_path / "tones.ogg", 48_000
    encode(path, "libopus", tones(8, rate), rate)
    content, whole = path.read_bytes(), audio.load(path)
    assert not caplog.records
    pages = [place for place in range(len(content)) if content.startswith(b"OggS", place)]
    for end in (pages[len(pages) // 2], pages[-1], pages[-1] + 10, len(content) - 3):
        path.write_bytes(content[:end])
        caplog.clear()
        samples = audio.load(path)
        assert 16_000 < len(samples) <= len(whole)
        assert [record.getMessage().partition(":")[0] for record in caplog.records] == [f"{path} is damaged"]


@pytest.mark.parametrize(
    ("name", "codec", "rate"),
    [
        ("x.ogg", "libopus", 48_000),
        ("x.webm", "libopus", 48_000),
        ("x.m4a", "aac", 16_000),
        ("x.mp3", "libmp3lame", 16_000),
        ("x.flac", "flac", 16_000),
    ],
)
def test_damage_in_the_middle_is_silence_and_the_rest_keeps_its_times(name, codec, rate, tmp_path, caplog):
    """faster-whisper ends at the first frame that it cannot decode, or leaves it out."""
    path = tmp_path / name
    encode(path, codec, sweep(8, rate), rate)
    whole = audio.load(path)
    assert not caplog.records
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 3000] = np.random.default_rng(0).bytes(3000)
    path.write_bytes(content)
    samples = audio.load(path)
    assert abs(len(samples) - len(whole)) < 800
    found = np.correlate(samples[110_000:116_000].astype(float), whole[111_000:115_000].astype(float), "valid")
    assert abs(int(found.argmax()) - 1000) < 500
    heard = np.abs(samples[: len(samples) // 1600 * 1600].astype(int)).reshape(-1, 1600)
    silent = np.flatnonzero(heard.max(1) < 100)
    (message,) = [record.getMessage() for record in caplog.records]
    place, missing = map(float, re.findall(r"[\d.]+(?= s:| seconds)", message.removeprefix(str(path))))
    assert message.endswith("seconds of silence stand for what is missing")
    assert abs(len(silent) / 10 - missing) < 0.3
    assert abs(silent[0] / 10 - place) < 0.3


@pytest.mark.parametrize(("name", "codec"), [("x.mp3", "libmp3lame"), ("x.aac", "aac")])
def test_bytes_that_are_taken_out_of_the_middle_are_named_by_their_place(name, codec, tmp_path, caplog):
    """Nothing says how many there were, so there is at most a frame of silence. Both formats count on."""
    path = tmp_path / name
    encode(path, codec, sweep(8, 16_000), 16_000)
    whole, content = audio.load(path), path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + content[middle + len(content) // 16 :])
    assert not caplog.records
    assert len(audio.load(path)) < len(whole) - 5000
    (message,) = [record.getMessage() for record in caplog.records]
    assert abs(float(re.findall(r" is damaged at ([\d.]+) s: ", message)[0]) - 4) < 0.4


def test_a_file_that_names_other_files_reads_none_of_them(tmp_path, wav):
    (tmp_path / "other.wav").write_bytes(wav.read_bytes())
    lists = {"list.ffconcat": "ffconcat version 1.0\nfile other.wav\n", "list.m3u8": "#EXTM3U\n#EXTINF:1,\nother.wav\n"}
    for name, content in lists.items():
        (path := tmp_path / name).write_text(content)
        assert refusal(path).startswith(f"{path}: it ")


def test_decoding_ends_at_its_limit_of_time_and_a_crash_ends_the_child_alone(tmp_path, wav, monkeypatch):
    long = write_wav(tmp_path / "long.wav", tones(600, 8000), 8000)
    with audio.begin(long, cpu_seconds=1e-4) as decoding, pytest.raises(SpecbeamError, match="too much processor time"):
        decoding.samples()
    crash = [sys.executable, "-c", "import os; os.abort()"]
    monkeypatch.setattr(
        child_processes, "start", lambda *_, **how: partial(child_processes.subprocess.Popen, crash)(**how)
    )
    assert refusal(wav) == f"{wav}: the process that decodes it ended with status -6"
