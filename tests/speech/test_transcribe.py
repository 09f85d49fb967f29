"""Transcription as a whole: on tiny random models, and Whisper base against transformers' long form."""

import json
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import specbeam
from specbeam import SpecbeamError, transcribe, transcribe_stream
from specbeam.speech import speech_engine
from specbeam.speech.subtitles import written
from specbeam.speech.vocabulary import Vocabulary
from tests.conftest import needs_torch, torch, transformers
from tests.speech.conftest import END, ENGLISH, NO_TIMES, POSITIONS, START, TIMES, TRANSCRIBE, noise, random_whisper

PLAIN = {"vad_filter": False, "temperature": 0}


WAYS = ({}, {"temperature": (0, 0.2, 1), "best_of": 2}, {"num_beams": 1, "draft": "ngram"})


@pytest.mark.parametrize("options", WAYS)
def test_a_text_is_the_same_alone_among_others_and_streamed(whisper, options):
    files = [noise(seconds, seed) for seed, seconds in enumerate([0.5, 2.3, 3.1, 0.0, 1.2])]
    options = {"vad_filter": False, "log_prob_threshold": -0.8, "no_speech_threshold": None, **options}
    together = transcribe(whisper, files, **options)
    assert sum(len(one.segments) for one in together) > 6
    assert [one.duration for one in together] == [0.5, 2.3, 3.1, 0.0, 1.2]
    assert (together[3].text, together[3].language, together[3].segments) == ("", None, [])
    engine = speech_engine(whisper)
    for file, expected in zip(files, together, strict=True):
        assert transcribe(whisper, file, **options) == expected
        stream = transcribe_stream(whisper, file, engine=engine, **options)
        assert [*stream] == expected.segments
        assert stream.transcript == expected
    if "temperature" in options:
        assert {s.temperature for one in together for s in one.segments} >= {0, 1}
        assert transcribe(whisper, files, **options, seed=1) != together


@needs_torch
def test_the_language_is_the_likeliest_and_takes_no_second_pass_of_the_encoder(whisper, monkeypatch):
    read, encode = [], whisper.backend.encode
    monkeypatch.setattr(whisper.backend, "encode", lambda some, *of: read.extend(some) or encode(some, *of))
    transcript = transcribe(whisper, noise(2.5, 4), **PLAIN, without_timestamps=True)
    assert len(read) == 3
    model = random_whisper()
    with torch.no_grad():
        logits = model(torch.tensor(read[0])[None], decoder_input_ids=torch.tensor([[START]])).logits[0, 0]
    odds = logits[ENGLISH : ENGLISH + 3].softmax(-1)
    assert transcript.language == ("en", "de", "fr")[int(odds.argmax())]
    assert transcript.language_probability == pytest.approx(float(odds.max()), abs=1e-4)
    given = transcribe(whisper, noise(2.5, 4), language=transcript.language, **PLAIN, without_timestamps=True)
    assert (given.segments, given.language_probability) == (transcript.segments, 1.0)


def test_fallback_takes_no_second_pass_of_the_encoder(whisper, monkeypatch):
    read, encode = [], whisper.backend.encode
    monkeypatch.setattr(whisper.backend, "encode", lambda some, *of: read.extend(some) or encode(some, *of))
    transcript = transcribe(
        whisper, noise(0.9), "en", vad_filter=False, log_prob_threshold=0.0, no_speech_threshold=None, best_of=2
    )
    assert len(transcript.segments[0].rejected) == 5
    assert len(read) == 1


def test_stretches_of_speech_are_read_for_themselves_and_in_order(whisper, monkeypatch):
    sound = noise(12)
    found = [(0, 8000), (16_000, 20_000), (40_000, 130_000), (150_000, 165_000)]
    vad = SimpleNamespace(stretches=lambda samples, check: [*found], SPEECH_PAD_MS=400)
    monkeypatch.setitem(sys.modules, "specbeam.speech.vad", vad)
    options = {"temperature": 0, "no_speech_threshold": None}
    transcript = transcribe(whisper, sound, "en", **options)
    starts = [segment.start for segment in transcript.segments]
    assert starts == sorted(starts)
    assert starts[0] < 1.25
    assert all(segment.start <= segment.end for segment in transcript.segments)
    alone = [
        segment
        for clip in ([2.5, 8.13], [9.37, 10.32])
        for segment in transcribe(whisper, sound, "en", clip_timestamps=clip, **options).segments
    ]
    assert [segment for segment in transcript.segments if segment.start >= 2.5] == alone
    found.clear()
    nothing = transcribe(whisper, sound, **options)
    assert (nothing.language, nothing.text, nothing.duration) == (None, "", 12.0)


