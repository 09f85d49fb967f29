"""The texts of single tokens: whole characters, or bytes of a character."""

from __future__ import annotations

import re
from typing import Any

SHOWN_BYTES = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
BYTES = {chr(b): b for b in SHOWN_BYTES}
BYTES |= {chr(256 + n): b for n, b in enumerate(b for b in range(256) if b not in SHOWN_BYTES)}
"""The visible characters that stand for bytes in byte-level vocabularies (Radford et al., 2019)."""
SENTENCEPIECE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""How SentencePiece writes one byte of a character without a token."""


def text_of(tokenizer: Any, i: int, piece: str) -> str | bytes:
    """The text of a single token, with its leading space, which decoders remove from a first token.

    Args:
        piece: the token as the vocabulary writes it.
    """
    if "▁" in piece:
        return piece.replace("▁", " ")
    text: str = tokenizer.decode([i], clean_up_tokenization_spaces=False)
    if "\ufffd" not in text:
        return text
    if byte := SENTENCEPIECE_BYTE.fullmatch(piece):
        return bytes.fromhex(byte[1])
    if not BYTES.keys() >= {*piece}:
        return text
    written = bytes(BYTES[c] for c in piece)
    return text if written == text.encode() else written  # the text itself may contain U+FFFD
