"""The special tokens of Whisper's three vocabularies, and the symbols that nobody speaks."""

from types import SimpleNamespace

import pytest

from specbeam import SpecbeamError
from specbeam.speech import vocabulary
from specbeam.speech.vocabulary import Vocabulary

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


@pytest.mark.parametrize(
    ("size", "end", "languages", "no_speech"),
    [
        (51_864, 50_256, LANGUAGES[:99], "nocaptions"),
        (51_865, 50_257, LANGUAGES[:99], "nospeech"),
        (51_866, 50_257, LANGUAGES[:100], "nospeech"),
    ],
    ids=["English only", "multilingual", "large-v3"],
)
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


def test_a_tokenizer_of_another_model_is_refused():
    tokens = layout(50_257, LANGUAGES[:99], "nospeech")
    del tokens[50_258]
    with pytest.raises(SpecbeamError, match=r"the tokenizer of some has no <\|startoftranscript\|>"):
        Vocabulary.of(model(tokens, MULTILINGUAL))
    with pytest.raises(SpecbeamError, match="some reads no sound"):
        Vocabulary.of(model(tokens, MULTILINGUAL, shape=None))
