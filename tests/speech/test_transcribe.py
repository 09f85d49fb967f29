"""Transcription as a whole: on tiny random models, and Whisper base against transformers' long form."""

import json
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, WhisperFeatureExtractor

import specbeam
from specbeam import SpecbeamError, transcribe, transcribe_stream
from specbeam.speech import speech_engine
from specbeam.speech.vocabulary import Vocabulary
from tests.backends.test_whisper import samples, whisper_base
from tests.speech.conftest import ENGLISH, START, noise, random_whisper

PLAIN = {"vad_filter": False, "temperature": 0}


WAYS = ({}, {"temperature": (0, 0.2, 1), "best_of": 2}, {"num_beams": 1, "draft": "ngram"})


@pytest.mark.parametrize("options", WAYS)
def test_a_text_is_the_same_alone_among_others_and_streamed(whisper, options):
    files = [noise(seconds, seed) for seed, seconds in enumerate([0.5, 2.3, 5.1, 0.0, 1.2, 3.3])]
    options = {"vad_filter": False, "log_prob_threshold": -0.8, "no_speech_threshold": None, **options}
    together = transcribe(whisper, files, **options)
    assert sum(len(one.segments) for one in together) > 6
    assert [one.duration for one in together] == [0.5, 2.3, 5.1, 0.0, 1.2, 3.3]
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


def test_the_language_is_the_likeliest_and_takes_no_second_pass_of_the_encoder(whisper, monkeypatch):
    read, states = [], whisper.backend.states
    monkeypatch.setattr(whisper.backend, "states", lambda features: read.append(features) or states(features))
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
    read, states = [], whisper.backend.states
    monkeypatch.setattr(whisper.backend, "states", lambda features: read.append(1) or states(features))
    transcript = transcribe(
        whisper, noise(0.9), "en", vad_filter=False, log_prob_threshold=0.0, no_speech_threshold=None, best_of=2
    )
    assert len(transcript.segments[0].rejected) == 5
    assert len(read) == 1


def test_stretches_of_speech_are_read_for_themselves_and_in_order(whisper, monkeypatch):
    sound = noise(12)
    found = [(0, 8000), (16_000, 20_000), (40_000, 130_000), (150_000, 165_000)]
    vad = SimpleNamespace(stretches=lambda samples, **given: [*found, *given.values()])
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


def test_models_and_languages_that_do_not_fit_are_refused(whisper, tiny, save, monkeypatch):
    with pytest.raises(SpecbeamError, match="reads no sound: give a Whisper model"):
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
    folder, model = whisper_base()
    lm = specbeam.load(folder, dtype="float32")
    tokens = Vocabulary.of(lm)
    model.generation_config = GenerationConfig(
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
    first, second = samples(av, AUDIO / "jfk.flac"), samples(av, AUDIO / "hotwords.mp3")
    parts = [first, second, first[40_000:], second, first, first[:120_000], second, first]
    return {"jfk": first, "joined": np.concatenate(parts)}


@pytest.mark.parametrize("name", ["jfk", "joined"])
def test_whisper_base_writes_and_measures_what_openai_whisper_does(base, name):
    """Against openai-whisper 20250625 with the same weights in float32, greedy."""
    expected = json.loads((Path(__file__).parent / "openai_whisper.json").read_text())[name]
    transcript = transcribe(base[0], recordings()[name], "en", num_beams=1, vad_filter=False, temperature=0)
    for segment, theirs in zip(transcript.segments, expected, strict=True):
        assert segment.tokens == theirs["tokens"]
        for measure in ("start", "end", "avg_logprob", "no_speech_prob", "compression_ratio"):
            assert getattr(segment, measure) == pytest.approx(theirs[measure], abs=1e-3)


@pytest.mark.parametrize("beams", [1, 5])
def test_whisper_base_writes_what_the_long_form_of_transformers_writes(base, beams):
    lm, model = base
    sound = recordings()["joined"]
    how = {"truncation": False, "padding": "longest", "return_attention_mask": True, "return_tensors": "pt"}
    read = WhisperFeatureExtractor()(sound, sampling_rate=16_000, **how)
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
