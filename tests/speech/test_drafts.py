"""Drafts change no text and no score of a transcript, and a distilled draft needs no encoder pass of its own."""

import math
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

import specbeam
from specbeam import Engine, SpecbeamError, hf, transcribe, transcribe_stream
from specbeam.drafting import lookup
from specbeam.engine.shared_source import SharedSource, encode, have_equal_encoders
from specbeam.speech import speech_engine
from specbeam.speech.clips import Clip
from specbeam.speech.log_mel import LogMel
from specbeam.speech.settings import Settings
from specbeam.speech.vocabulary import Vocabulary
from specbeam.speech.windows import Transcriber, Windows
from tests.backends.test_whisper import of_transformers, whisper_base
from tests.conftest import byte_tokenizer, needs_torch
from tests.speech.conftest import (
    BANDS,
    ENGLISH,
    POSITIONS,
    START,
    TIMES,
    TRANSCRIBE,
    noise,
    random_whisper,
    whisper_tokenizer,
)
from tests.speech.sounds import recorded

NEVER_SILENT = {"vad_filter": False, "log_prob_threshold": None, "no_speech_threshold": None}
GREEDY, BEAMS = {"num_beams": 1, "temperature": 0}, {"num_beams": 3, "temperature": 0}
WAYS = {
    "greedy": GREEDY,
    "beams": BEAMS,
    "without timestamps": {**BEAMS, "without_timestamps": True},
    "prompts": {**GREEDY, "initial_prompt": "one two", "hotwords": "three"},
    "without the text before": {**BEAMS, "condition_on_previous_text": False},
    "drawn again": {"num_beams": 2, "temperature": (0, 0.4, 1), "best_of": 1, "log_prob_threshold": 0.0},
    "several are drawn": {"num_beams": 2, "temperature": (0, 0.7), "best_of": 2, "log_prob_threshold": 0.0},
}


def distilled(model, layers=1, seed=0):
    """A model with the encoder of another one, and only the first layers of its decoder."""
    sizes = {name: getattr(model.config, name) for name in ("encoder_layers", "d_model", "encoder_ffn_dim")}
    small = random_whisper(seed, decoder_layers=layers, **sizes)
    kept = small.state_dict()
    kept.update({name: weights for name, weights in model.state_dict().items() if name in kept})
    small.load_state_dict(kept)
    return small


@pytest.fixture(scope="module")
def loaded(save):
    """Models by their kinds, as a backend runs them."""
    kinds = {
        "target": random_whisper,
        "distilled": lambda: distilled(random_whisper()),
        "smaller": lambda: random_whisper(1, d_model=16, encoder_attention_heads=1, decoder_layers=1),
        "other": lambda: random_whisper(2),
    }

    @cache
    def loaded(kind, backend="cpu", dtype="float32"):
        how = {"dtype": dtype} if backend == "cpu" else {"backend": backend, "device": "cpu", "dtype": dtype}
        return specbeam.load(save(kinds[kind](), whisper_tokenizer()), **how)

    return loaded


def encoder_passes(monkeypatch, *models):
    """A list that gets the model of each encoder pass."""
    passes = []
    for lm in models:
        encode = lm.backend.encode
        monkeypatch.setattr(lm.backend, "encode", lambda *of, lm=lm, encode=encode: passes.append(lm) or encode(*of))
    return passes


QUICK = {"cpu": ("greedy", "beams", "prompts", "several are drawn"), "torch": ("prompts",)}


@pytest.mark.parametrize(
    ("backend", "way"),
    [
        pytest.param(backend, way, marks=() if way in QUICK[backend] else pytest.mark.thorough)
        for backend in QUICK
        for way in WAYS
    ],
)
def test_transcripts_are_those_without_a_draft(loaded, way, backend):
    lm, options = loaded("target", backend), {**NEVER_SILENT, **WAYS[way]}
    files = [noise(2.6, 1), noise(0.9, 2), noise(1.7, 3)]
    expected = [transcribe(lm, file, "en", **options) for file in files]
    assert all(one.segments for one in expected)
    automaton = specbeam.suffix_automaton(lm, [[token for s in expected[0].segments for token in s.tokens]])
    models = [lm, *(loaded(kind, backend) for kind in ("distilled", "smaller", "other"))]
    for draft in ("ngram", "suffix", automaton, lambda ids, lm: [65, 66, TIMES + 9], *models):
        found = transcribe(lm, files, "en", draft=draft, **options)
        assert found == expected if backend == "cpu" else [*map(rounded, found)] == [*map(rounded, expected)]


