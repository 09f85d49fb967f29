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
        of_prompt: characters of the prompt, after the settled ones, that a new token may still complete or change.
    """

    ids: tuple[int, ...] = ()
    texts: tuple[str, ...] = ("",)
    settled: int = 0
    added: str = ""
    special: str = ""
    of_prompt: str = ""

    @property
    def text(self) -> str:
        """The text of the window, which ends the whole text."""
        return self.texts[-1]

    @property
    def unsettled(self) -> str:
        """The characters at the end that a later token may change, without the prompt's."""
        rest = self.text[self.settled :]
        return rest[shared_length((self.of_prompt, rest)) :] if self.of_prompt else rest


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
        new, of_prompt = text[end.settled : settled], ""
        if end.of_prompt:
            new = new[shared_length((end.of_prompt, new)) :]
            of_prompt = end.of_prompt[settled - end.settled :] if settled < len(text) else ""
        after = TextEnd(ids, texts, settled, new, of_prompt=of_prompt)
        return self._shorten(after) if len(ids) % (2 * MIN_WINDOW_TOKENS) == 0 else after

    def end_of(self, tokens: list[int]) -> TextEnd:
        """The end of the text of these tokens. It decodes the last ones, or all if these do not settle the end."""
        length = 2 * MIN_WINDOW_TOKENS
        while length < len(tokens):
            text, longer = self._decode(tokens[-length:]), self._decode(tokens[-2 * length :])
            complete = text.lstrip(INCOMPLETE)  # a window may begin within a character
            if complete and not complete.endswith(INCOMPLETE) and longer.endswith(complete):
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
        return end._replace(settled=0, of_prompt=end.text)

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
                if all(longer.endswith(text) for longer, text in zip(end.texts, texts, strict=True)):
                    return end._replace(ids=ids, texts=texts, settled=settled)
            length *= 2
        return end


def shared_length(sequences: Sequence[Sequence[object]]) -> int:
    """With how many equal items the sequences begin."""
    return sum(1 for _ in takewhile(lambda items: len({*items}) == 1, zip(*sequences, strict=False)))


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
        full = held + unsettled + end.special if end.special else text + unsettled
        stop_at = self._find(full, len(held)) if tokens > self._min_tokens else None
        certain_length = self._certain_length(text)
        if stop_at is None and not held and not end.special and certain_length == len(text):
            return Progress(end, tokens, text)
        new = Fragment(end.special, False) if end.special else Fragment(end.added)
        if stop_at is None:
            return Progress(end, tokens, *split((*before.held, new), certain_length))
        rest = (Fragment(unsettled), new) if end.special else (new, Fragment(unsettled))
        certain, _ = split((*before.held, *rest), stop_at)
        return Progress(end, tokens, certain, stopped=full[stop_at:])

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
        starts = [at for stop in self._stop_strings if (at := text.find(stop, max(0, old + 1 - len(stop)))) >= 0]
        return min(starts) if starts else None

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