def test_memory_does_not_grow_with_the_length(whisper):
    options = {"num_beams": 1, "without_timestamps": True, "max_new_tokens": 1, "no_speech_threshold": None, **PLAIN}

    def peak(seconds):
        sound = noise(seconds)
        tracemalloc.start()
        assert transcribe(whisper, sound, "en", **options).duration == seconds
        _, highest = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return highest

    peak(2)  # what is made once
    assert peak(100) < 1.2 * peak(40)


def test_a_stream_can_be_left(whisper):
    engine = speech_engine(whisper)
    stream = transcribe_stream(whisper, noise(9), "en", engine=engine, no_speech_threshold=None, **PLAIN)
    next(stream)
    del stream
    assert engine.cache_tokens == 0
    with engine:
        stream = transcribe_stream(whisper, noise(3), "en", engine=engine, no_speech_threshold=None, **PLAIN)
        assert [*stream] == transcribe(whisper, noise(3), "en", no_speech_threshold=None, **PLAIN).segments


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 1}, {"temperature": 0.8, "best_of": 4}, {"temperature": (0, 0.8), "best_of": 4}]
)
def test_alternatives_and_log_probs_change_no_text(whisper, options):
    options = {"vad_filter": False, "log_prob_threshold": 0.0, "no_speech_threshold": None, "temperature": 0, **options}
    several = 1 if options.get("num_beams") == 1 else 4
    for sound in (noise(2.3, 2), noise(0.9)):
        plain = transcribe(whisper, sound, "en", **options)
        more = transcribe(whisper, sound, "en", **options, num_return_sequences=several, top_logprobs=3)
        for segment, bare in zip(more.segments, plain.segments, strict=True):
            assert replace(segment, log_probs=None, top_logprobs=None, window=None) == replace(bare, window=None)
            assert segment.window.alternatives[:1] == bare.window.alternatives
            assert len(segment.tokens) == len(segment.log_probs) == len(segment.top_logprobs)
            for token, log_prob, likeliest in zip(segment.tokens, segment.log_probs, segment.top_logprobs, strict=True):
                assert len(likeliest) == 3
                assert [*likeliest.values()] == sorted(likeliest.values(), reverse=True)
                assert likeliest.get(token, log_prob) == log_prob <= max(likeliest.values())
        assert [window.start for window in more.windows] == [window.start for window in plain.windows] != []
        for window in more.windows:
            own = [segment for segment in more.segments if segment.window is window]
            assert window.start <= own[0].start < own[-1].end <= window.end
            best = window.alternatives[0]
            assert best.tokens[: len(own[0].tokens)] == own[0].tokens
            assert best.avg_logprob == own[0].avg_logprob
            assert len({one.text for one in window.alternatives}) == len(window.alternatives) <= several
            if not own[0].temperature:
                assert [one.score for one in window.alternatives] == sorted(
                    (one.score for one in window.alternatives), reverse=True
                )
        assert any(len(window.alternatives) > 1 for window in more.windows) == (several > 1)


@needs_torch
def test_log_probs_and_alternatives_are_those_of_transformers(whisper, monkeypatch):
    from tests.backends.test_whisper import of_transformers

    read, encode = [], whisper.backend.encode
    monkeypatch.setattr(whisper.backend, "encode", lambda some, *of: read.extend(some) or encode(some, *of))
    how = {"without_timestamps": True, "suppress_tokens": [], "suppress_blank": False, "max_new_tokens": 6}
    how |= {"num_beams": 4, "num_return_sequences": 4, "top_logprobs": 2, "no_speech_threshold": None}
    found = transcribe(whisper, noise(0.9), "en", **PLAIN, **how)
    (segment,), (window,) = found.segments, found.windows
    model, prompt = random_whisper(), [START, ENGLISH, TRANSCRIBE, NO_TIMES]
    never = [*Vocabulary.of(whisper).suppressed(()), *range(NO_TIMES, TIMES + POSITIONS + 1)]
    expected, scores = of_transformers(
        model, read[0], prompt, num_beams=4, num_return_sequences=4, max_new_tokens=6, suppress_tokens=never
    )
    assert [one.tokens for one in window.alternatives] == [[token for token in row if token != END] for row in expected]
    assert [one.score for one in window.alternatives] == pytest.approx(scores, abs=1e-4)
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *segment.tokens]])
        logits = model(torch.tensor(read[0])[None], decoder_input_ids=ids).logits[0, len(prompt) - 1 : -1]
    log_probs = logits.log_softmax(-1)
    own = log_probs[range(len(segment.tokens)), segment.tokens].tolist()
    assert segment.log_probs == pytest.approx(own, abs=1e-4)
    for row, likeliest in zip(log_probs, segment.top_logprobs, strict=True):
        assert [*likeliest] == row.topk(2).indices.tolist()


