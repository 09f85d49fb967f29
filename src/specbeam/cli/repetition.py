"""Texts that ended in a loop."""

from __future__ import annotations

import re

MIN_TIMES = 4
"""A text that says something three times may mean it."""
MIN_CHARACTERS = 80
"""Of all the repetitions together: "no, no, no, no" is no loop."""
MAX_CHARACTERS = 20_000
"""Of a text's end. Nothing before it is looked at."""


def repeated_end(text: str) -> str:
    """The part that a text repeats until it ends, from the start of a line or word; empty if it does not.

    The last repetition may be cut. Numbers count as equal, since a list that counts its equal lines is a loop, too.
    """
    plain = re.sub(r"[0-9]+", "0", text[-MAX_CHARACTERS:])
    backwards = plain[::-1]
    # The prefix function of Knuth, Morris and Pratt: borders[n] is the longest part of the first n characters, but
    # not all of them, with which these both begin and end. So they repeat every n - borders[n] characters.
    borders, length_of_part = [0, 0], 0
    for end in range(1, len(backwards)):
        border = borders[end]
        while border and backwards[border] != backwards[end]:
            border = borders[border]
        borders.append(border + (backwards[border] == backwards[end]))
        length = end + 1
        period = length - borders[length]
        if length >= max(MIN_CHARACTERS, MIN_TIMES * period):
            length_of_part = period
    if not length_of_part:
        return ""
    part = plain[-length_of_part:]
    begin = next((part.index(space) + 1 for space in "\n " if space in part), 0)
    return (part[begin:] + part[:begin]).strip()
