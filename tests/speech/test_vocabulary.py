"""The special tokens of Whisper's three vocabularies, and what models with them write."""

import json
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import specbeam
from specbeam import SpecbeamError, transcribe
from specbeam.checkpoints.tokenizers.folder_tokenizer import WhisperTokenizer
from specbeam.speech import Settings, vocabulary
from specbeam.speech.vocabulary import CODES, Vocabulary
from tests.conftest import needs_torch, torch, transformers
from tests.speech.conftest import noise, random_whisper

MULTILINGUAL = 51_865
LANGUAGES = ["en", "zh", "de", *(f"x{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")]
LANGUAGES += [f"{a}{b}q" for a in "abc" for b in "abcdefghijklmnopqrstuvwxyz"]


def layout(end, languages, no_speech):
    """A tokenizer's special tokens, in the order of Whisper's vocabularies."""
    names = ["endoftext", "startoftranscript", *languages, "translate", "transcribe", "startoflm", "startofprev"]
    names += [no_speech, "notimestamps"]
    return {end + place: SimpleNamespace(content=f"<|{name}|>") for place, name in enumerate(names)}


def model(tokens, size, shape=(80, 3000)):
    backend = SimpleNamespace(features_shape=shape, vocab_size=size)
    return SimpleNamespace(
        source="some", backend=backend, tokenizer=SimpleNamespace(added_tokens_decoder=tokens), decode_token=str
    )


def test_names_of_languages_are_those_of_openai_whisper():
    """Transformers has them, too."""
    expected = pytest.importorskip("transformers.models.whisper.tokenization_whisper").TO_LANGUAGE_CODE
    assert expected == CODES
    assert {Settings(language=name.title()).language for name in expected} == {*expected.values()}
    assert [Settings(language=code).language for code in ("EN", " yue", "xx")] == ["en", "yue", "xx"]


of_each_vocabulary = pytest.mark.parametrize(
    ("size", "end", "languages", "no_speech"),
    [
        (51_864, 50_256, LANGUAGES[:99], "nocaptions"),
        (51_865, 50_257, LANGUAGES[:99], "nospeech"),
        (51_866, 50_257, LANGUAGES[:100], "nospeech"),
    ],
    ids=["English only", "multilingual", "large-v3"],
)


@of_each_vocabulary
def test_tokens_of_each_vocabulary(monkeypatch, size, end, languages, no_speech):
    monkeypatch.setattr(vocabulary, "MULTILINGUAL", MULTILINGUAL)
    tokens = Vocabulary.of(model(layout(end, languages, no_speech), size))
    is_multilingual = size >= MULTILINGUAL
    assert (tokens.end, tokens.start) == (end, end + 1)
    assert tokens.timestamps == range(size - 1501, size)
    assert tokens.no_timestamps == size - 1502
    assert tokens.no_speech == size - 1503
    assert tokens.previous == size - 1504
    assert [*tokens.languages] == (languages if is_multilingual else [])
    assert tokens.tasks == ({"transcribe": size - 1506, "translate": size - 1507} if is_multilingual else {})
    assert tokens.suppressed(()) == [end + 1, *range(size - 1507, size - 1502)]
    assert tokens.suppressed((7, 8)) == [7, 8, end + 1, *range(size - 1507, size - 1502)]


def tokenizer_files(folder, size, end, languages, no_speech):
    """A tokenizer with the special tokens of a vocabulary. Its text is bytes, and words that nothing makes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    text = [*alphabet, *(f"filler{place}" for place in range(end - len(alphabet)))]
    backend = Tokenizer(models.BPE({token: place for place, token in enumerate(text)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    special = [token.content for token in layout(end, languages, no_speech).values()]
    backend.add_tokens([AddedToken(name, special=True) for name in special])
    backend.add_tokens([AddedToken(f"<|{place / 50:.2f}|>", normalized=False) for place in range(1501)])
    assert backend.get_vocab_size() == size
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "WhisperTokenizer"}))


@needs_torch
@of_each_vocabulary
def test_models_of_each_vocabulary_write_what_transformers_do(
    save, tmp_path, monkeypatch, size, end, languages, no_speech
):
    monkeypatch.setattr(vocabulary, "MULTILINGUAL", MULTILINGUAL)
    is_multilingual, bands = size >= MULTILINGUAL, 128 if size > MULTILINGUAL else 80
    ids = {"decoder_start_token_id": end + 1, "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    sizes = {"vocab_size": size, "num_mel_bins": bands, "d_model": 16, "max_source_positions": 1500}
    model = random_whisper(**sizes, **ids, max_target_positions=448)
    model.save_pretrained(tmp_path)
    tokenizer_files(tmp_path, size, end, languages, no_speech)
    lm = specbeam.load(tmp_path, quantize="float32", threads=1)
    assert isinstance(lm.tokenizer, WhisperTokenizer)
    tokens = Vocabulary.of(lm)
    settings = {
        "is_multilingual": is_multilingual,
        "no_timestamps_token_id": tokens.no_timestamps,
        "prev_sot_token_id": tokens.previous,
        "max_initial_timestamp_index": 50,
        "max_length": 448,
        "suppress_tokens": tokens.suppressed((-1,)),
        "begin_suppress_tokens": tokens.blank,
        "return_timestamps": True,
        **ids,
    }
    if is_multilingual:
        settings["lang_to_id"] = {f"<|{name}|>": token for name, token in tokens.languages.items()}
        settings["task_to_id"] = tokens.tasks
    model.generation_config = transformers.GenerationConfig(**settings)
    sound = noise(40)
    how = {"truncation": False, "padding": "longest", "return_attention_mask": True, "return_tensors": "pt"}
    read = transformers.WhisperFeatureExtractor(feature_size=bands)(sound, sampling_rate=16_000, **how)
    with torch.no_grad():
        expected = model.generate(
            **read,
            **({"language": "de", "task": "translate"} if is_multilingual else {}),
            **{"return_timestamps": True, "return_segments": True, "condition_on_prev_tokens": True},
            max_new_tokens=12,
        )["segments"][0]
    expected = [one for one in expected if one["start"] < 40]  # theirs may begin behind the end
    asked = ("de", "translate") if is_multilingual else ()
    found = transcribe(lm, sound, *asked, num_beams=1, temperature=0, max_new_tokens=12, **LIMITS)
    assert len(found.segments) == len(expected) > 1
    for segment, theirs in zip(found.segments, expected, strict=True):
        assert segment.tokens == theirs["tokens"].tolist()[: len(segment.tokens)]
        assert segment.start == pytest.approx(float(theirs["start"]), abs=0.005)


LIMITS = {"no_speech_threshold": None, "vad_filter": False}


def test_a_tokenizer_of_another_model_is_refused():
    tokens = layout(50_257, LANGUAGES[:99], "nospeech")
    del tokens[50_258]
    with pytest.raises(SpecbeamError, match=r"the tokenizer of some has no <\|startoftranscript\|>"):
        Vocabulary.of(model(tokens, MULTILINGUAL))
    with pytest.raises(SpecbeamError, match="some reads no audio"):
        Vocabulary.of(model(tokens, MULTILINGUAL, shape=None))
