"""Decodes token ids to text as they come, in pieces that never have to be taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"
"""Decoders put this character where some bytes of a character are still missing."""


class TextStream:
    """Decodes tokens as they arrive.

    An incomplete character is held back. So is text that may be the beginning of a stop string. All pieces together
    are the final text, which ends before the first stop string.

    Attributes:
        text: the text so far, including the part that is held back.
        stopped: a stop string has come. Later tokens are ignored.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop_strings: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop_strings = stop_strings
        self._ids: list[int] = []
        # Tokens from start on are decoded together, because a token's text can depend on the token before it. The text
        # of the tokens before read has been added.
        self._start = self._read = 0
        self._sent = 0
        self.text = ""
        self.stopped = False

    def push(self, token_ids: Sequence[int]) -> str:
        """Take in tokens. Return the text that is now certain, which may be empty."""
        for token in token_ids:
            self._ids.append(token)
            self._take(complete=False)
        return self._send(len(self.text) - self._held_back())

    def finish(self) -> str:
        """No more tokens come: return the text that was held back."""
        self._take(complete=True)
        return self._send(len(self.text))

    def _take(self, complete: bool) -> None:
        if self.stopped:
            return
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        if len(after) <= len(before) or (after.endswith(INCOMPLETE) and not complete):
            return
        new = after[len(before) :]
        self._start, self._read = self._read, len(self._ids)
        searched = max(0, len(self.text) - max((len(s) for s in self._stop_strings), default=0))
        self.text += new
        found = [at for s in self._stop_strings if (at := self.text.find(s, searched)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _held_back(self) -> int:
        """The length of the longest end of the text that begins a stop string."""
        if self.stopped:
            return 0
        lengths = (
            n
            for stop in self._stop_strings
            for n in range(min(len(stop) - 1, len(self.text)), 0, -1)
            if self.text.endswith(stop[:n])
        )
        return max(lengths, default=0)

    def _send(self, end: int) -> str:
        piece, self._sent = self.text[self._sent : end], max(self._sent, end)
        return piece
