"""The tokenizer a GGUF file carries, as the ``tokenizers`` library runs it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from specbeam.checkpoints.sources import packed
from specbeam.checkpoints.tokenizers.gguf_vocabulary import CONTROL, UNKNOWN, USER_DEFINED, GGUFVocabulary
from specbeam.errors import SpecbeamError
from specbeam.text.tokenizer import Tokenizer

logger = logging.getLogger("specbeam")

Merges = NDArray[np.int32]
MANY_TOKENS = 100_000
"""From this size on, a vocabulary's implied merges are kept. For 262,144 tokens they take 2 seconds."""
NO_ORDER = b"no order"
MAX_TOKEN_LENGTH = 1024
"""Characters. All ways to cut a token in two are tried, so the time goes with the square of its length."""

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BREAKS_AND_SPACE = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
PUNCTUATION_AND_SPACE = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + BREAKS_AND_SPACE
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
LETTERS_AND_MARKS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
PUNCTUATION_AND_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + BREAKS_AND_SPACE
CODE_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"

GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
DIGITS_APART = (r"\p{N}", *GPT2)
LLAMA3 = (rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}{{1,3}}{PUNCTUATION_AND_SPACE}",)
QWEN2 = (rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}{PUNCTUATION_AND_SPACE}",)
QWEN35 = (QWEN2[0].replace(LETTERS, LETTERS_AND_MARKS).replace(r"\p{L}\p{N}]+", r"\p{L}\p{M}\p{N}]+"),)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    rf"{CODE_PUNCTUATION}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*{BREAKS_AND_SPACE}",
)


@dataclass(frozen=True)
class Pre:
    """How a byte-level tokenizer begins, by the name of it in a file.

    Attributes:
        splits: patterns that cut the text before merging, one after the other. The ways differ in how many digits stay
            together, for example. These are the patterns of the models, which llama.cpp copies for the most part.
        adds_bos: texts begin with BOS unless the file says otherwise.
        ignores_merges: a whole piece that is a token is taken as it is, though no merges lead to it.
        composes: characters are composed first (NFC).
    """

    splits: tuple[str, ...]
    adds_bos: bool = False
    ignores_merges: bool = False
    composes: bool = False


