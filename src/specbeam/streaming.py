"""Decodes token ids to text as they come, in pieces that never have to be taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specbeam.detokenizing import INCOMPLETE, Detokenizer, TextEnd


class TextStream:
    """Decodes tokens as they arrive.

    An incomplete character is held back. So is text that may be the beginning of a stop string. All pieces together
    are the final text, which ends before the first stop string.

    Attributes:
        stopped: a stop string has come. Later tokens are ignored.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop_strings: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stop_strings = stop_strings
        self._end = TextEnd()
        self._pieces: list[str] = []
        self._held = ""  # text that may begin a stop string
        self.stopped = False

    @property
    def text(self) -> str:
        """The text so far, including the part that may begin a stop string."""
        return "".join([*self._pieces, self._held])

    def push(self, token_ids: Sequence[int]) -> str:
        """Take in tokens. Return the text that is now certain, which may be empty."""
        pieces = []
        for token in token_ids:
            if self.stopped:
                break
            self._end = self._detokenizer.push(self._end, token)
            pieces.append(self._take(self._end.added))
        return "".join(pieces)

    def finish(self, cancelled: bool = False) -> str:
        """No more tokens come: return the text that was held back.

        Args:
            cancelled: more tokens would have come, so leave out an incomplete character. Otherwise the text ends as the
                tokenizer decodes it, with U+FFFD for such a character.
        """
        unsettled = "" if self.stopped else self._end.unsettled
        piece = self._take(unsettled.rstrip(INCOMPLETE) if cancelled else unsettled)
        rest, self._held = self._held, ""
        self._pieces.append(rest)
        return piece + rest

    def _take(self, new: str) -> str:
        """Add text, up to the first stop string. Return what can no longer begin one."""
        text = self._held + new
        found = [at for s in self._stop_strings if (at := text.find(s)) >= 0]
        if found:
            text = text[: min(found)]
            self.stopped = True
        certain = len(text) if self.stopped else len(text) - self._begun(text)
        self._held = text[certain:]
        self._pieces.append(text[:certain])
        return text[:certain]

    def _begun(self, text: str) -> int:
        """The length of the longest end of a text that begins a stop string."""
        lengths = (
            n
            for stop in self._stop_strings
            for n in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:n])
        )
        return max(lengths, default=0)
