"""Texts with more tokens than a prompt may have are refused before all of them is tokenized.

Tokenizing takes a second and 100 MB for each megabyte. So ever longer beginnings of a text are tokenized first, until
one has clearly too many tokens. The tokens of such a beginning are counted and never used.
"""

from __future__ import annotations

from collections.abc import Callable

CHARACTERS_PER_TOKEN = 8
"""A text with fewer characters for each token of the limit is tokenized as a whole."""
MAX_TORN_TOKENS = 1024
"""More tokens than the pieces of one token or word have, where a beginning of the text ends within it."""
GROWTH = 4
"""The factor by which the next beginning of a text is longer."""


def least_tokens(text: str, most: int, count: Callable[[str], int]) -> int:
    """A number of tokens that a text has at least. It is above ``most`` only if the text certainly has more.

    Args:
        count: the number of tokens of a text, from the tokenizer.
    """
    size = CHARACTERS_PER_TOKEN * (most + MAX_TORN_TOKENS)
    while size < len(text):
        beginning = text[:size].rstrip()  # the next token may take all space before it (lstrip)
        if (least := count(beginning) - MAX_TORN_TOKENS) > most:
            return least
        size *= GROWTH
    return 0