DEFAULT = Pre((r"[\p{P}\$\+<=>\^~\|]+", *GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
"""llama.cpp's way for files that do not name one."""
PRE = {
    "default": DEFAULT,
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        Pre(LLAMA3, adds_bos=True, ignores_merges=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Pre(LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), Pre(QWEN2, composes=True)),
    "qwen35": Pre(QWEN35, composes=True),
    **dict.fromkeys(("kormo", "f2llmv2", "hunyuan", "solar-open"), Pre(QWEN2)),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat", "a.x-4.0"),
        Pre(GPT2),
    ),
    "mellum": Pre(GPT2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        Pre(DIGITS_APART),
    ),
    **dict.fromkeys(
        ("gpt-4o", "llama4", "kanana2", "talkie"),
        Pre((CASED % ((f"{CONTRACTIONS}?",) * 2) + r"|\p{N}{1,3}" + PUNCTUATION_AND_SLASHES,)),
    ),
    "tekken": Pre((CASED % ("", "") + r"|\p{N}" + PUNCTUATION_AND_SLASHES,), adds_bos=True, ignores_merges=True),
    "falcon": Pre((r"[\p{P}\$\+<=>\^~\|`]+", *GPT2, r"[0-9][0-9][0-9]")),
    "deepseek-coder": Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), Pre(DEEPSEEK3)),
    "seed-coder": Pre((rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{BREAKS_AND_SPACE}",)),
}
STRIPPING = ("phi-3", "phi3")
"""In models with one of these in their names, special tokens take the space that follows them, except these:"""
NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")


def tokenizer_from_gguf(metadata: Mapping[str, Any], vocabulary: GGUFVocabulary) -> Tokenizer:
    """A tokenizer with the vocabulary, special tokens and chat template of a GGUF file's metadata."""

    def get(key: str, otherwise: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", otherwise)

    kind, path = vocabulary.kind, vocabulary.path
    if kind == "gpt2":
        pre = _pre(get("pre"), vocabulary)
        tokenizer, begins = _byte_level(vocabulary, get("merges"), pre), pre.adds_bos
    elif kind == "llama":
        tokenizer, begins = _sentencepiece(vocabulary, get), True
    elif kind == "gemma4":
        tokenizer, begins = _characters(vocabulary, get("merges")), True
    else:
        raise SpecbeamError(f"{path} carries a tokenizer of kind {kind!r}: supported are gemma4, gpt2 and llama")

    name = str(metadata.get("general.name")).lower()
    _add_special(tokenizer, vocabulary, strips=any(part in name for part in STRIPPING))
    _surround(tokenizer, vocabulary, {"bos": get("add_bos_token", begins), "eos": get("add_eos_token", False)})
    special = {name: vocabulary.tokens[i] for name, i in vocabulary.special.items()}
    return Tokenizer(tokenizer, special, metadata.get("tokenizer.chat_template"))


def _add_special(tokenizer: Backend, vocabulary: GGUFVocabulary, strips: bool) -> None:
    """Add the tokens that are read as a whole. Special ones are not shown."""
    named = set(vocabulary.special.values())
    added = []
    for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        special = kind in (CONTROL, UNKNOWN) or i in named
        if special or kind == USER_DEFINED:
            rstrip = strips and token not in NOT_STRIPPING
            added.append(AddedToken(token, normalized=False, special=special, rstrip=rstrip))
    tokenizer.add_tokens(added)


def _surround(tokenizer: Backend, vocabulary: GGUFVocabulary, has: Mapping[str, bool]) -> None:
    """Let each text begin with BOS and end with EOS, as far as it has them."""
    ids: dict[str, int] = {}
    for name in (name for name in has if has[name]):
        if f"{name}_token" not in vocabulary.special:
            raise SpecbeamError(
                f"{vocabulary.path}: its texts have a token {name} (add_{name}_token), but it names none "
                f"({name}_token_id): convert the model again"
            )
        ids[name] = vocabulary.special[f"{name}_token"]
    before, after = ([vocabulary.tokens[ids[name]]] if name in ids else [] for name in ("bos", "eos"))
    if ids:
        surround(tokenizer, before, after)


def surround(tokenizer: Backend, before: list[str], after: list[str]) -> None:
    """Let each text begin and end with some tokens of the vocabulary."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B", *after],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in {*before, *after}],
    )


def _pre(name: str | None, vocabulary: GGUFVocabulary) -> Pre:
    if not name:
        logger.warning(
            "%s does not say how its tokenizer splits text (tokenizer.ggml.pre): llama.cpp's default is used, and "
            "texts may be worse. Convert the model again",
            vocabulary.path,
        )
        return DEFAULT
    if name not in PRE:
        raise SpecbeamError(
            f"{vocabulary.path}: how its tokenizer {name!r} splits text is not known here: known are "
            f"{', '.join(sorted(PRE))}"
        )
    return PRE[name]


def _byte_level(vocabulary: GGUFVocabulary, merges: list[str] | None, pre: Pre) -> Backend:
    """Byte-pair encoding over bytes, as GPT-2 and most later models have it."""
    merges = _needed(merges, vocabulary, "byte")
    tokenizer = Backend(models.BPE(vocabulary.ids, _pairs(merges), ignore_merges=pre.ignores_merges))
    if pre.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), behavior="isolated") for split in pre.splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _needed(merges: list[str] | None, vocabulary: GGUFVocabulary, unit: str) -> list[str]:
    if merges is None:
        raise SpecbeamError(
            f"{vocabulary.path}: its tokenizer has no merges (tokenizer.ggml.merges), without which each {unit} would "
            "be a token: convert the model again"
        )
    return merges


def _characters(vocabulary: GGUFVocabulary, given: list[str] | None) -> Backend:
    """Byte-pair encoding over characters, as Gemma 4 has it. Spaces are written as U+2581, and runs of newlines apart.

    A run of newlines that is a token stays whole, as in llama.cpp, whichever merges lead to it.
    """
    pairs = _pairs(_needed(given, vocabulary, "character"))
    runs = {token: i for token, i in vocabulary.ids.items() if token.strip("\n") == ""}
    whole = [(left, right) for _, left, right in cuts(dict(sorted(runs.items(), key=lambda run: len(run[0]))))]
    merges, unknown = [*dict.fromkeys([*pairs, *whole])], _unknown(vocabulary)
    tokenizer = Backend(models.BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), behavior="isolated")
    tokenizer.decoder = sentencepiece_decoder(strips=False)
    return tokenizer


def _unknown(vocabulary: GGUFVocabulary) -> str:
    """The token of characters without a token."""
    return vocabulary.tokens[vocabulary.special["unk_token"]] if "unk_token" in vocabulary.special else "<unk>"


def _pairs(merges: list[str]) -> list[tuple[str, str]]:
    """The two parts of each merge, in the order in which they are preferred. The first of equal ones counts."""
    cuts = ((merge, merge.find(" ", 1)) for merge in merges)
    return list(dict.fromkeys((merge[:i], merge[i + 1 :]) for merge, i in cuts if i > 0))


def _sentencepiece(vocabulary: GGUFVocabulary, get: Any) -> Backend:
    """SentencePiece's byte-pair encoding, whose merges are implied: the pair that makes the best-scored token first."""
    tokens, path = vocabulary.tokens, vocabulary.path
    scores: list[float] = get("scores") or [0.0] * len(tokens)
    if len(scores) != len(tokens):
        raise SpecbeamError(f"{path}: its tokenizer has {len(tokens)} tokens and {len(scores)} scores")
    check_lengths(tokens, path)
    implied = _kept_merges(vocabulary, scores)
    if implied is None:
        merges = _pairs(_given_merges(get("merges"), path))
    else:
        names = np.array(tokens, object)
        merges = [*zip(names[implied[:, 0]], names[implied[:, 1]], strict=True)]
    unknown = _unknown(vocabulary)
    tokenizer = Backend(models.BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    space_prefix = get("add_space_prefix", True)
    spaces = [normalizers.Prepend("▁")] if space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = sentencepiece_decoder(strips=bool(space_prefix))
    return tokenizer


def sentencepiece_decoder(*, strips: bool) -> decoders.Decoder:
    """Makes spaces and bytes of their tokens.

    Args:
        strips: take away the space that texts begin with.
    """
    strip = [decoders.Strip(" ", 1, 0)] if strips else []
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])


def check_lengths(tokens: Iterable[str], path: Any) -> None:
    """Raises SpecbeamError if :func:`cuts` would take far too long."""
    if (longest := max(map(len, tokens))) > MAX_TOKEN_LENGTH:
        raise SpecbeamError(
            f"{path}: its tokenizer has a token of {longest} characters, at most {MAX_TOKEN_LENGTH} fit"
        )


def cuts(ids: Mapping[str, int]) -> Iterator[tuple[str, str, str]]:
    """All ways to make a token of two: the token and its parts, in the order of the tokens and of the cuts."""
    for token in ids:
        for i in range(1, len(token)):  # millions of times for 262,144 tokens
            if (left := token[:i]) in ids and (right := token[i:]) in ids:
                yield token, left, right


def _kept_merges(vocabulary: GGUFVocabulary, scores: list[float]) -> Merges | None:
    """:func:`_implied_merges` of a vocabulary. A large one has them beside the packed weights."""
    if len(scores) < MANY_TOKENS:
        return _implied_merges(vocabulary.ids, scores)

    def make() -> bytes:
        merges = _implied_merges(vocabulary.ids, scores)
        return NO_ORDER if merges is None else merges.tobytes()

    content = hashlib.sha256("\0".join(vocabulary.tokens).encode(errors="surrogatepass"))
    content.update(np.array([*map(len, vocabulary.tokens)]).tobytes())
    content.update(np.array(scores).tobytes())
    kept = packed.kept(packed.label(Path(vocabulary.path)), f"merges-{content.hexdigest()[:16]}", make)
    return None if kept == NO_ORDER else np.frombuffer(kept, np.int32).reshape(-1, 2)


def _implied_merges(ids: Mapping[str, int], scores: list[float]) -> Merges | None:
    """The pairs of tokens that make a token, int32 [n, 2], the best-scored token first; None if scores say no order.

    Args:
        ids: of all tokens, in their order.
    """
    implied = [(-scores[i := ids[token]], ids[left], ids[right], i) for token, left, right in cuts(ids)]
    if len({merge[0] for merge in implied}) == 1 and len({merge[3] for merge in implied}) > 1:
        return None
    implied.sort()
    return np.array([merge[1:3] for merge in implied], np.int32).reshape(-1, 2)


def _given_merges(merges: list[str] | None, path: Any) -> list[str]:
    """The merges of a file whose scores are all equal, and therefore say no order."""
    if not merges:
        raise SpecbeamError(
            f"{path}: its tokenizer has equal scores for all tokens (tokenizer.ggml.scores), so it does not say which "
            "pairs to merge first: convert the model again from its tokenizer.model"
        )
    logger.warning(
        "%s: its tokenizer has equal scores for all tokens, so its list of merges says which pairs to merge first. "
        "llama.cpp does not use that list, and merges other pairs",
        path,
    )
    return merges
