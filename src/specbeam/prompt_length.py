"""Texts with more tokens than a prompt may have are refused before all of them is tokenized.

Tokenizing takes a second and 100 MB for each megabyte. A text is refused by its length in bytes if no tokens within the
limit can stand for them. Where a tokenizer proves no such bound, beginnings of the text are tokenized, and one with
clearly too many tokens decides. The tokens of such a beginning are counted and never used.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from tokenizers import models

from specbeam.errors import SpecbeamError
from specbeam.token_texts import BYTES

CHARACTERS_PER_TOKEN = 8
"""A text with fewer characters for each token of the limit is tokenized as a whole."""
MAX_TORN_TOKENS = 1024
"""More tokens than the pieces of one token or word have, where a beginning of the text ends within it."""
GROWTH = 4
"""The factor by which the next beginning of a text is longer."""
NOT_IN_UTF8 = bytes([0xC0, 0xC1, *range(0xF5, 0x100)])
NFC_SHRINKS = 4
"""The normal form NFC makes a text shorter by a smaller factor than this: U+0390 has 2 bytes and may stand for 7."""


class PromptTooLong(SpecbeamError):
    """A prompt has more tokens than it may have.

    Attributes:
        tokens: how many, such as "300" or "at least 8,200".
    """

    def __init__(self, message: str, tokens: str) -> None:
        super().__init__(message)
        self.tokens = tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.tokens)  # else only the message would come to another process


def least_tokens(tokenizer: Any, text: str, most: int, count: Callable[[str], int]) -> int:
    """A number of tokens that a text has at least. It is above ``most`` only if the text certainly has more.

    Args:
        count: the number of tokens of a text, from the tokenizer.
    """
    size = CHARACTERS_PER_TOKEN * (most + MAX_TORN_TOKENS)
    if len(text) <= size:
        return 0
    bound = bound_of(tokenizer)
    if bound is not None and (least := bound.least_tokens(text)) > most:
        return least
    while size < len(text):
        beginning = text[:size].rstrip()  # the next token may take all space before it (lstrip)
        if (least := count(beginning) - MAX_TORN_TOKENS) > most:
            return least
        size *= GROWTH
    return 0


class Bound(NamedTuple):
    """A bound on the length of tokens, which a tokenizer proves.

    Attributes:
        longest: the most bytes of a text that a token stands for.
        lost: bytes that may vanish, since the vocabulary lacks them.
    """

    longest: int
    lost: bytes

    def least_tokens(self, text: str) -> int:
        """A number of tokens that a text has at least."""
        return -(-len(text.encode().translate(None, self.lost)) // self.longest)


_bounds: WeakKeyDictionary[Any, tuple[int, Bound | None]] = WeakKeyDictionary()


def bound_of(tokenizer: Any) -> Bound | None:
    """The bound of a tokenizer; None if it proves none.

    There is one where each byte of a text is in a token, unless it is lost by itself. Three kinds of tokenizers prove
    no bound. One kind has a token for any unknown word, or for a run of unknown characters. Another has tokens that
    take the space around them. The third has a normalizer that drops characters.
    """
    size = len(tokenizer)
    if tokenizer not in _bounds or _bounds[tokenizer][0] != size:  # tokens may have been added
        _bounds[tokenizer] = size, _bound_of(tokenizer)
    return _bounds[tokenizer][1]


def _bound_of(tokenizer: Any) -> Bound | None:
    if not tokenizer.is_fast:
        return None
    backend = tokenizer.backend_tokenizer
    model, vocabulary = backend.model, backend.get_vocab(with_added_tokens=False)
    normalizers, splits = _parts(backend.normalizer), _parts(backend.pre_tokenizer)
    added = tokenizer.added_tokens_decoder.values()
    if not all(map(_keeps_all, [*normalizers, *splits])) or any(token.lstrip or token.rstrip for token in added):
        return None
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    lost, is_nfc = b"", any(part["type"] == "NFC" for part in normalizers)
    if any(part["type"] == "ByteLevel" for part in splits):
        lost = bytes(byte for letter, byte in BYTES.items() if letter not in vocabulary)
        if is_nfc and lost.translate(None, NOT_IN_UTF8):
            return None
    elif not model.byte_fallback or any(f"<0x{byte:02X}>" not in vocabulary for byte in range(256)):
        return None
    normalize = backend.normalizer.normalize_str if normalizers else str
    tokens = [*vocabulary, *(token.content for token in added), *(normalize(token.content) for token in added)]
    return Bound(max(len(token.encode()) for token in tokens) * (NFC_SHRINKS if is_nfc else 1), lost)


def _parts(component: Any) -> list[dict[str, Any]]:
    """The description of a normalizer or a pre-tokenizer, part by part."""
    if component is None:
        return []
    rest, found = [json.loads(component.__getstate__())], []
    while rest:
        part = rest.pop()
        if part["type"] == "Sequence":
            rest += part.get("normalizers", part.get("pretokenizers"))
        else:
            found.append(part)
    return found


def _keeps_all(part: dict[str, Any]) -> bool:
    """Whether a part of a normalizer or a pre-tokenizer drops nothing of a text, and makes it no shorter (but NFC)."""
    match part["type"]:
        case "NFC" | "Prepend" | "ByteLevel" | "Digits" | "Metaspace":
            return True
        case "Replace":
            replaced = part["pattern"].get("String")
            return replaced is not None and len(replaced.encode()) <= len(part["content"].encode())
        case "Split" | "Punctuation":
            return bool(part["behavior"] != "Removed")
    return False