def rounded(transcript):
    """What PyTorch computes in another order differs in the last bits of the scores."""
    return [
        (s.start, s.end, s.tokens, s.temperature, len(s.rejected), round(s.avg_logprob, 3), round(s.no_speech_prob, 3))
        for s in transcript.segments
    ]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("kind", ["target", "distilled", "smaller", "other"])
def test_sequences_are_those_of_transformers(loaded, kind, beams):
    """Also if the draft has fixed sizes, so that it drafts in each round."""
    features = np.random.default_rng(5).normal(size=(BANDS, 2 * POSITIONS)).astype(np.float32)
    options = {"max_new_tokens": 20} | ({"num_beams": beams, "num_return_sequences": beams} if beams > 1 else {})
    expected, scores = of_transformers(random_whisper(), features, [START, ENGLISH, TRANSCRIBE], **options)
    engine = speech_engine(loaded("target"))
    for own in ({}, {"num_draft_tokens": 3, "draft_width": beams}):
        request = engine.submit([START, ENGLISH, TRANSCRIBE], {**options, **own}, features=features, draft=loaded(kind))
        engine.run()
        result = request.result()
        for found, tokens, score in zip(result.sequences, expected, scores, strict=True):
            assert found.token_ids == tokens[: len(found.token_ids)]
            assert beams == 1 or found.score == pytest.approx(score, abs=1e-4)
    assert result.stats.drafted > 0
    assert result.stats.accepted > 0 or kind != "target"
    assert (engine.cache_tokens, engine.kept_tokens) == (0, 0)


FIXED = {"max_new_tokens": 12, "num_draft_tokens": 2, "draft_width": 1}


@pytest.mark.parametrize("backend", ["cpu", "torch", "transformers"])
def test_a_distilled_draft_reads_the_states_of_the_targets_encoder(loaded, backend, monkeypatch):
    lm, small, other = (loaded(kind, backend) for kind in ("target", "distilled", "smaller"))
    passes = encoder_passes(monkeypatch, lm, small, other)
    features = np.random.default_rng(1).normal(size=(BANDS, 2 * POSITIONS)).astype(np.float32)
    for draft, expected in ((small, 1), (other, 2), (lm, 1)):
        for given in (features, SharedSource(features)):
            passes.clear()
            engine = Engine(lm)
            request = engine.submit([START, 65], FIXED, features=given, draft=draft)
            engine.run()
            assert request.result().stats.drafted > 0
            assert len(passes) == expected


@needs_torch
def test_encoders_are_equal_if_their_shapes_and_all_their_weights_are(loaded, save):
    def equal(one, other):
        return have_equal_encoders(one.backend, other.backend)

    lm = loaded("target")
    assert equal(lm, loaded("distilled"))
    assert not equal(lm, loaded("smaller"))
    assert not equal(lm, loaded("other"))
    assert not equal(lm, loaded("distilled", "torch"))
    assert not equal(loaded("target", "torch"), loaded("distilled", "torch", "bfloat16"))
    assert not equal(lm, specbeam.load(save(random_whisper(), whisper_tokenizer()), quantize="int8"))
    assert equal(loaded("target", "torch"), loaded("distilled", "torch"))
    for name in ("model.encoder.conv1.bias", "model.encoder.layers.0.self_attn.k_proj.weight"):
        model = distilled(random_whisper())
        model.state_dict()[name].view(-1)[-1].mul_(1 + 2e-7)
        assert not equal(lm, specbeam.load(save(model, whisper_tokenizer()), dtype="float32"))
        assert not equal(
            loaded("target", "torch"),
            specbeam.load(save(model, whisper_tokenizer()), backend="torch", device="cpu", dtype="float32"),
        )
    heads = distilled(random_whisper())
    heads.config.encoder_attention_heads = 1
    assert not equal(lm, specbeam.load(save(heads, whisper_tokenizer()), dtype="float32"))
    wrapped = [hf.wrap(model, whisper_tokenizer()) for model in (random_whisper(), distilled(random_whisper()))]
    assert equal(*wrapped)
    assert not equal(wrapped[0], hf.wrap(heads, whisper_tokenizer()))


def test_a_draft_with_an_encoder_of_its_own_must_pay_for_reading_the_sound(loaded):
    lm, sound = loaded("target"), SharedSource(np.zeros((BANDS, 2 * POSITIONS), np.float32))
    smaller = loaded("smaller").backend
    assert sound.unread_positions(lm.backend, lm.backend) == 0
    assert sound.unread_positions(loaded("distilled").backend, lm.backend) == 0
    assert sound.unread_positions(smaller, lm.backend) == POSITIONS
    encode(smaller, [sound], math.inf)
    assert sound.unread_positions(smaller, lm.backend) == 0


