"""The command for audio: its files, what it prints while segments come, and how it goes on where it was interrupted."""

import json
import signal
from dataclasses import fields
from itertools import pairwise

import pytest

from specbeam.cli import transcribe
from specbeam.speech import Segment, Settings, Transcript, vocabulary
from specbeam.speech.subtitles import Layout
from specbeam.speech.transcript import Word
from tests.conftest import reference_folder
from tests.speech.conftest import TIMES, random_whisper, whisper_tokenizer
from tests.speech.sounds import recorded, tones, write_wav

pytest.importorskip("av")
MEASURES = {"avg_logprob": -0.5, "no_speech_prob": 0.1, "compression_ratio": 1.2, "temperature": 0.0}


class Scripted:
    """Stands in for a Whisper model: a segment for each second says the number of its samples.

    Attributes:
        heard: the seconds of each file.
        before: called before each segment with the seconds of the file.
    """

    def __init__(self):
        self.heard = []
        self.before = lambda seconds: None

    def __call__(self, samples):
        self.heard.append(len(samples) / 16_000)
        return self.Stream(self, samples)

    class Stream:
        def __init__(self, model, samples):
            self.model, self.seconds = model, len(samples) / 16_000
            self.transcript = Transcript("en", 1.0, self.seconds)

        def __iter__(self):
            for second in range(int(self.seconds)):
                self.model.before(self.seconds)
                words = [Word(" number", second, second + 0.5, 0.9), Word(f" {second}", second + 0.5, second + 1, 0.9)]
                text = f" number {second}"
                self.transcript.segments.append(Segment(second, second + 1, text, [second], **MEASURES, words=words))
                yield self.transcript.segments[-1]


@pytest.fixture
def model(monkeypatch):
    model = Scripted()
    monkeypatch.setattr(transcribe, "transcriber", lambda given, settings: model)
    return model


