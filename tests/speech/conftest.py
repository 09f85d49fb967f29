"""Tiny Whisper models with a vocabulary of bytes and the special tokens of multilingual models."""

from functools import cache

import numpy as np
import pytest
from tokenizers import AddedToken

import specbeam
from specbeam.speech import vocabulary
from tests.conftest import byte_tokenizer, torch, transformers
from tests.written import WrittenModel

POSITIONS, BANDS = 50, 80
SPECIAL = ("endoftext", "startoftranscript", "en", "de", "fr", "translate", "transcribe", "startoflm", "startofprev")
SPECIAL += ("nospeech", "notimestamps")
END, START, ENGLISH, GERMAN, _, TRANSLATE, TRANSCRIBE, _, PREVIOUS, NO_SPEECH, NO_TIMES = range(256, 267)
TIMES = NO_TIMES + 1
"""The first timestamp. There are ``POSITIONS + 1``."""


def whisper_tokenizer():
    tokenizer = byte_tokenizer(vocab_size=256)
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(f"<|{name}|>") for name in SPECIAL]})
    return tokenizer


@cache
def text_tokens(text):
    """The tokens of a text, one for each byte."""
    return tuple(whisper_tokenizer().backend_tokenizer.encode(text, add_special_tokens=False).ids)


def random_whisper(seed=0, **changes):
    sizes = {"vocab_size": TIMES + POSITIONS + 1, "d_model": 32, "num_mel_bins": BANDS, "init_std": 0.5}
    sizes |= {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}
    sizes |= {"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 48}
    sizes |= {"max_source_positions": POSITIONS, "max_target_positions": 64, "begin_suppress_tokens": None}
    ends = {"decoder_start_token_id": START, "bos_token_id": END, "eos_token_id": END, "pad_token_id": END}
    if torch is None:
        return WrittenModel({"model_type": "whisper"} | sizes | ends | changes, seed)
    torch.manual_seed(seed)
    config = transformers.WhisperConfig(**sizes | ends | changes)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.fixture(autouse=True)
def small_vocabularies_have_languages(monkeypatch):
    monkeypatch.setattr(vocabulary, "MULTILINGUAL", TIMES)


@pytest.fixture(scope="module")
def whisper(save):
    """A tiny model, as we run it."""
    return specbeam.load(save(random_whisper(), whisper_tokenizer()), quantize="float32", threads=1)


def noise(seconds, seed=0):
    rng = np.random.default_rng(seed)
    return (0.1 * rng.normal(size=int(16_000 * seconds))).astype(np.float32)