def test_lookups_look_into_all_windows_of_the_file(loaded, monkeypatch):
    """Also into other clips, and where no window goes on from the text before it."""
    transcriber = Transcriber.of(Vocabulary.of(loaded("target")), Settings(condition_on_previous_text=False))
    mel, said = LogMel(noise(2.0), transcriber.mel_bins), []
    clips = [Windows(transcriber, mel, [Clip([piece])], "en", None, said).segments() for piece in ((0, 90), (90, 180))]
    asked = [next(clip) for clip in clips]
    assert not asked[0].transcribed
    assert asked[1].transcribed is said
    looked = []
    make = lookup.Lookup.__init__
    monkeypatch.setattr(
        lookup.Lookup,
        "__init__",
        lambda self, *given, before=(), **how: looked.append([*before]) or make(self, *given, before=before, **how),
    )
    options = {**NEVER_SILENT, **GREEDY, "condition_on_previous_text": False}
    for draft in ("ngram", "suffix"):
        looked.clear()
        transcript = transcribe(loaded("target"), noise(2.9, 6), "en", draft=draft, **options)
        assert len(looked) > 2
        assert not looked[0]
        assert all(after[: len(before)] == before for before, after in pairwise(looked))
        assert {token for s in transcript.segments[:-1] for token in s.tokens} <= {*looked[-1]} | {
            token for s in transcript.segments[-1:] for token in s.tokens
        }


@pytest.mark.parametrize("kind", ["ngram", "suffix"])
def test_a_lookup_proposes_what_came_before_the_prompt(loaded, kind):
    """A text that was there before comes in fewer passes."""
    engine = speech_engine(loaded("target"))
    features = np.random.default_rng(9).normal(size=(BANDS, 2 * POSITIONS)).astype(np.float32)

    def run(draft):
        options = {"max_new_tokens": 24, "num_draft_tokens": 4}
        request = engine.submit([START, ENGLISH], options, features=features, draft=draft)
        engine.run()
        return request.result()

    plain = run(kind)
    again = run(lookup.Continued(kind, plain.token_ids))
    assert again.token_ids == plain.token_ids
    assert again.stats.accepted > plain.stats.accepted
    assert again.stats.target_passes < plain.stats.target_passes


def test_drafts_that_do_not_fit_are_refused_before_a_file_is_read(loaded, save, tiny):
    lm = loaded("target")
    english = whisper_tokenizer()
    more = save(random_whisper(vocab_size=TIMES + POSITIONS + 2), english)
    bytes_alone = save(random_whisper(vocab_size=TIMES + POSITIONS + 1), byte_tokenizer())
    bands = save(random_whisper(num_mel_bins=128), english)
    for source, says in (
        (more, rf"has {TIMES + POSITIONS + 2} tokens, but .* {TIMES + POSITIONS + 1}: .* draft of the same version"),
        (bands, r"reads audio features \[128, 100\] and .* give a draft that reads the same audio"),
        (bytes_alone, "has another tokenizer than .* cannot be bridged"),
    ):
        for draft in (source, specbeam.load(source, dtype="float32")):
            with pytest.raises(SpecbeamError, match=says):
                transcribe(lm, "nowhere.wav", draft=draft)
            with pytest.raises(SpecbeamError, match=says):
                transcribe_stream(lm, "nowhere.wav", draft=draft)
    with pytest.raises(SpecbeamError, match=r"draft=7 is not allowed: give a model or its source"):
        transcribe(lm, "nowhere.wav", draft=7)
    with pytest.raises(SpecbeamError, match="reads no audio"):
        transcribe(lm, "nowhere.wav", draft=tiny()[1])


@pytest.mark.thorough
@pytest.mark.parametrize("beams", [1, 5])
def test_whisper_base_with_a_draft_of_two_layers(save, beams):
    """The draft has base's encoder and its first two decoder layers."""
    folder, model = whisper_base()
    lm, sounds = specbeam.load(folder), [recorded("jfk.flac"), recorded("hotwords.mp3")]
    pytest.importorskip("av")
    model.config.decoder_layers = 2
    model.model.decoder.layers = model.model.decoder.layers[:2]
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    draft = specbeam.load(save(model, tokenizer))
    assert have_equal_encoders(lm.backend, draft.backend)
    options = {"num_beams": beams, "vad_filter": False}
    expected = transcribe(lm, sounds, "en", **options)
    assert "ask what you can do for your country" in expected[0].text
    for given in (draft, "ngram", "suffix"):
        assert transcribe(lm, sounds, "en", draft=given, **options) == expected
