"""Tokens and their log-probabilities in OpenAI's shapes."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbeam.models.model import LanguageModel
from specbeam.results import Piece, TopLogProbs
from specbeam.results import Sequence as Text
from specbeam.text.detokenizer import Detokenizer

MAX_SPACE = 64
"""A special token of a prompt may take this many characters of space around it."""
MIN_LOG_PROB = -9999.0
"""OpenAI's number for very unlikely tokens, since JSON has no infinity."""


@dataclass(frozen=True)
class Part:
    """A part of the text of a choice, or all of it.

    Attributes:
        log_probs: of the tokens. None for the first token of a prompt.
        end: the finished text, if this is its last part.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    log_probs: Sequence[float | None] = ()
    top_logprobs: TopLogProbs | None = None
    end: Text | None = None

    @classmethod
    def of(cls, text: Piece | Text, end: Text | None = None) -> Part:
        return cls(text.text, text.token_ids, text.log_probs, text.top_logprobs, end)

    def __add__(self, other: Part) -> Part:
        top = None if other.top_logprobs is None else [*(self.top_logprobs or []), *other.top_logprobs]
        log_probs = [*self.log_probs, *other.log_probs]
        return Part(self.text + other.text, self.token_ids + other.token_ids, log_probs, top, other.end)

    @property
    def tokens(self) -> Iterator[tuple[int, float | None, dict[int, float]]]:
        """Each token with its log-probability, and the likeliest tokens at its position."""
        return zip(self.token_ids, self.log_probs, self.top_logprobs or [{}] * len(self.token_ids), strict=True)


class TokenTexts:
    """The texts of a model's single tokens, each decoded once."""

    def __init__(self, lm: LanguageModel) -> None:
        self._lm = lm
        self._special = {i for i, token in lm.tokenizer.added_tokens_decoder.items() if token.special}
        self._texts: dict[int, tuple[str, bytes]] = {}

    def __call__(self, token: int) -> tuple[str, bytes]:
        """The text of a token, and its bytes. Bytes of incomplete characters are written as "bytes:\\xe2\\x80"."""
        if (cached := self._texts.get(token)) is None:
            text = self._lm.text_or_bytes(token)
            if isinstance(text, bytes):
                cached = "bytes:" + "".join(f"\\x{byte:02x}" for byte in text), text
            else:
                cached = text, text.encode()
            self._texts[token] = cached
        return cached

    def is_shown(self, token: int) -> bool:
        """Whether texts show the token. Special ones are left out."""
        return token not in self._special


def json_log_prob(log_prob: float | None) -> float | None:
    """A log-probability as JSON can write it. None where a token follows nothing."""
    return None if log_prob is None else max(log_prob, MIN_LOG_PROB)


def token_log_prob(texts: TokenTexts, token: int, log_prob: float | None) -> dict[str, Any]:
    text, encoded = texts(token)
    return {"token": text, "logprob": json_log_prob(log_prob), "bytes": [*encoded]}


def chat_log_probs(texts: TokenTexts, part: Part) -> list[dict[str, Any]]:
    """The entries of ``logprobs.content``."""
    return [
        token_log_prob(texts, token, log_prob)
        | {"top_logprobs": [token_log_prob(texts, *pair) for pair in likeliest.items()]}
        for token, log_prob, likeliest in part.tokens
    ]


class CompletionLogProbs:
    """Makes the ``logprobs`` of one text of ``/v1/completions``, all at once or in parts.

    Args:
        prompt_ids: the tokens of the prompt.
        echoed: the text of the prompt, if the text begins with it. Then the prompt's tokens come first.
    """

    def __init__(
        self, lm: LanguageModel, texts: TokenTexts, prompt_ids: Sequence[int], echoed: str | None = None
    ) -> None:
        self._texts = texts
        self._detokenizer = Detokenizer(lm.decode)
        self._end = self._detokenizer.after([*(lm.backend.start_token_ids or prompt_ids)])
        self._offset = len(echoed or "")  # where the next new token begins in the text, in characters
        self._echoed = iter(() if echoed is None else [*self._prompt_offsets(prompt_ids, echoed)])

    def __call__(self, part: Part) -> dict[str, Any]:
        """The ``logprobs`` of the next part. Each token is always among the likeliest tokens at its position.

        The text has a token's name at its offset. So a first word whose space the text omits has a name without it.
        """
        rows: list[dict[str, float | None] | None] = []
        offsets, names = [], []
        for token, log_prob, likeliest in part.tokens:
            offset, drops_space = next(self._echoed, None) or self._new_offset(token)
            offsets.append(offset)
            names.append(self._name(token, drops_space))
            if log_prob is None:
                rows.append(None)
                continue
            row: dict[str, float | None] = {}
            for other, other_log_prob in {**likeliest, token: log_prob}.items():
                row.setdefault(self._name(other, drops_space), json_log_prob(other_log_prob))  # the likeliest of a name
            rows.append(row)
        log_probs = [*map(json_log_prob, part.log_probs)]
        return {"tokens": names, "token_logprobs": log_probs, "top_logprobs": rows, "text_offset": offsets}

    def _name(self, token: int, drops_space: bool) -> str:
        name, _ = self._texts(token)
        return name.removeprefix(" ") if drops_space else name

    def _new_offset(self, token: int) -> tuple[int, bool]:
        """Where a new token begins in the text, and whether the text omits the space before it."""
        offset, before = self._offset, self._end
        self._end = self._detokenizer.push(before, token)
        self._offset += len(self._end.added)
        return offset, not before.text and self._texts(token)[0] == f" {self._end.text}"

    def _prompt_offsets(self, prompt_ids: Sequence[int], text: str) -> Iterator[tuple[int, bool]]:
        """The same for the prompt's tokens. Special tokens that the prompt's text does not show have no length."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may take several tokens
        at = 0
        for token in prompt_ids:
            name, encoded = self._texts(token)
            is_shown = self._texts.is_shown(token)
            decoded = decoder.decode(encoded) if is_shown else name
            word = decoded.removeprefix(" ")
            begin = at
            if word and not text.startswith((decoded, word), at):  # a special token may have taken the space around it
                ahead = text[at : at + MAX_SPACE]
                begin += len(ahead) - len(ahead.lstrip())
            if text.startswith(decoded, at):
                yield at, False
                at += len(decoded)
            elif text.startswith(word, begin):
                yield begin, True
                at = begin + len(word)
            else:  # the prompt does not show the token, or not in these characters
                yield at, False
                at += len(decoded) if is_shown else 0
