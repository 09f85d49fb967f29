"""Control tokens in chat messages, read as ordinary text.

A chat template writes control tokens such as ``<|im_end|>`` around messages. With the same characters in it, a message
could end itself and begin another message, of any role.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer, models

from specbeam.errors import SpecbeamError

Message = dict[str, Any]
PRIVATE_USE = range(0xF0000, 0xFFFFE)
"""Characters that have no meaning in Unicode."""


class ControlTokens:
    """Lets only the chat template write control tokens.

    In messages, the first character of each control token gets a stand-in. So the template may trim or split messages:
    every control token that is whole in the rendered text is the template's. Such a token gets a secret
    ending, and the stand-ins become characters again. A tokenizer that knows control tokens only with that ending
    reads this text. It is the model's tokenizer in all else, so no other token changes.

    Control tokens are special tokens, and other added tokens that the template or the format of tool calls names. The
    assistant's messages may have the latter: models write them in answers, as in ``<think>``.

    Args:
        tokenizer: the model's, with a chat template.
        marks: the texts of the format of tool calls.
    """

    def __init__(self, tokenizer: Any, marks: str = "") -> None:
        self._theirs = tokenizer
        self._added = {i: token for i, token in tokenizer.added_tokens_decoder.items() if token.content}
        template = f"{tokenizer.chat_template} {marks}"
        self._special = {token.content for token in self._added.values() if token.special}
        self._control = self._special | {
            token.content for token in self._added.values() if token.content in template and not token.content.isspace()
        }
        self._firsts = sorted({name[0] for name in self._control})
        self._ending = secrets.token_hex(16)
        self._finder = Tokenizer(models.WordLevel({"": 0}, unk_token=""))  # the text between added tokens is one token
        self._finder.add_tokens([AddedToken(token.content, normalized=False) for token in self._added.values()])

    def hide(self, messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]] | None:
        """The messages with stand-ins, and the characters by their stand-ins; None if there are no control tokens."""
        try:
            return self._hide_all(messages)
        except RecursionError:
            raise SpecbeamError("a tool or the arguments of a call are nested too deeply: use fewer levels") from None

    def _hide_all(self, messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]] | None:
        texts = [*_texts([*messages])]
        if not any(first in text for text in texts for first in self._firsts):
            return None
        used = {*"".join(self._control)}.union(*texts)
        stand_ins = dict(zip(self._firsts, (c for c in map(chr, PRIVATE_USE) if c not in used), strict=False))
        if len(stand_ins) < len(self._firsts):
            raise SpecbeamError("the messages have all private characters of Unicode: leave some out")
        hidden = [self._hide(message, stand_ins) for message in messages]
        return None if hidden == messages else (hidden, {stand_in: first for first, stand_in in stand_ins.items()})

    def _hide(self, message: Message, stand_ins: Mapping[str, str]) -> Message:
        names = self._special if message.get("role") == "assistant" else self._control
        return {
            # What is nested, such as the arguments of a call, is no text as the model wrote it.
            key: self._hidden(value, names if isinstance(value, str) else self._control, stand_ins)
            for key, value in message.items()
        }

    def _hidden(self, value: Any, names: Collection[str], stand_ins: Mapping[str, str]) -> Any:
        """A value with stand-ins in all its texts."""
        if isinstance(value, dict):
            pairs = ([self._hidden(one, names, stand_ins) for one in pair] for pair in value.items())
            return dict(pairs)
        if isinstance(value, list):
            return [self._hidden(one, names, stand_ins) for one in value]
        if not isinstance(value, str) or not any(first in value for first in self._firsts):
            return value
        # Once more after each change, since tokens may overlap.
        while starts := [start for name, start, _ in self._find(value) if name in names]:
            characters = [*value]
            for start in starts:
                characters[start] = stand_ins[characters[start]]
            value = "".join(characters)
        return value

    def _find(self, text: str) -> Iterator[tuple[str, int, int]]:
        """The added tokens in a text as tokenizers find them: their names, begins and ends."""
        text = text.encode(errors="replace").decode()  # half a surrogate pair is refused later
        found = self._finder.encode(text, add_special_tokens=False)
        return ((name, *span) for name, span in zip(found.tokens, found.offsets, strict=True) if name)

    def show(self, text: str, stand_ins: Mapping[str, str]) -> str:
        """A rendered text, as :attr:`tokenizer` reads it."""
        pieces, begin = [], 0
        for name, _, end in self._find(text):
            if name in self._control:
                pieces += [text[begin:end], self._ending]
                begin = end
        return "".join([*pieces, text[begin:]]).translate({ord(one): first for one, first in stand_ins.items()})

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that knows control tokens only with the ending."""
        return self._reader[0]

    def ids(self, ids: Sequence[int]) -> list[int]:
        """The model's token ids, from the ids of :attr:`tokenizer`.

        Raises:
            SpecbeamError: the tokenizer makes a control token of ordinary text.
        """
        known = self._reader[1]
        for i in {*ids}.intersection(self._added) - {*known, self._theirs.unk_token_id}:
            if (name := self._added[i].content) in self._control:
                raise _unreadable(f"the control tokens {name}")
        return [known.get(i, i) for i in ids]

    @cached_property
    def _reader(self) -> tuple[Any, dict[int, int]]:
        """The tokenizer, and the model's id of each added token by the id in this tokenizer."""
        if not self._theirs.is_fast:
            raise _unreadable("the control tokens")
        theirs = self._theirs.backend_tokenizer
        ours = Tokenizer(theirs.model)  # shared, not copied
        for part in ("normalizer", "pre_tokenizer"):
            if (theirs_has := getattr(theirs, part)) is not None:
                setattr(ours, part, theirs_has)
        names: dict[int, str] = {}
        tokens = []
        for i, token in self._added.items():
            is_control = token.content in self._control
            names[i] = token.content + self._ending if is_control else token.content
            how = {flag: getattr(token, flag) for flag in ("lstrip", "rstrip", "single_word")}
            tokens.append(AddedToken(names[i], normalized=token.normalized and not is_control, **how))
        ours.add_tokens(tokens)
        ids: dict[Any, int] = {ours.token_to_id(name): i for i, name in names.items()}
        # Where a vocabulary has gaps, the next ids may not be free.
        if any(theirs.model.id_to_token(ours_has) not in (None, names[i]) for ours_has, i in ids.items()):
            raise _unreadable("the control tokens")
        reader = copy.copy(self._theirs)
        reader._tokenizer = ours
        return reader, ids


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _texts(one)


def _unreadable(what: str) -> SpecbeamError:
    return SpecbeamError(f"this model's tokenizer cannot read {what} of a message as text: leave them out")