@pytest.fixture
def run(folder, specbeam_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seconds in (1, 2, 3):
        write_wav(tmp_path / f"{seconds}.wav", tones(seconds))
    return lambda *words, model=folder: specbeam_command("transcribe", *words, "--model", model)


def test_the_text_of_one_file_is_printed_while_it_comes(run, model, terminal):
    shown = terminal()
    seen = []
    model.before = lambda _: seen.append(shown.text())
    status, _, err = run("3.wav", "--format", "srt")
    assert status == 0
    first, second = "1\n00:00:00,000 --> 00:00:01,000\nnumber 0\n\n", "2\n00:00:01,000 --> 00:00:02,000\nnumber 1\n\n"
    assert seen == ["", first, first + second]
    assert err.startswith("[3.0 s of audio (en) in ")


def test_json_is_one_object(run, model):
    status, out, _ = run("2.wav", "--format", "json")
    assert (status, json.loads(out)["text"]) == (0, "number 0 number 1")


def test_subtitles_of_words_are_the_same_on_standard_output_and_in_a_folder(run, model, tmp_path):
    words = ("1.wav", "--format", "vtt", "--word-timestamps", "--max-words-per-line", "1", "--highlight-words")
    status, out, _ = run(*words)
    cues = ["00:00.000 --> 00:00.500\n<u>number</u>\n\n", "00:00.500 --> 00:01.000\n<u>0</u>\n\n"]
    assert (status, out) == (0, "".join(["WEBVTT\n\n", *cues]))
    assert run(*words, "--output", "out")[0] == 0
    assert (tmp_path / "out/1.vtt").read_text() == out


def test_several_files_go_into_a_folder(run, model, tmp_path):
    assert run("1.wav", "2.wav")[:2] == (2, "")
    status, out, err = run("1.wav", "2.wav", "3.wav", "--output", "new/folder", "--format", "txt")
    assert (status, out, model.heard) == (0, "", [1, 2, 3])
    texts = [(tmp_path / "new/folder" / f"{number}.txt").read_text() for number in (1, 2, 3)]
    assert texts == ["number 0\n", "number 0\nnumber 1\n", "number 0\nnumber 1\nnumber 2\n"]
    assert err.startswith("[3 files, 0 failed, 6.0 s of audio in ")
    assert err.endswith(", in new/folder]\n")


@pytest.mark.parametrize("at", [1, 2, 3])
def test_the_same_command_goes_on_where_it_was_interrupted(run, model, tmp_path, at):
    words = ("1.wav", "2.wav", "3.wav", "--output", "out")
    model.before = lambda seconds: signal.raise_signal(signal.SIGINT) if seconds == at else None
    status, _, err = run(*words)
    assert status == 130
    message = f"specbeam: interrupted: {at - 1} of 3 files are finished, in out. The same command goes on from there\n"
    assert err == message
    assert [path.name for path in sorted((tmp_path / "out").glob("[!.]*"))] == [f"{n}.txt" for n in range(1, at)]
    model.before, model.heard = lambda _: None, []
    status, _, err = run(*words)
    assert (status, model.heard) == (0, [*range(at, 4)])
    assert f"[3 files{f' ({at - 1} of them earlier)' if at > 1 else ''}, 0 failed" in err
    model.heard = []
    assert run(*words)[0] == 0
    assert model.heard == []


def test_results_of_other_options_are_not_replaced(run, model, tmp_path):
    assert run("1.wav", "--output", "out")[0] == 0
    for change in (("--num-beams", "2"), ("--language", "de"), ("--quantize", "int4")):
        status, _, err = run("1.wav", "2.wav", "--output", "out", *change)
        assert (status, err.count("\n")) == (2, 1)
        assert err.startswith("specbeam: out/1.txt is there already, and not from this run")
    assert run("1.wav", "2.wav", "--output", "out", "--threads", "1")[0] == 0
    assert model.heard == [1, 2]


def test_bad_files_get_a_line_each_while_the_others_go_on(run, model, tmp_path):
    (tmp_path / "a.mp3").write_bytes(b"")
    (tmp_path / "b.mp3").write_text("a text")
    words = ("a.mp3", "1.wav", "b.mp3", "nowhere.ogg", ".", "2.wav")
    status, _, err = run(*words, "--output", "out")
    *lines, summary = err.splitlines()
    assert status == 2
    assert lines == [
        "specbeam: a.mp3: it is empty",
        "specbeam: b.mp3: it is no audio file, or its beginning is damaged",
        "specbeam: nowhere.ogg: it cannot be read: No such file or directory",
        "specbeam: .: it is a folder",
    ]
    assert summary.startswith("[6 files, 4 failed, 3.0 s of audio")
    assert model.heard == [1, 2]
    model.before = lambda _: 1 / 0
    status, _, err = run("3.wav", *words, "--output", "out")
    assert (status, "3.wav failed: ZeroDivisionError: division by zero" in err) == (2, True)
    assert run("3.wav", "1.wav", "--output", "out")[0] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["1.wav", "2.wav"], "there are 2 files, and standard output takes one: give --output DIR"),
        (["1.wav", "x/1.ogg", "--output", "out"], "1.wav and x/1.ogg would both be written to 1.txt"),
        (["-", "--output", "out"], "- reads standard input, which has no name for a result"),
        (["1.wav", "--output", "2.wav"], "--output 2.wav: the folder cannot be made: File exists"),
        (["nowhere.ogg"], "nowhere.ogg: it cannot be read: No such file or directory"),
        (["1.wav", "--task", "sing"], "--task='sing' is not allowed"),
        (["1.wav", "--num-beams", "0"], "--num-beams=0 is not allowed"),
        (["1.wav", "--temperature", "0,-1"], "--temperature="),
        (["1.wav", "--format", "doc"], "argument --format: 'doc' is not allowed: give txt, srt, vtt, tsv or json"),
        (
            ["1.wav", "--hallucination-silence-threshold", "2"],
            "--hallucination-silence-threshold=2 needs word_timestamps",
        ),
        (["1.wav", "--max-line-width", "9", "--word-timestamps"], "give --format srt or vtt, not txt"),
        (["1.wav", "--highlight-words", "--format", "srt"], "--highlight-words needs words: give --word-timestamps"),
        (
            ["1.wav", "--format=vtt", "--word-timestamps", "--max-line-count=2"],
            "--max-line-count=2 needs max_line_width",
        ),
        (["1.wav", "--no-speech-threshold", "x"], "argument --no-speech-threshold: invalid number value: 'x'"),
    ],
)
def test_wrong_input_gets_one_line_before_a_model_is_loaded(run, monkeypatch, words, message):
    monkeypatch.setattr(transcribe, "load_model", lambda given: pytest.fail("a model was loaded"))
    status, out, err = run(*words)
    assert (status, out, err.count("\n"), message in err) == (2, "", 1, True), err