def test_results_are_plain_data_with_what_was_asked_for(whisper):
    options = {"num_beams": 3, "no_speech_threshold": None, **PLAIN}
    plain = transcribe(whisper, noise(2.3, 2), "en", **options)
    assert [len(window["alternatives"]) for window in plain.to_dict()["windows"]] == [1] * len(plain.windows)
    assert {"words", "log_probs", "top_logprobs", "window"}.isdisjoint(plain.to_dict()["segments"][0])
    more = transcribe(
        whisper, noise(2.3, 2), "en", **options, num_return_sequences=3, top_logprobs=1, word_timestamps=True
    )
    read = json.loads(written(more, "json"))
    assert [*read] == ["text", "language", "language_probability", "duration", "segments", "windows"]
    assert {*read["windows"][0]["alternatives"][0]} == {"text", "tokens", "score", "avg_logprob", "compression_ratio"}
    assert {"words", "log_probs", "top_logprobs"} < read["segments"][0].keys()
    assert "window" not in read["segments"][0]
    assert {*read["segments"][0]["words"][0]} == {"word", "start", "end", "probability"}


def test_models_and_languages_that_do_not_fit_are_refused(whisper, tiny, save, monkeypatch):
    with pytest.raises(SpecbeamError, match="reads no audio: give a Whisper model"):
        transcribe(tiny()[1], noise(1))
    with pytest.raises(SpecbeamError, match=r"has no tokenizer, .* tokenizer\.json"):
        transcribe(replace(whisper, tokenizer=None), noise(1))
    with pytest.raises(SpecbeamError, match="unknown option 'beams'"):
        transcribe_stream(whisper, noise(1), beams=3)
    monkeypatch.setattr("specbeam.speech.vocabulary.MULTILINGUAL", 10**6)
    english = transcribe(whisper, noise(1), **PLAIN)
    assert (english.language, english.language_probability) == ("en", 1.0)
    with pytest.raises(SpecbeamError, match=r"language='de' is not allowed: .* knows English only"):
        transcribe(whisper, noise(1), "de", **PLAIN)
    with pytest.raises(SpecbeamError, match=r"task='translate' is not allowed: .* knows English only"):
        transcribe(whisper, noise(1), task="translate", **PLAIN)
    assert Vocabulary.of(whisper).tasks == {}


AUDIO = Path(__file__).parents[3] / "shared/data/audio"


@pytest.fixture(scope="module")
def base():
    """Whisper base, as we run it and as transformers does, with its settings for generation."""
    pytest.importorskip("torch")
    from tests.backends.test_whisper import whisper_base

    folder, model = whisper_base()
    lm = specbeam.load(folder, dtype="float32")
    tokens = Vocabulary.of(lm)
    model.generation_config = transformers.GenerationConfig(
        **{"is_multilingual": True, "no_timestamps_token_id": tokens.no_timestamps, "max_initial_timestamp_index": 50},
        **{"lang_to_id": {f"<|{name}|>": token for name, token in tokens.languages.items()}},
        **{"task_to_id": tokens.tasks, "prev_sot_token_id": tokens.previous, "max_length": 448},
        **{"decoder_start_token_id": tokens.start, "eos_token_id": tokens.end, "pad_token_id": tokens.end},
        **{"suppress_tokens": tokens.suppressed((-1,)), "begin_suppress_tokens": tokens.blank},
        **{"bos_token_id": tokens.end, "return_timestamps": False},
    )
    return lm, model


def test_suppressed_tokens_are_those_of_the_checkpoint(base):
    lm, _ = base
    tokens = Vocabulary.of(lm)
    assert tokens.suppressed((-1,)) == lm.generation_defaults["suppress_tokens"]
    assert tokens.blank == lm.generation_defaults["begin_suppress_tokens"]
    assert len(tokens.languages) == 99
    assert tokens.timestamps == range(50364, 51865)


