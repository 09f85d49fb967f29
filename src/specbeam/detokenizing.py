"""Texts that grow by tokens. The cost of a token does not depend on the length of its text.

The text of some tokens is not the sum of the tokens' texts. A character may take several tokens, and a decoder may drop
the space before the first word. So the last tokens of a text are decoded again with each new one, as vLLM and TGI do.
How many are decoded again is not assumed: fewer are taken only where they were seen to decode to the same end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

INCOMPLETE = "\ufffd"
"""Decoders put this character where some bytes of a character are still missing, and in place of invalid bytes."""
MAX_INCOMPLETE_TOKENS = 3
"""A character of UTF-8 has at most four bytes. So at most this many tokens wait for the rest of one."""
MIN_WINDOW_TOKENS = 8
"""Decode at least this many tokens again."""


class TextEnd(NamedTuple):
    """The end of a text, and the tokens that are decoded again with the next one.

    Attributes:
        ids: the window: the last tokens, as many as are decoded again.
        texts: the text of the window, last; before it the texts without the window's last token, its last two, ...
        settled: this many of the last text's characters can no longer change.
        added: the characters that the last token settled.
    """

    ids: tuple[int, ...] = ()
    texts: tuple[str, ...] = ("",)
    settled: int = 0
    added: str = ""

    @property
    def text(self) -> str:
        """The text of the window, which ends the whole text."""
        return self.texts[-1]

    @property
    def unsettled(self) -> str:
        """The characters at the end that a later token may change."""
        return self.text[self.settled :]


class Detokenizer:
    """Decodes sequences token by token. It holds no text itself, so sequences may branch.

    Args:
        decode: makes text of token ids.
        reach: before the last token's text, the window has at least this many settled characters, or all there are.
    """

    def __init__(self, decode: Callable[[list[int]], str], reach: int = 1) -> None:
        self._decode = decode
        self._reach = max(1, reach)

    def push(self, end: TextEnd, token: int) -> TextEnd:
        """The end of the text after one more token."""
        ids = (*end.ids, token)
        text = self._decode([*ids])
        if text == end.text and not self._decode([token, token]):
            return end._replace(added="")  # a special token, which no text shows (once: a leading space may be dropped)
        texts = (*end.texts[-MAX_INCOMPLETE_TOKENS:], text)
        if not text.endswith(INCOMPLETE):
            settled = len(text)
        elif len(texts) > MAX_INCOMPLETE_TOKENS:  # what these tokens left as it was is invalid, not incomplete
            settled = shared_length(texts)
        else:
            settled = 0
        settled = max(settled, end.settled)
        after = TextEnd(ids, texts, settled, text[end.settled : settled])
        return self._shorten(after) if len(ids) % (2 * MIN_WINDOW_TOKENS) == 0 else after

    def end_of(self, tokens: list[int]) -> TextEnd:
        """The end of the text of these tokens. It decodes all of them once, and then the last ones."""
        text = self._decode(tokens)
        length = 2 * MIN_WINDOW_TOKENS
        while True:
            end = TextEnd()
            for token in tokens[-length:]:
                end = self.push(end, token)
            if text.endswith(end.text) or length >= len(tokens):
                return end
            length *= 2

    def _shorten(self, end: TextEnd) -> TextEnd:
        """Let the window begin later, if the decoder's state at its end is surely the same then.

        The texts of the last tokens must be equal. A single text could agree by chance. A byte fallback replaces each
        byte of an invalid run. It replaces each byte of an incomplete run, too.
        """
        length = MIN_WINDOW_TOKENS
        while 2 * length <= len(end.ids):
            for start in range(len(end.ids) - length, len(end.ids) - length - 1 - MAX_INCOMPLETE_TOKENS, -1):
                ids = end.ids[max(0, start) :]
                texts = tuple(self._decode([*ids[: len(ids) - k]]) for k in reversed(range(len(end.texts))))
                settled = end.settled - (len(end.text) - len(texts[-1]))
                if settled - len(end.added) < self._reach:  # a stop string may end inside the text that was added
                    break
                if all(whole.endswith(text) for whole, text in zip(end.texts, texts, strict=True)):
                    return end._replace(ids=ids, texts=texts, settled=settled)
            length *= 2
        return end


def shared_length(sequences: Sequence[Sequence[object]]) -> int:
    """With how many equal items the sequences begin."""
    return sum(1 for _ in takewhile(lambda items: len({*items}) == 1, zip(*sequences, strict=False)))
