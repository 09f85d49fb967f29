"""Prompts that are too long are refused before all of their text is tokenized, and no other prompt is."""

from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

import specbeam
from specbeam.errors import PromptTooLong, SpecbeamError
from specbeam.models import prompts
from specbeam.models.prompts import encode, token_ids
from tests.conftest import byte_tokenizer, fast_tokenizer

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SOME_LETTERS = [letter for i, letter in enumerate(LETTERS) if i % 3 or letter in "ab\u0120"]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def made(model, splits=None, normalizer=None, added=()):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.normalizer = splits, normalizer
    tokenizer.add_tokens([AddedToken("<added token>", normalized=True), *added])
    return fast_tokenizer(tokenizer)


def numbered(*tokens):
    return {token: i for i, token in enumerate(tokens)}


def byte_level(letters=LETTERS, normalizer=None, added=(), **how):
    merges = [("a", "b"), ("ab", "ab"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ")]
    model = models.BPE(numbered(*letters, *("".join(pair) for pair in merges)), merges, **how)
    return made(model, pre_tokenizers.ByteLevel(add_prefix_space=False), normalizer, added)


def sentencepiece(kind, tokens=BYTE_TOKENS, normalizer=None, byte_fallback=True):
    vocabulary = ["<unk>", *tokens, "▁", "a", "b", "ab", "▁ab"]
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if kind == "unigram":
        model = models.Unigram([(t, -float(i + 1)) for i, t in enumerate(vocabulary)], 0, byte_fallback)
    else:
        merges = [("a", "b"), ("▁", "ab")]
        model = models.BPE(numbered(*vocabulary), merges, unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback)
    return made(model, normalizer=normalizer or spaces)


WORDS, BYTES = pre_tokenizers.Whitespace(), models.BPE(numbered(*LETTERS), [])
TOKENIZERS = {
    "byte-level": byte_level(),
    "byte-level, without some bytes": byte_level(SOME_LETTERS),
    "byte-level, runs of unknown bytes are one token": byte_level(["?!", *SOME_LETTERS], unk_token="?!", fuse_unk=True),
    "NFC": byte_level(normalizer=normalizers.NFC()),
    "BPE with bytes": sentencepiece("bpe"),
    "rstrip": byte_level(added=[AddedToken("<r>", rstrip=True)]),
    "lstrip": byte_level(added=[AddedToken("<l>", lstrip=True)]),
    "fuse_unk": sentencepiece("bpe", byte_fallback=False),
    "Unigram": sentencepiece("unigram"),
    "words": made(models.WordLevel(numbered("<unk>", "ab"), unk_token="<unk>"), WORDS),
    "pieces of words": made(models.WordPiece(numbered("<unk>", "a", "##b"), unk_token="<unk>"), WORDS),
    "dropped spaces": made(BYTES, pre_tokenizers.Sequence([WORDS, pre_tokenizers.ByteLevel()])),
    "dropped letters": byte_level(normalizer=normalizers.Replace(Regex("b+"), "")),
}

PIECES = st.sampled_from([*"a \nK가각ΐ\u1fd3é😀\0", "ab", "  ", "e\u0301", "<added token>", "<r>", "<l>"])
RUNS = st.lists(st.tuples(PIECES | st.characters(exclude_categories=["Cs"]), st.integers(1, 9)), min_size=1, max_size=9)
TEXTS = RUNS.map(lambda runs: "".join(piece * times for piece, times in runs))


@pytest.fixture
def read(monkeypatch):
    """The lengths of the texts that are tokenized."""
    lengths, tokenize = [], prompts.tokenize

    def noting(tokenizer, text, *how, **details):
        lengths.append(len(text))
        return tokenize(tokenizer, text, *how, **details)

    monkeypatch.setattr(prompts, "tokenize", noting)
    return lengths


def encoded(tokenizer, text):
    """The prompt of a model with a context of 256."""
    backend = SimpleNamespace(vocab_size=10**6, context_length=256, start_token_ids=None)
    return encode(SimpleNamespace(tokenizer=tokenizer, backend=backend, source="it"), text, raw=True, max_tokens=255)


def test_a_long_prompt_is_refused_by_its_beginning(lm, read):
    beginning = 8 * (255 + 1024)
    says = "has at least 9,208 tokens, but .* has a context of 256, which must hold at least one new token too: shorten"
    for prompt in ("word " * 4000, ["Hi", "word " * 4000]):
        with pytest.raises(SpecbeamError, match=says):
            specbeam.generate(lm, prompt, max_new_tokens=1)
    assert max(read) == beginning
    for name in ("rstrip", "words", "dropped letters"):
        with pytest.raises(PromptTooLong, match=r"has at least [0-9,]+ tokens, but it has a context of 256"):
            encoded(TOKENIZERS[name], "abc d " * 100_000)
    assert max(read) <= 4 * beginning


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lstrip", " " * 100_000 + "<l>"),
        ("rstrip", "<r>" + " " * 100_000),
        ("fuse_unk", "\u4e2d" * 100_000),
        ("words", "x" * 100_000),
        ("pieces of words", "x" * 100_000),
        ("dropped letters", "b" * 100_000 + "a"),
        ("dropped spaces", " " * 100_000 + "a"),
    ],
)
def test_a_long_prompt_of_few_tokens_is_read(name, text):
    ids = encoded(TOKENIZERS[name], text)
    assert ids == TOKENIZERS[name](text, add_special_tokens=False).input_ids
    assert len(ids) <= 3
    assert encoded(byte_level(SOME_LETTERS), "\x01" * 100_000 + "a") != []


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@given(text=TEXTS)
def test_only_a_prompt_that_is_too_long_is_refused(tokenizer, text):
    text *= 1 + 10_240 // len(text)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if len(ids) in range(1, 256):
        assert encoded(tokenizer, text) == ids
        return
    with pytest.raises(SpecbeamError) as refused:
        encoded(tokenizer, text)
    if ids:
        assert isinstance(refused.value, PromptTooLong)
        assert int(refused.value.tokens.removeprefix("at least ").replace(",", "")) <= len(ids)


def test_memory_comes_back():
    tokenizer, text, process = byte_tokenizer(), "word " * 60_000, psutil.Process()
    before = process.memory_info().rss
    assert len(token_ids(tokenizer, text)) == len(text)
    assert process.memory_info().rss - before < 20 << 20
