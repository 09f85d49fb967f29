"""The text of new tokens, in pieces that never have to be taken back, up to the first stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from specbeam.text.detokenizing import INCOMPLETE, Detokenizer, TextEnd


class Fragment(NamedTuple):
    """A part of a text with special tokens written out.

    Attributes:
        is_shown: the text shows it. Otherwise it is a special token.
    """

    text: str
    is_shown: bool = True


class Progress(NamedTuple):
    """How far the text of a sequence has come.

    Attributes:
        end: of the text, prompt included.
        tokens: the number of new tokens.
        certain: the text that the last token made certain.
        held: what may begin a stop string.
        stopped: what follows the text, if it has ended: the stop string and what came with it. Special tokens are
            written out.
    """

    end: TextEnd = TextEnd()
    tokens: int = 0
    certain: str = ""
    held: tuple[Fragment, ...] = ()
    stopped: str | None = None


OWN_TEXT = Progress()
"""The beginning of a text with nothing before it."""


class NewText:
    """Makes the text of new tokens after a prompt. It holds no text itself, so sequences may branch.

    Stop strings are looked for in the new text with special tokens written out, as transformers does. They are not
    looked for in the prompt, as in vLLM and llama.cpp.

    Args:
        decode: makes text of token ids. It writes special tokens out with ``skip_special_tokens=False``.
        stop_strings: the text ends before the first of them.
        min_tokens: a stop string that ends within this many tokens is part of the text.
        left_out: tokens that the text is without.
    """

    def __init__(
        self,
        decode: Callable[..., str],
        stop_strings: Sequence[str] = (),
        min_tokens: int = 0,
        left_out: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stop_strings = stop_strings
        self._min_tokens = min_tokens
        self._left_out = left_out

    def after(self, prompt: list[int]) -> Progress:
        """The beginning of the text after a prompt."""
        return Progress(self._detokenizer.after(prompt))

    def of(self, begin: Progress, token_ids: Sequence[int]) -> str:
        """The text of all new tokens of a finished sequence."""
        stream = TextStream(self, begin)
        return stream.push(token_ids) + stream.finish()

    def push(self, before: Progress, token: int) -> Progress:
        """The text after one more token."""
        if token in self._left_out:
            return before._replace(tokens=before.tokens + 1, certain="")
        end, tokens = self._detokenizer.push(before.end, token), before.tokens + 1
        if not self._stop_strings:
            return Progress(end, tokens, end.added)
        held = written(before.held) if before.held else ""
        text, unsettled = held + (end.special or end.added), end.unsettled
        # If the text ends with a special token, a character is incomplete before it.
        whole = held + unsettled + end.special if end.special else text + unsettled
        found = self._find(whole, len(held)) if tokens > self._min_tokens else None
        certain_length = self._certain_length(text)
        if found is None and not held and not end.special and certain_length == len(text):
            return Progress(end, tokens, text)
        new = Fragment(end.special, False) if end.special else Fragment(end.added)
        if found is None:
            return Progress(end, tokens, *split((*before.held, new), certain_length))
        last = (Fragment(unsettled), new) if end.special else (new, Fragment(unsettled))
        certain, _ = split((*before.held, *last), found)
        return Progress(end, tokens, certain, stopped=whole[found:])

    def rest(self, last: Progress, cancelled: bool = False) -> str:
        """The text that is not certain before it is known that no more tokens come.

        Args:
            cancelled: more tokens would have come, so leave out an incomplete character. Otherwise the text ends as the
                tokenizer decodes it, with U+FFFD for such a character.
        """
        if last.stopped is not None:
            return ""
        unsettled = last.end.unsettled.rstrip(INCOMPLETE) if cancelled else last.end.unsettled
        return shown_text(last.held) + unsettled

    def _find(self, text: str, old: int) -> int | None:
        """The start of the first stop string that has a character after the first ``old`` ones; None without one."""
        found = [at for stop in self._stop_strings if (at := text.find(stop, max(0, old + 1 - len(stop)))) >= 0]
        return min(found) if found else None

    def _certain_length(self, text: str) -> int:
        """The length of a text before the longest end that begins a stop string."""
        certain = len(text)
        for stop in self._stop_strings:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1), certain)
            while at >= 0 and not stop.startswith(text[at:]):
                at = text.find(stop[0], at + 1, certain)
            certain = at if at >= 0 else certain
        return certain


class TextStream:
    """Decodes the tokens of one sequence as they arrive. All pieces together are its text.

    Args:
        new_text: makes the text.
        begin: how it begins, from :meth:`NewText.after`. By default it is a text of its own.

    Attributes:
        text: the text so far, without what may begin a stop string.
        stopped: a stop string has come. Later tokens are ignored.
    """

    def __init__(self, new_text: NewText, begin: Progress = OWN_TEXT) -> None:
        self._new_text = new_text
        self._progress = begin
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def stopped(self) -> bool:
        return self._progress.stopped is not None

    def push(self, token_ids: Sequence[int]) -> str:
        """Take in tokens. Return the text that is now certain, which may be empty."""
        begin = len(self._pieces)
        for token in token_ids:
            if self.stopped:
                break
            self._progress = self._new_text.push(self._progress, token)
            self._pieces.append(self._progress.certain)
        return "".join(self._pieces[begin:])

    def finish(self, cancelled: bool = False) -> str:
        """No more tokens come: return the rest of the text, as :meth:`NewText.rest` says."""
        self._pieces.append(self._new_text.rest(self._progress, cancelled))
        return self._pieces[-1]


def written(parts: Sequence[Fragment]) -> str:
    """The text of parts, with special tokens written out."""
    return "".join(part.text for part in parts)


def shown_text(parts: Sequence[Fragment]) -> str:
    """The text of parts, without special tokens."""
    return "".join(part.text for part in parts if part.is_shown)


def split(parts: Sequence[Fragment], at: int) -> tuple[str, tuple[Fragment, ...]]:
    """The shown text before a position of the written text, and the parts from there on."""
    before, after = [], []
    for part in parts:
        before.append(part._replace(text=part.text[: max(at, 0)]))
        if rest := part.text[max(at, 0) :]:
            after.append(part._replace(text=rest))
        at -= len(part.text)
    return shown_text(before), tuple(after)