def recordings():
    """The two recordings, and one of more than a minute that is made of them."""
    av = pytest.importorskip("av")
    if not AUDIO.is_dir():
        pytest.skip(f"there is no {AUDIO}")
    from tests.backends.test_whisper import samples

    first, second = samples(av, AUDIO / "jfk.flac"), samples(av, AUDIO / "hotwords.mp3")
    parts = [first, second, first[40_000:], second, first, first[:120_000], second, first]
    return {"jfk": first, "joined": np.concatenate(parts)}


@pytest.mark.parametrize("name", [pytest.param("jfk", marks=pytest.mark.thorough), "joined"])
def test_whisper_base_writes_and_measures_what_openai_whisper_does(base, name):
    """Against openai-whisper 20250625 with the same weights in float32, greedy."""
    expected = json.loads((Path(__file__).parent / "openai_whisper.json").read_text())[name]
    transcript = transcribe(base[0], recordings()[name], "en", num_beams=1, vad_filter=False, temperature=0)
    for segment, theirs in zip(transcript.segments, expected, strict=True):
        assert segment.tokens == theirs["tokens"]
        for measure in ("start", "end", "avg_logprob", "no_speech_prob", "compression_ratio"):
            assert getattr(segment, measure) == pytest.approx(theirs[measure], abs=1e-3)


@pytest.mark.parametrize(
    ("name", "beams"),
    [
        ("joined", 1),
        ("jfk", 5),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in (("jfk", 1), ("joined", 5))),
    ],
)
def test_whisper_base_finds_the_words_that_openai_whisper_does(base, name, beams):
    """Against openai-whisper 20250625 with the same weights. For beams, it was given the texts of these windows."""
    recorded = (Path(__file__).parent / "openai_whisper_words.json").read_text(encoding="utf-8")
    options = {"num_beams": beams, "vad_filter": False, "temperature": 0, "word_timestamps": True}
    transcript = transcribe(base[0], recordings()[name], "en", **options)
    for segment, (*times, words) in zip(transcript.segments, json.loads(recorded)[name][str(beams)], strict=True):
        assert (segment.start, segment.end) == pytest.approx(times, abs=0.0201)
        assert "".join(word.word for word in segment.words) == segment.text
        for word, (text, *numbers) in zip(segment.words, words, strict=True):
            assert word.word == text
            assert (word.start, word.end) == pytest.approx(numbers[:2], abs=0.0201)
            assert word.probability == pytest.approx(numbers[2], abs=1e-3)


@pytest.mark.parametrize("beams", [pytest.param(1, marks=pytest.mark.thorough), 5])
def test_whisper_base_writes_what_the_long_form_of_transformers_writes(base, beams):
    lm, model = base
    sound = recordings()["joined"]
    how = {"truncation": False, "padding": "longest", "return_attention_mask": True, "return_tensors": "pt"}
    read = transformers.WhisperFeatureExtractor()(sound, sampling_rate=16_000, **how)
    expected = model.generate(
        **read,
        **{"language": "en", "task": "transcribe", "return_timestamps": True, "return_segments": True},
        **{"condition_on_prev_tokens": True, "temperature": (0.0,), "num_beams": beams, "max_new_tokens": 220},
    )["segments"][0]
    transcript = transcribe(
        lm, sound, num_beams=beams, vad_filter=False, temperature=0, max_new_tokens=220, no_speech_threshold=None
    )
    assert transcript.language == "en"
    assert transcript.duration > 60
    assert len(transcript.segments) == len(expected)
    for segment, theirs in zip(transcript.segments, expected, strict=True):
        assert segment.tokens == theirs["tokens"].tolist()[: len(segment.tokens)]
        assert segment.start == pytest.approx(float(theirs["start"]), abs=0.005)
        assert segment.end == pytest.approx(min(float(theirs["end"]), transcript.duration), abs=0.0101)


@pytest.mark.parametrize("files", [("nowhere.mp3",), np.array(["nowhere.mp3"]), (name for name in ["nowhere.mp3"])])
def test_files_may_be_in_any_list(whisper, files):
    with pytest.raises(SpecbeamError, match=r"nowhere\.mp3: it cannot be read: No such file"):
        transcribe(whisper, files)
