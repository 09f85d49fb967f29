"""A tiny random model with a byte tokenizer: passes that cost little, so that all else shows."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import specbeam
from specbeam import LanguageModel

BOS, EOS = 256, 257


def load_toy(
    folder: Path, *, context: int, seed: int = 0, layers: int = 2, hidden: int = 48, shuffled: bool = False
) -> LanguageModel:
    """Write a model to an empty folder and load it on the ``cpu`` backend.

    Args:
        context: the most tokens of a sequence.
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
