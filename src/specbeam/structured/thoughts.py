"""Thoughts: what a model writes before its answer, by the format that its chat template has for them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

from specbeam.structured.tools.formats import has


@dataclass(frozen=True)
class ThoughtFormat:
    """How a model separates its thoughts from its answer.

    Attributes:
        begin, end: the texts around thoughts.
        opening, closing: the texts around an answer; empty if there are none. The answer may come without them.
        must_open: an answer never comes without its opening.
        aside: the text that begins a remark to the user between thoughts, which ends as they do.
        repeats: thoughts may come again behind thoughts.
        anywhere: they may come within an answer.
    """

    begin: str
    end: str
    opening: str = ""
    closing: str = ""
    must_open: bool = False
    aside: str = ""
    repeats: bool = False
    anywhere: bool = False

    @property
    def marks(self) -> str:
        """All texts of the format."""
        return " ".join((self.begin, self.end, self.opening, self.closing, self.aside))


THINK = ThoughtFormat("<think>", "</think>")
"""Of most models."""
HUNYUAN = ThoughtFormat("<think>", "</think>", "<answer>", "</answer>")
GRANITE = ThoughtFormat("<think>", "</think>", "<response>", "</response>")
"""Granite 3.2 and 3.3."""
MISTRAL = ThoughtFormat("[THINK]", "[/THINK]")
GEMMA = ThoughtFormat("<|channel>thought\n", "<channel|>", anywhere=True)
HARMONY = ThoughtFormat(
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant",
    "<|channel|>final<|message|>",
    must_open=True,
    aside="<|channel|>commentary<|message|>",
    repeats=True,
)
"""gpt-oss: its answers are messages in channels."""
EFFORTS = ("none", "minimal")
"""The values of ``reasoning_effort`` by which a template that only knows on and off lets a model not think."""
SWITCHES = ("enable_thinking", "thinking")
"""The variables by which templates let a model think or not."""


def thoughts_of(template: str) -> ThoughtFormat | None:
    """The format of thoughts that a chat template has; None for a template without thoughts."""
    if has(template, "<|channel|>analysis", "<|message|>"):
        return HARMONY
    if has(template, "<|channel>thought"):
        return GEMMA
    if has(template, "[THINK]"):
        return MISTRAL
    if not has(template, "<think>") and not has(template, "</think>"):
        return None
    if has(template, "<response></response>"):
        return GRANITE
    return HUNYUAN if has(template, "<answer>") or has(template, "<tool_calls>[") else THINK


def switch_of(template: str) -> str | None:
    """The variable of a chat template that says whether the model thinks; None if there is none."""
    return next((name for name in SWITCHES if _reads(template, name)), None)


def thinking_variables(
    template: str, think: bool | None = None, effort: str | None = None
) -> tuple[dict[str, str | bool], list[str]]:
    """The variables of a chat template that say whether the model thinks, and how much.

    Args:
        think: whether it does; None to leave that to the template.
        effort: OpenAI's ``reasoning_effort``.

    Returns:
        The variables, and the names of the arguments for which the template has no variable.
    """
    variables: dict[str, str | bool] = {}
    ignored = []
    switch = switch_of(template)
    if effort is not None:
        if _reads(template, "reasoning_effort"):
            variables["reasoning_effort"] = effort
        elif switch is not None and think is None:
            think = effort not in EFFORTS
        else:
            ignored.append("reasoning_effort")
    if think is not None:
        if switch is None:
            ignored.append("enable_thinking")
        else:
            variables[switch] = think
    return variables, ignored


CODE = re.compile(r"\{[%{](.*?)[%}]\}", re.DOTALL)
"""Of a template, between its marks of Jinja."""
STRINGS = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'", re.DOTALL)


def _reads(template: str, name: str) -> bool:
    """Whether a template reads a variable. Behind a dot, a name is a field of a message."""
    code = (STRINGS.sub("", found[1]) for found in CODE.finditer(template))
    return any(re.search(rf"(?<![\w.]){name}(?!\w)", part) for part in code)


class Stage(Enum):
    """Where a text is."""

    OPEN = auto()  # a mark may come
    THOUGHTS = auto()
    ASIDE = auto()
    ANSWER = auto()


class ThoughtReader:
    """Separates thoughts from an answer while its text grows. Special tokens that are marks must be written out.

    Args:
        thinks: the text begins within thoughts. None: it may begin with them.

    Attributes:
        thoughts: the thoughts so far, without space around them.
    """

    def __init__(self, thought_format: ThoughtFormat, thinks: bool | None) -> None:
        self.thoughts = ""
        self._format = thought_format
        self._text = ""  # what is not read yet
        self._is_fresh = bool(thinks)  # space that comes now is left out
        self._has_answered = False
        self._gap = ""  # before the next thoughts
        self._marks: list[str] = []  # that may come
        self._stage = Stage.THOUGHTS
        if not thinks:
            self._open(may_think=thinks is None)

    @property
    def is_within(self) -> bool:
        """Whether the text so far ends within thoughts."""
        return self._stage is Stage.THOUGHTS

    @property
    def holds_mark(self) -> bool:
        """Whether the end of the text so far may begin a mark."""
        return self._stage is not Stage.THOUGHTS and bool(self._text)

    def push(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """The thoughts and the answer that more text adds. After the last text nothing is held back."""
        self._text += text
        thoughts, answer = "", ""
        while True:
            before = self._stage, len(self._text)
            if self._stage is Stage.OPEN:
                self._find(is_last)
            elif self._stage is Stage.THOUGHTS:
                thoughts += self._think(is_last)
            else:
                answer += self._answer(is_last)
            self._has_answered |= bool(answer)
            if before == (self._stage, len(self._text)):
                return thoughts, answer

    def _open(self, may_think: bool) -> None:
        """Marks may come, if there are any."""
        own = self._format
        self._marks = [*[own.begin] * may_think, *filter(None, (own.opening, own.aside))]
        self._stage = Stage.OPEN if self._marks else Stage.ANSWER

    def _find(self, is_last: bool) -> None:
        """Find out which mark comes, or that none does."""
        said = self._text.lstrip()
        for mark, stage in (
            (self._format.begin, Stage.THOUGHTS),
            (self._format.opening, Stage.ANSWER),
            (self._format.aside, Stage.ASIDE),
        ):
            if mark in self._marks and said.startswith(mark):
                self._text, self._stage, self._is_fresh = said[len(mark) :], stage, True
                self._gap = "\n\n" if self.thoughts else ""
                return
        if is_last or (said and not any(mark.startswith(said) for mark in self._marks)):
            self._stage = Stage.ANSWER

    def _without_space(self) -> None:
        """Leave out space at the beginning of thoughts and of an answer."""
        if self._is_fresh:
            self._text = self._text.lstrip()
            self._is_fresh = not self._text

    def _think(self, is_last: bool) -> str:
        """More of the thoughts."""
        own = self._format
        self._without_space()
        if (end := self._text.find(own.end)) >= 0:
            new, self._text = self._text[:end].rstrip(), self._text[end + len(own.end) :]
            self._is_fresh = not self._has_answered
            self._open(may_think=own.repeats)
        else:
            size = len(self._text) if is_last else len(held(self._text, own.end).rstrip())
            new, self._text = self._text[:size], self._text[size:]
        if new:
            new, self._gap = self._gap + new, ""
        self.thoughts += new
        return new

    def _answer(self, is_last: bool) -> str:
        """More of the answer, or of a remark before it."""
        own = self._format
        self._without_space()
        text, mark = self._text, own.end if self._stage is Stage.ASIDE else own.closing
        if self._stage is Stage.ASIDE and (end := text.find(mark)) >= 0:
            self._text = text[end + len(mark) :]
            self._open(may_think=own.repeats)
            return text[:end]
        if own.anywhere and (at := text.find(own.begin)) >= 0:
            self._text, self._stage, self._is_fresh = text[at + len(own.begin) :], Stage.THOUGHTS, True
            self._gap = "\n\n" if self.thoughts else ""
            return text[:at]
        said = text.rstrip()
        if mark and self._stage is Stage.ANSWER and said.endswith(mark):
            new = said.removesuffix(mark).rstrip()
            self._text = "" if is_last else text[len(new) :]
            return new
        size = len(held(text, own.begin)) if own.anywhere and not is_last else len(text)
        if mark and not is_last:
            size = len((text if self._stage is Stage.ASIDE else held(said, mark)).rstrip())
            size = min(size, len(held(text, mark)))
        self._text = text[size:]
        return text[:size]


def held(text: str, mark: str) -> str:
    """A text without its own end, where that may begin a mark."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return text[:-size]
    return text
