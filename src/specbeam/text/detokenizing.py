"""Texts that grow by tokens. The cost of a token does not depend on the length of its text.

The text of some tokens is not the sum of the tokens' texts. A character may take several tokens, and a decoder may drop
the space before the first word. So the last tokens of a text are decoded again with each new one, as vLLM and TGI do.
The first tokens of a text are decoded after the prompt's last ones. How many are decoded again is not assumed: fewer
are taken only where they were seen to decode to the same end.
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
        special: the last token written out, if it is one that no text shows.
        given: characters of the prompt, after the settled ones, that a new token may still complete or change.
    """

    ids: tuple[int, ...] = ()
    texts: tuple[str, ...] = ("",)
    settled: int = 0
    added: str = ""
    special: str = ""
    given: str = ""

    @property
    def text(self) -> str:
        """The text of the window, which ends the whole text."""
        return self.texts[-1]

    @property
    def unsettled(self) -> str:
        """The characters at the end that a later token may change, without the prompt's."""
        rest = self.text[self.settled :]
        return rest[shared_length((self.given, rest)) :] if self.given else rest


class Detokenizer:
    """Decodes sequences token by token. It holds no text itself, so sequences may branch.

    Args:
        decode: makes text of token ids. It writes special tokens out with ``skip_special_tokens=False``.
    """

    def __init__(self, decode: Callable[..., str]) -> None:
        self._decode = decode

    def push(self, end: TextEnd, token: int) -> TextEnd:
        """The end of the text after one more token."""
        ids = (*end.ids, token)
        text = self._decode([*ids])
        if text == end.text and not self._decode([token, token]):  # twice: one leading space may be dropped
            if special := self._decode([token], skip_special_tokens=False):
                return end._replace(added="", special=special)
            if len(end.texts) > MAX_INCOMPLETE_TOKENS and {*end.texts} == {text}:  # more than one character's bytes
                ids = (*ids[: -MAX_INCOMPLETE_TOKENS - 1], *ids[-MAX_INCOMPLETE_TOKENS:])
        texts = (*end.texts[-MAX_INCOMPLETE_TOKENS:], text)
        if not text.endswith(INCOMPLETE):
            settled = len(text)
        elif len(texts) > MAX_INCOMPLETE_TOKENS:  # what these tokens left as it was is invalid, not incomplete
            settled = shared_length(texts)
        else:
            settled = 0
        settled = max(settled, end.settled)
        new, given = text[end.settled : settled], ""
        if end.given:
            new = new[shared_length((end.given, new)) :]
            given = end.given[settled - end.settled :] if settled < len(text) else ""
        after = TextEnd(ids, texts, settled, new, given=given)
        return self._shorten(after) if len(ids) % (2 * MIN_WINDOW_TOKENS) == 0 else after

    def end_of(self, tokens: list[int]) -> TextEnd:
        """The end of the text of these tokens. It decodes the last ones, or all if these do not settle the end."""
        length = 2 * MIN_WINDOW_TOKENS
        while length < len(tokens):
            text, longer = self._decode(tokens[-length:]), self._decode(tokens[-2 * length :])
            sure = text.lstrip(INCOMPLETE)  # a window may begin within a character
            if sure and not sure.endswith(INCOMPLETE) and longer.endswith(sure):
                return TextEnd((*tokens[-length:],), (text,), len(text))
            length *= 2
        text = self._decode(tokens)
        return TextEnd((*tokens,), (text,), len(text.rstrip(INCOMPLETE)))

    def after(self, prompt: list[int]) -> TextEnd:
        """The end of a text that has no token yet, and goes on from a prompt.

        The text is what decoding both together gives beyond the prompt's own text. A decoder that drops the space
        before the first word of a text keeps it there. Where the first tokens complete the prompt's last character, or
        change the prompt's last characters, the text begins with these.
        """
        end = self.end_of(prompt)
        return end._replace(settled=0, given=end.text)

    def _shorten(self, end: TextEnd) -> TextEnd:
        """Let the window begin later, if the decoder's state at its end is surely the same then.

        The texts of the last tokens must be equal. A single text could agree by chance. A byte fallback replaces each
        byte of an invalid run. It replaces each byte of an incomplete run, too.
        """
        # The last complete text has all settled characters. In an incomplete one bytes may stand for some of them.
        complete = max((i for i, text in enumerate(end.texts) if not text.endswith(INCOMPLETE)), default=-1)
        length = MIN_WINDOW_TOKENS
        while 2 * length <= len(end.ids):
            for start in range(len(end.ids) - length, len(end.ids) - length - 1 - MAX_INCOMPLETE_TOKENS, -1):
                ids = end.ids[max(0, start) :]
                texts = tuple(self._decode([*ids[: len(ids) - k]]) for k in reversed(range(len(end.texts))))
                settled = end.settled - (len(end.texts[complete]) - len(texts[complete]))
                if settled - len(end.added) < 1:  # a decoder may drop the first space of its text
                    break
                if all(whole.endswith(text) for whole, text in zip(end.texts, texts, strict=True)):
                    return end._replace(ids=ids, texts=texts, settled=settled)
            length *= 2
        return end


def shared_length(sequences: Sequence[Sequence[object]]) -> int:
    """With how many equal items the sequences begin."""
    return sum(1 for _ in takewhile(lambda items: len({*items}) == 1, zip(*sequences, strict=False)))
