"""The texts of a grammar that has few."""

from __future__ import annotations

from typing import Any

import numpy as np

from specbeam.structured.trials import byte_tokenizer, limits

MAX_TEXTS, MAX_STEPS = 256, 5_000
"""A longer list is not made, nor one that takes more steps: a step takes 20 microseconds."""
LEXER_FUEL = 5_000
"""For a step: 0.4 milliseconds at most."""


def texts_of(grammar: str, max_symbols: int) -> tuple[str, ...] | None:
    """All texts of a grammar as llguidance reads it; None if there are many, or if it takes long to find them."""
    from llguidance import LLMatcher

    start = LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=limits(LEXER_FUEL, max_symbols))
    found, level, steps = list[bytes](), [(b"", start)], 0
    while level:
        below = list[tuple[bytes, Any]]()
        for text, matcher in level:
            if matcher.is_accepting():
                found.append(text)
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            steps += 1
            if matcher.is_error():
                return None
            for byte in np.flatnonzero(np.unpackbits(bits, bitorder="little")[:256]).tolist():
                after = matcher.deep_copy()
                after.consume_token(byte)
                below.append((text + bytes([byte]), after))
            if len(found) + len(below) > MAX_TEXTS or steps > MAX_STEPS:
                return None
        level = below
    try:
        return tuple(text.decode() for text in found)
    except UnicodeDecodeError:
        return None
