"""Where a text has the last tokens of a sequence."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_MATCH_TOKENS = 8
"""Compare at most this many of the last tokens: a longer match hardly makes the draft better."""


def occurrences(text: NDArray[np.integer], tokens: NDArray[np.integer]) -> tuple[NDArray[np.int64], int]:
    """The places in a text after the longest suffix of a sequence that it has, ascending, and the suffix's length."""
    matched, longer = 0, text == tokens[-1]
    begins = longer[:0]  # by token of the text, whether the match begins there
    while longer.any():
        begins, matched = longer, matched + 1
        if matched == min(MAX_MATCH_TOKENS, len(tokens)):
            break
        longer = begins[1:] & (text[:-matched] == tokens[-1 - matched])
    return np.flatnonzero(begins) + matched, matched
