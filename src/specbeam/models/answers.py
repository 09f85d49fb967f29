"""Reads an answer while it grows: its thoughts, its content and its tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbeam.options.options import Options
from specbeam.structured.after_thoughts import begins_in_thoughts
from specbeam.structured.thoughts import ThoughtFormat, ThoughtReader
from specbeam.structured.tools.reader import Call, Delta, Reader
from specbeam.text.detokenizer import NewText, TextStream


class AnswerReader:
    """Reads one answer. Special tokens that are marks of either format must be written out in its text.

    Args:
        thought_format: None for a model without thoughts.
        thinks: the answer begins within thoughts. None: it may begin with them.
        calls: the reader of tool calls; None without tools.
    """

    def __init__(self, thought_format: ThoughtFormat | None, thinks: bool | None, calls: Reader | None = None) -> None:
        self._thoughts = None if thought_format is None else ThoughtReader(thought_format, thinks)
        self._calls = calls
        self._content = ""

    @property
    def thoughts(self) -> str:
        """The thoughts so far."""
        return "" if self._thoughts is None else self._thoughts.thoughts

    @property
    def is_within_thoughts(self) -> bool:
        """Whether the text so far ends within thoughts."""
        return self._thoughts is not None and self._thoughts.is_within

    @property
    def content(self) -> str:
        """The content so far."""
        return self._content if self._calls is None else self._calls.content

    @property
    def calls(self) -> list[Call]:
        """The calls so far. More text may add to the arguments of the last one."""
        return [] if self._calls is None else self._calls.calls

    def push(self, text: str, is_last: bool = False, is_cut: bool = False) -> list[Delta]:
        """What more text adds. After the last text nothing is held back.

        Args:
            is_cut: a limit ended the answer with this text. What has begun a call is none of its content then.
        """
        thoughts, answer = ("", text) if self._thoughts is None else self._thoughts.push(text, is_last)
        deltas = [Delta(thoughts=thoughts)] if thoughts else []
        if self._calls is not None:
            return deltas + self._calls.push(answer, is_last, is_cut)
        self._content += answer
        return deltas + ([Delta(answer)] if answer else [])


class TokenReader:
    """Reads one answer from its tokens.

    Args:
        lm: the model that :func:`specbeam.load` returned.
        prompt_ids: the tokens before the answer.
        thought_format: None for a model without thoughts.
        calls: the reader of tool calls; None without tools.
        marks: the texts of the format of these calls.
    """

    def __init__(
        self,
        lm: Any,
        prompt_ids: list[int],
        options: Options,
        thought_format: ThoughtFormat | None,
        calls: Reader | None = None,
        marks: str = "",
    ) -> None:
        marks += "" if thought_format is None else thought_format.marks
        hidden = {
            number
            for number, token in lm.tokenizer.added_tokens_decoder.items()
            if token.special and token.content not in marks
        }

        def decode(ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            text: str = lm.decode_token([number for number in ids if not skip_special_tokens or number not in hidden])
            return text

        ends = frozenset(end for end in options.eos_token_id or () if lm.decode([end]))
        new_text = NewText(decode, options.stop_strings, options.min_new_tokens or 0, ends)
        self._text = TextStream(new_text, new_text.after(prompt_ids))
        thinks = None if thought_format is None else begins_in_thoughts(lm, thought_format, prompt_ids)
        self.answer = AnswerReader(thought_format, thinks, calls)

    def push(self, token_ids: Sequence[int]) -> list[Delta]:
        """What more tokens add."""
        return self.answer.push(self._text.push(token_ids))

    def finish(self, finish_reason: str, is_cut: bool = False) -> list[Delta]:
        """What the end of the answer adds.

        Args:
            is_cut: a limit ended the answer.
        """
        rest = self._text.finish(cancelled=finish_reason in ("cancelled", "timeout"))
        return self.answer.push(rest, True, is_cut)


def thought_tokens(lm: Any, prompt_ids: Sequence[int], thought_format: ThoughtFormat, token_ids: Sequence[int]) -> int:
    """How many tokens of an answer are thoughts, with the marks around them."""
    reader = ThoughtReader(thought_format, begins_in_thoughts(lm, thought_format, prompt_ids))
    added = lm.tokenizer.added_tokens_decoder
    count = begun = 0  # tokens of thoughts; tokens that may be the mark before thoughts
    for token in token_ids:
        is_mark = token in added and (not added[token].special or added[token].content in thought_format.marks)
        text = added[token].content if is_mark else "" if token in added else lm.text_or_bytes(token)
        was_within = reader.is_within
        reader.push(text.decode("latin-1") if isinstance(text, bytes) else text)
        if was_within or reader.is_within:
            count, begun = count + begun + 1, 0
        else:
            begun = begun + 1 if reader.holds_mark else 0
    return count
