"""Tiny random models: passes that cost little, so that all else shows."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import specbeam
from specbeam import LanguageModel

BOS, EOS = 256, 257
WORDS = "the little keeper of a lighthouse walked down to sea and saw that it was good said nothing about them"


def load_toy(
    folder: Path, *, context: int, seed: int = 0, layers: int = 2, hidden: int = 48, shuffled: bool = False
) -> LanguageModel:
    """Write a model to an empty folder and load it on the ``cpu`` backend.

    Args:
        context: the maximum number of tokens of a sequence.
        shuffled: the bytes have other token ids, so that the vocabulary is another.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.3,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    if shuffled:
        random.Random(seed).shuffle(letters)
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    named = {"bos_token": "<bos>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    return specbeam.load(folder, backend="cpu", quantize="float32")


def write_model(folder: Path, vocab_size: int, context: int) -> Path:
    """A tiny random model, with a byte-level tokenizer trained on a few words. Each of its tokens is text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = [c for c in pre_tokenizers.ByteLevel.alphabet() if c.isascii()]
    tokenizer.train_from_iterator(
        [WORDS], trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=context, initializer_range=0.4,
        tie_word_embeddings=False, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
