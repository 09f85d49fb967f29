"""Token ids of texts that grow at their end. The cost of new text does not depend on the length of the text before it.

New text may change how the text before it is split into tokens: "hel" and "lo" may become "hello". So the end of the
text is encoded again with the new text. It may begin anywhere, also within a word. The first ids of the end alone can
then be other ids than in the whole text. How many differ is not assumed: less text is encoded again only where it was
seen to end with the same ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specbeam.text.detokenizer import shared_length

MIN_WINDOW_CHARACTERS = 64
"""Encode at least this much text again."""


@dataclass(frozen=True)
class EncodedEnd:
    """The end of a text, and its token ids.

    Attributes:
        text: the window: the last characters, as many as are encoded again. At first the whole text.
        ids: of the window alone.
        apart: the number of first ids that the whole text may not have. It has all ids after them.
    """

    text: str = ""
    ids: tuple[int, ...] = ()
    apart: int = 0


def extend(encode: Callable[[str], list[int]], end: EncodedEnd, new: str) -> tuple[EncodedEnd, int] | None:
    """The end of the text after new text, and how many ids of the end before stay as they are.

    None if the new text changes ids before the window.
    """
    ids = tuple(encode(end.text + new))
    unchanged = shared_length([end.ids, ids])
    return (EncodedEnd(end.text + new, ids, end.apart), unchanged) if unchanged >= end.apart else None


def shorten(encode: Callable[[str], list[int]], end: EncodedEnd) -> EncodedEnd:
    """Let the window begin later, if the whole text surely has at least half of its ids then."""
    length = MIN_WINDOW_CHARACTERS
    while 2 * length <= len(end.text):
        text = end.text[-length:]
        ids = tuple(encode(text))
        same = min(shared_length([ids[::-1], end.ids[::-1]]), len(end.ids) - end.apart)
        if same and 2 * same >= len(ids):
            return EncodedEnd(text, ids, len(ids) - same)
        length *= 2
    return end
