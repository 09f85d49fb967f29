"""The tokenizer a GGUF file carries, as the ``tokenizers`` library runs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from specbeam.errors import SpecbeamError

CONTROL, USER_DEFINED = 3, 4
MAX_TOKEN_LENGTH = 1024
"""Characters. All ways to cut a token in two are tried, so the time goes with the square of its length."""

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
LLAMA3 = rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}{{1,3}}|{PUNCTUATION_AND_SPACE}"
QWEN2 = rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}|{PUNCTUATION_AND_SPACE}"
GPT2, DIGITS_APART = "as GPT-2 does", "as GPT-2 does, but each digit apart"
SPLITS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx", "falcon3"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2),
    **dict.fromkeys(("gpt-2", "default", "gpt2", "mpt", "olmo", "jais", "phi-2"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), DIGITS_APART),
}
"""How text is cut before merging, by the name in the file. The ways differ in how many digits stay together."""


def tokenizer_from_gguf(metadata: Mapping[str, Any], path: Path) -> Any:
    """A transformers tokenizer with the vocabulary, special tokens and chat template of a GGUF file's metadata.

    Args:
        metadata: all keys of a file that has a vocabulary.

    Raises:
        SpecbeamError: it is of a kind that is not supported.
    """
    from transformers import PreTrainedTokenizerFast

    def get(key: str, otherwise: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", otherwise)

    tokens: list[str] = get("tokens")
    kind, way = get("model"), get("pre", "default")
    if kind == "gpt2":
        tokenizer = _byte_level(tokens, get("merges", []), way, path)
    elif kind == "llama":
        tokenizer = _sentencepiece(tokens, get("scores", []), get("add_space_prefix", True), path)
    else:
        raise SpecbeamError(f"{path} carries a tokenizer of kind {kind!r}: supported are gpt2 and llama")

    types = get("token_type") or [1] * len(tokens)
    special = {name: get(f"{key}_token_id") for name, key in SPECIAL_TOKENS.items()}
    special = {name: i for name, i in special.items() if i is not None and 0 <= i < len(tokens)}
    control = {i for i, t in enumerate(types) if t == CONTROL} | set(special.values())
    added = [
        AddedToken(tokens[i], normalized=False, special=i in control)
        for i, t in enumerate(types)
        if i in control or t == USER_DEFINED
    ]
    tokenizer.add_tokens(added)
    # Older converters left the flag out for the two kinds that always begin a text with it.
    begins = kind == "llama" or SPLITS.get(way) == LLAMA3
    if get("add_bos_token", begins) and "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[tokens[bos], "$A"],
            pair=[tokens[bos], "$A", tokens[bos], "$B"],
            special_tokens=[(tokens[bos], bos)],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{name: tokens[i] for name, i in special.items()},
    )


SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _byte_level(tokens: list[str], merges: list[str], way: str, path: Path) -> Tokenizer:
    """Byte-pair encoding over bytes, as GPT-2 and most later models have it."""
    split = SPLITS.get(way)
    if split is None:
        raise SpecbeamError(
            f"{path}: how its tokenizer {way!r} splits text is not known here: known are {', '.join(sorted(SPLITS))}"
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    # Llama 3 takes a whole word that is a token as it is, though no merges lead to it.
    tokenizer = Tokenizer(models.BPE(vocabulary, [_pair(merge) for merge in merges], ignore_merges=split == LLAMA3))
    if split == QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if split == DIGITS_APART:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    elif split != GPT2:
        steps.append(pre_tokenizers.Split(Regex(split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in (GPT2, DIGITS_APART)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(tokens: list[str], scores: list[float], space_prefix: bool, path: Path) -> Tokenizer:
    """SentencePiece's byte-pair encoding, whose merges are implied: the pair that makes the best-scored token first."""
    if len(scores) != len(tokens):
        raise SpecbeamError(f"{path}: its tokenizer has {len(tokens)} tokens and {len(scores)} scores")
    if (longest := max(map(len, tokens))) > MAX_TOKEN_LENGTH:
        raise SpecbeamError(
            f"{path}: its tokenizer has a token of {longest} characters, at most {MAX_TOKEN_LENGTH} fit"
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [pair for pair in cuts if pair[0] in vocabulary and pair[1] in vocabulary]
        merges += [(-score, vocabulary[left], vocabulary[right], left, right) for left, right in pairs]
    merges.sort(key=lambda merge: merge[:3])
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [merge[3:] for merge in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    spaces = [normalizers.Prepend("▁")] if space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer
