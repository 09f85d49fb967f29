"""Reads the tool calls in the texts of an answer while they grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbeam.server.answers import FINISH_REASONS
from specbeam.server.call import Call
from specbeam.server.tokens import Part
from specbeam.server.tools import ToolUse
from specbeam.structured.tools.reader import THOUGHTS, Reader, Said
from specbeam.text.detokenizer import NewText, TextStream


@dataclass(frozen=True)
class ReadCall:
    """A call in an answer, with the id that it gets."""

    id: str
    name: str
    arguments: str


class Reading:
    """Reads the calls in one text of an answer.

    Attributes:
        is_finished: the text has ended.
    """

    def __init__(self, use: ToolUse, call: Call) -> None:
        lm, prompt_ids, options = call.model.lm, call.requests[0].prompt_ids, call.plan.options
        own = use.tool_format
        marks = own.marks + "".join(THOUGHTS)
        hidden = {
            number
            for number, token in lm.tokenizer.added_tokens_decoder.items()
            if token.special and token.content not in marks
        }

        def decode(ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            return lm.decode_token([number for number in ids if not skip_special_tokens or number not in hidden])

        ends = frozenset(end for end in options.eos_token_id or () if lm.decode([end]))
        new_text = NewText(decode, options.stop_strings, options.min_new_tokens or 0, ends)
        self._text = TextStream(new_text, new_text.after(prompt_ids))
        thinks = use.begins_in_thoughts(lm, prompt_ids)
        self._reader = Reader(own, use.allowed, use.most, thinks=thinks, has_form=use.has_form)
        self._format = own
        self._ids: list[str] = []  # of the calls
        self.is_finished = False
        self._is_cut = False

    @property
    def content(self) -> str | None:
        """The content so far; None if there are calls alone, or the beginning of one."""
        is_called = self._reader.calls or self._is_cut
        return None if is_called and not self._reader.content.strip() else self._reader.content

    @property
    def calls(self) -> list[ReadCall]:
        """The calls so far."""
        pairs = zip(self._ids, self._reader.calls, strict=True)
        return [ReadCall(number, call.name, call.arguments) for number, call in pairs]

    def push(self, part: Part) -> list[Said]:
        """What a part of the text adds."""
        text = self._text.push(part.token_ids)
        if part.end is not None:
            self.is_finished = True
            self._is_cut = FINISH_REASONS[part.end.finish_reason] == "length" or part.end.is_complete is False
            text += self._text.finish(cancelled=part.end.finish_reason in ("cancelled", "timeout"))
        said = self._reader.push(text, self.is_finished, self._is_cut)
        self._ids += [self._format.call_id for one in said if one.name is not None]
        return said
