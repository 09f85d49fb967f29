"""A constraint that holds for an answer, and not for the thoughts before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from specbeam.structured import Constraint
from specbeam.structured.constraint_mask import packed
from specbeam.structured.grammar import OutputSpec
from specbeam.structured.thoughts import ThoughtFormat, held
from specbeam.structured.trie import TokenTrie

PRIVATE_USE = 0xF0000
"""The character that stands for the first special token. A text has one character for each byte of other tokens."""
MAX_SPACE = 64
"""Characters of space between thoughts and an answer. Without a limit a model may go on with it."""
LAST_TOKENS = 16
"""The end of a prompt, which says whether the answer begins within thoughts, where marks are no tokens."""


class Symbols:
    """A model's tokens as texts of bytes, in which each token that is part of a mark is one private character.

    So a mark that is spelled in other tokens is not taken for the mark in a prompt.

    Args:
        lm: a model that :func:`specbeam.load` returned.

    Attributes:
        of: the text of each token; empty for tokens that no text shows.
        free: the tokens that thoughts may have.
        space: the tokens of ``free`` that are white space.
    """

    def __init__(self, lm: Any, thought_format: ThoughtFormat) -> None:
        self._lm = lm
        self._added = {i: token for i, token in lm.tokenizer.added_tokens_decoder.items() if token.content}
        marks = thought_format.marks
        self._names = {one.content: chr(PRIVATE_USE + i) for i, one in self._added.items() if one.content in marks}

    def text(self, token: int) -> str:
        """The text of one token."""
        if (added := self._added.get(token)) is None:
            text = self._lm.text_or_bytes(token)
            return (text if isinstance(text, bytes) else text.encode(errors="replace")).decode("latin-1")
        if added.content in self._names:
            return self._names[added.content]
        return "" if added.special else added.content.encode().decode("latin-1")

    @cached_property
    def of(self) -> list[str]:
        return [*map(self.text, range(self._lm.backend.vocab_size))]

    @cached_property
    def free(self) -> list[int]:
        return [token for token, text in enumerate(self.of) if text and token not in self._lm.eos_token_ids]

    @cached_property
    def space(self) -> list[int]:
        return [token for token in self.free if is_space(self.of[token])]

    def spell(self, mark: str) -> list[str]:
        """The texts of a mark: with tokens, and in other tokens than its own."""
        spelled = mark.encode().decode("latin-1")
        text = spelled
        for name in sorted(self._names, key=len, reverse=True):
            text = text.replace(name.encode().decode("latin-1"), self._names[name])
        return list(dict.fromkeys((text, spelled)))

    def has_tokens(self, mark: str) -> bool:
        """Whether a part of a mark is a token."""
        return any(name in mark for name in self._names)


_symbols: WeakKeyDictionary[Any, dict[Any, Symbols]] = WeakKeyDictionary()  # by tokenizers


def symbols_of(lm: Any, thought_format: ThoughtFormat) -> Symbols:
    """The symbols of a model, made once: a large vocabulary takes a part of a second."""
    made = _symbols.setdefault(lm.tokenizer, {})
    key = thought_format, lm.backend.vocab_size
    if key not in made:
        made[key] = Symbols(lm, thought_format)
    return made[key]


def begins_in_thoughts(lm: Any, thought_format: ThoughtFormat, ids: Sequence[int]) -> bool | None:
    """Whether the answer to a prompt begins within thoughts. None: it may begin with them.

    Marks that are tokens cannot be in a message. An answer that is continued may have its thoughts in the prompt.
    """
    symbols, own = symbols_of(lm, thought_format), thought_format
    if not symbols.has_tokens(own.begin):
        text = lm.decode_token([*ids[-LAST_TOKENS:]]).rstrip()
        return True if text.endswith(own.begin.rstrip()) else False if text.endswith(own.end) else None
    added = lm.tokenizer.added_tokens_decoder
    tail: list[str] = []
    for number in reversed(ids):
        text = symbols.text(number)
        if number in added and added[number].special and not text:  # the turn begins
            break
        tail.append(text)
    text = "".join(reversed(tail))
    begin, end, opening, aside = (
        text.rfind(symbols.spell(mark)[0]) if mark else -1
        for mark in (own.begin.rstrip(), own.end, own.opening, own.aside)
    )
    last = max(begin, end, opening)
    if last < 0 or (last == end and own.repeats) or aside > last:
        return None
    return last == begin


@dataclass(frozen=True, eq=False)
class AfterThoughts(OutputSpec):
    """What an answer may be, behind thoughts in which nothing is asked for.

    Args:
        thinks: the text begins within thoughts. None: it may begin with them.
        opens: the answer has its own opening, so the spec does not stand behind one.
        remarks: a remark to the user may come before the answer, as between thoughts.
    """

    kind = "form of an answer"
    spec: OutputSpec
    thought_format: ThoughtFormat
    thinks: bool | None
    opens: bool = False
    remarks: bool = False

    @property
    def _is_plain(self) -> bool:
        """Whether nothing comes before the answer."""
        return self.thinks is False  # also a continued answer, which has been opened

    def listed(self, lm: Any) -> TokenTrie | None:
        return self.spec.listed(lm) if self._is_plain else None

    def compile(self, lm: Any) -> Constraint:
        inner = self.spec.compile(lm)
        if self._is_plain:
            return inner
        return ThoughtConstraint(inner, lm, self.thought_format, self.thinks, self.opens, self.remarks)


class State(NamedTuple):
    """Where a sequence is.

    Attributes:
        thought: within thoughts, the end of the text that may begin their end; None elsewhere.
        begun: the text so far, which may begin a mark; None if no mark may come.
        marks: the marks that may come.
        spaces: characters of space behind thoughts.
        inner: the state of the constraint of the answer; None if the answer cannot have begun.
    """

    thought: str | None = None
    begun: str | None = None
    marks: tuple[str, ...] = ()
    spaces: int = 0
    inner: Any = None


class ThoughtConstraint:
    """A constraint that begins behind thoughts: a :class:`specbeam.constraints.Constraint`."""

    def __init__(
        self,
        inner: Constraint,
        lm: Any,
        thought_format: ThoughtFormat,
        thinks: bool | None,
        opens: bool,
        remarks: bool = False,
    ) -> None:
        self._inner = inner
        self._format = own = thought_format
        self._size = lm.backend.vocab_size
        self._symbols = symbols_of(lm, own)
        self._begins = self._symbols.spell(own.begin)
        self._asides = self._symbols.spell(own.aside) if own.aside and remarks else []
        self._ends = self._symbols.spell(own.end)
        self._openings = self._symbols.spell(own.opening) if own.opening and not opens else []
        self._needs_opening = own.must_open and not opens
        self._by_first: dict[str, list[int]] = {}
        for token in self._symbols.free:
            self._by_first.setdefault(self._symbols.of[token][0], []).append(token)
        self._ending = [i for i in self._symbols.free if any(end[-1] in self._symbols.of[i] for end in self._ends)]
        self._free = packed(self._symbols.free, self._size)
        self._masks: dict[Any, NDArray[np.uint8]] = {}
        space = packed(self._symbols.space, self._size)
        self._skips_space = not (inner.mask(inner.start, self._size) & space).any()
        self.start = State(thought="") if thinks else self._open(may_think=thinks is None)

    def __repr__(self) -> str:
        return f"ThoughtConstraint({self._inner!r})"

    def _open(self, may_think: bool, spaces: int = 0) -> State:
        """The state before an answer or thoughts."""
        marks = (*(self._begins if may_think else ()), *self._asides, *self._openings)
        inner = None if self._needs_opening else self._inner.start
        return State(begun="" if marks else None, marks=marks, spaces=spaces, inner=inner)

    def advance(self, state: State, token: int) -> State | None:
        if token >= len(self._symbols.of):
            return None
        text = self._symbols.of[token]
        if state.thought is not None:
            return self._think(state.thought + text) if text and self._has(self._free, token) else None
        if state.begun is not None and text and self._has(self._free, token):
            begun = state.begun + text
            for mark in state.marks:
                if begun.startswith(mark):
                    return self._behind(mark, begun[len(mark) :])
        inner = None if state.inner is None else self._inner.advance(state.inner, token)
        goes_on = state.begun is not None and text and any(mark.startswith(state.begun + text) for mark in state.marks)
        if inner is None and not goes_on:
            may_skip = self._may_skip(state) and is_space(text) and state.spaces + len(text) <= MAX_SPACE
            return state._replace(spaces=state.spaces + len(text)) if may_skip else None
        if not goes_on:
            return State(inner=inner)
        return State(begun=f"{state.begun}{text}", marks=state.marks, inner=inner)

    def _behind(self, mark: str, rest: str) -> State | None:
        """The state behind a mark and the rest of its last token."""
        if mark in self._begins or mark in self._asides:
            return self._think(rest)
        return State(spaces=len(rest), inner=self._inner.start) if is_space(rest) else None

    def _think(self, text: str) -> State | None:
        """The state within thoughts, or behind them."""
        for end in self._ends:
            if (at := text.find(end)) >= 0:
                rest = text[at + len(end) :]
                return self._open(self._format.repeats, len(rest)) if is_space(rest) else None
        kept = max((text[len(held(text, end)) :] for end in self._ends), key=len)
        return State(thought=kept)

    def _may_skip(self, state: State) -> bool:
        """Whether space may come before an answer."""
        return self._skips_space and not state.begun and state.inner is self._inner.start

    def mask(self, state: State, vocab_size: int) -> NDArray[np.uint8]:
        if state.thought is not None:
            bits = self._cached(("thought", state.thought), lambda: self._thinking(state.thought or ""))
        else:
            bits = np.zeros_like(self._free) if state.inner is None else self._inner.mask(state.inner, self._size)
            if state.begun is not None:
                bits = bits | self._cached((state.begun, state.marks), lambda: self._marking(state))
            if self._may_skip(state) and state.spaces < MAX_SPACE:
                left = MAX_SPACE - state.spaces
                bits = bits | self._cached(("space", left), lambda: packed([*self._spaces(left)], self._size))
        return bits[: -(-vocab_size // 8)]

    def _spaces(self, length: int) -> Iterator[int]:
        """The tokens that are space of at most this length."""
        yield from (token for token in self._symbols.space if len(self._symbols.of[token]) <= length)

    def complete(self, state: State) -> bool:
        return state.thought is None and state.inner is not None and self._inner.complete(state.inner)

    def _cached(self, key: Any, make: Any) -> NDArray[np.uint8]:
        if key not in self._masks:
            self._masks[key] = make()
        return self._masks[key]

    def _thinking(self, thought: str) -> NDArray[np.uint8]:
        """The tokens that may follow within thoughts: all but the tokens that end them with more than space."""
        wrong = [token for token in self._ending if self._think(thought + self._symbols.of[token]) is None]
        return self._free & ~packed(wrong, self._size)

    def _marking(self, state: State) -> NDArray[np.uint8]:
        """The tokens that go on with a mark, or end it."""
        return packed(sorted({*self._going_on(state)}), self._size)

    def _going_on(self, state: State) -> Iterator[int]:
        assert state.begun is not None
        for mark in state.marks:
            if not mark.startswith(state.begun):
                continue
            rest = mark[len(state.begun) :]
            for token in self._by_first.get(rest[0], ()):
                text = self._symbols.of[token]
                ends = text.startswith(rest) and self._behind(mark, text[len(rest) :]) is not None
                if ends or rest.startswith(text):
                    yield token

    @staticmethod
    def _has(bits: NDArray[np.uint8], token: int) -> bool:
        return bool(bits[token // 8] >> token % 8 & 1)


def is_space(text: str) -> bool:
    """Whether a text has nothing but the white space of JSON."""
    return not text.strip(" \n\r\t")