def test_a_model_that_is_no_whisper(run):
    status, out, err = run("1.wav")
    *_, line = err.splitlines()
    assert (status, out) == (2, "")
    assert "hisper" in line
    status, _, err = run("1.wav", model="./nowhere")
    assert (status, err.count("\n")) == (2, 1)


def test_drafts_change_no_text_and_one_that_does_not_fit_gets_one_line(run, save, monkeypatch):
    monkeypatch.setattr(vocabulary, "MULTILINGUAL", TIMES)
    whisper, small, wide = (
        str(save(random_whisper(seed, **changes), whisper_tokenizer()))
        for seed, changes in ((0, {}), (1, {"d_model": 16}), (0, {"num_mel_bins": 128}))
    )
    words = ("2.wav", "--format", "json", "--no-vad-filter", "--dtype", "float32", "--language", "en")
    words = (*words, "--no-speech-threshold", "none", "--log-prob-threshold", "none")
    expected = run(*words, model=whisper)[:2]
    assert json.loads(expected[1])["segments"]
    for draft in (small, "ngram", "suffix"):
        assert run(*words, "--draft", draft, model=whisper)[:2] == expected
    status, out, err = run(*words, "--draft", wide, model=whisper)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert "give a draft that reads the same audio" in err


def test_options_reach_the_settings(run, monkeypatch):
    taken = []
    monkeypatch.setattr(transcribe, "transcriber", lambda given, settings: taken.append(settings) or Scripted())
    options = {"language": "de", "num_beams": 2, "temperature": [0.0, 0.5], "no_speech_threshold": None, "seed": 3}
    words = ("--language=de", "--num-beams=2", "--temperature=0,0.5", "--no-speech-threshold=none", "--seed=3")
    more = ("--no-vad-filter", "--clip-timestamps=0,1.5", "--suppress-tokens=-1,5", "--initial-prompt=Hello")
    assert run("1.wav", *words, *more)[0] == 0
    rest = {"vad_filter": False, "clip_timestamps": "0,1.5", "suppress_tokens": [-1, 5], "initial_prompt": "Hello"}
    assert taken == [options | rest]


def test_every_setting_has_an_option(specbeam_command):
    """But for the parameters of Silero."""
    _, shown, _ = specbeam_command("transcribe", "--help")
    names = {one.name.replace("_", "-") for kind in (Settings, Layout) for one in fields(kind)} - {"vad-parameters"}
    assert [name for name in sorted(names) if f"--{name}" not in shown] == []


def test_whisper_writes_what_is_said(specbeam_command):
    model, sound = reference_folder("whisper-base"), recorded("jfk.flac")
    status, out, _ = specbeam_command("transcribe", str(sound), "--model", str(model))
    said = (
        "And so my fellow Americans, ask not what your country can do for you, ask what you can do for your country.\n"
    )
    assert (status, out) == (0, said)
    asked = ("--word-timestamps", "--num-return-sequences", "2", "--top-logprobs", "1", "--format", "json")
    status, out, _ = specbeam_command("transcribe", str(sound), "--model", str(model), "--language", "English", *asked)
    (segment,) = json.loads(out)["segments"]
    words = segment["words"]
    assert (status, "".join(word["word"] for word in words)) == (0, segment["text"])
    assert all(before["end"] <= after["start"] for before, after in pairwise(words))
    assert [len(place) for place in segment["top_logprobs"]] == [1] * len(segment["tokens"])
    (window,) = json.loads(out)["windows"]
    assert (window["start"], window["end"], window["alternatives"][0]["text"]) == (0, 11, segment["text"])
    status, _, err = specbeam_command("transcribe", str(sound), "--model", str(model), "--language", "xx")
    assert (status, err.splitlines()[-1].startswith("specbeam: --language='xx' is not known")) == (2, True)
