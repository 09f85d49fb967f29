"""Grammars of answers with tool calls: what a format writes, with the schema of each tool."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, NamedTuple

from specbeam.errors import ConstraintError
from specbeam.structured import JsonSchema
from specbeam.structured.grammar import Parsed
from specbeam.structured.tools.formats import ToolFormat
from specbeam.structured.tools.reader import FENCE, SPACE, bare
from specbeam.structured.tools.schema_rules import SchemaRules
from specbeam.structured.tools.syntax import Json
from specbeam.structured.trials import byte_tokenizer, limits

KEYS = ("arguments", "parameters")
"""Of the arguments in calls that are objects."""
JSON_PARTS = re.compile(r'"[^"]*"|[,:] |\{')
"""The parts that llguidance's lexer reads: a text, a separator, or a bracket."""
TAG_END = ">"
"""Ends the name of a tool in calls that may lack their marker."""
SAYS = r"[^\s{}\[\]<>`]"
"""What a text must have to say something: more than spaces and marks of JSON."""
LEXER_FUEL, LEXER_FUEL_PER_CHARACTER = 200_000, 2_000
"""For a mask: llguidance's own limit, and more for each character of the tools' names."""


class Tool(NamedTuple):
    """A function that a model may call.

    Attributes:
        schema: of its arguments, which are an object.
    """

    name: str
    schema: JsonSchema


@dataclass(frozen=True, eq=False)
class ToolGrammar(Parsed):
    """Allows answers whose calls of tools are valid.

    Args:
        is_required: the answer begins with a call. Otherwise it is any text up to the opening of a call, or to its end,
            which does not come before something is said.
        max_calls: calls in one answer. 0: it is a text, and attempts no call.
        added: the ids of the tokens that a tokenizer finds in a text before all others, by their texts.
        shown: the ids of added tokens that an answer may show.
        content: what an answer without calls must be; None for any text. It has the spaces of calls, so the keys alone
            tell the two apart.

    Raises:
        SpecbeamError: nothing tells calls from the content.
    """

    kind = "grammar of tool calls"
    max_symbols = 50_000
    tool_format: ToolFormat
    tools: Sequence[Tool]
    _: KW_ONLY
    is_required: bool
    max_calls: int
    added: Mapping[str, int]
    shown: Collection[int]
    content: JsonSchema | None = None

    def __post_init__(self) -> None:
        if self.content is None or not self.tool_format.bare or self._called_in(self.content) is None:
            return
        schema, content = self.content.schema, copy(self.content)  # which is checked
        properties = schema.get("properties", {})
        others = {key: False for key in KEYS if key not in properties}
        object.__setattr__(content, "schema", schema | {"properties": properties | others})
        if (name := self._called_in(content)) is not None:
            raise ConstraintError(
                f"an answer of the form that is asked for may look like a call of the tool {name}: rename the tool or "
                'a property, or set tool_choice to "required", so that all answers are calls'
            )
        object.__setattr__(self, "content", content)

    @cached_property
    def text(self) -> str:
        lines = [*self._calls(), *self._bare_calls(), *self._calls_without_marker(), r"SPACE: /[ \n\r\t]{1,64}/"]
        answer = self._text(lines)
        rules = self._arguments(lines)
        if self._reads_objects:
            rules += [tool.schema.rule(f"loose_{i}", whitespace=True) for i, tool in enumerate(self.tools)]
        if self.content is not None:
            rules.append(self.content.rule("content"))
        lark = "\n".join([f"start: {answer}", *lines])
        return json.dumps({"grammars": [{"name": "answer", "lark_grammar": lark}, *rules]})

    def _arguments(self, lines: list[str]) -> list[Any]:
        """The grammars of all tools' arguments. Rules in Lark are added to the lines."""
        syntax = self.tool_format.syntax
        if isinstance(syntax, Json):
            return [tool.schema.rule(f"arguments_{i}") for i, tool in enumerate(self.tools)]
        grammars = []
        for i, tool in enumerate(self.tools):
            rules = SchemaRules(syntax, tool.schema, f"arguments_{i}", self._literal, [*self.added])
            lines += rules.lines
            grammars += rules.grammars
        return grammars

    def listed(self, lm: Any) -> None:
        """Answers may have tokens that are no part of a text."""

    @property
    def text_in_bytes(self) -> str:
        return re.sub(r"<\[[\d,]+\]>", "<[0]>", self.text)

    @property
    def lexer_fuel(self) -> int:  # type: ignore[override]
        """All names are looked for at once, wherever a call may open."""
        return LEXER_FUEL + LEXER_FUEL_PER_CHARACTER * sum(len(tool.name) for tool in self.tools)

    @property
    def _reads_objects(self) -> bool:
        """Whether objects without a marker are calls."""
        if self.is_required and (self.max_calls == 1 or self.tool_format.between is None):
            return False  # in its own form a model knows when to end, and one call ends in any case
        return self.tool_format.bare and self.content is None

    def _called_in(self, content: JsonSchema) -> str | None:
        """The name of a tool whose call some content begins like; None if there is none."""
        from llguidance import LLMatcher

        grammar = json.dumps({"grammars": [content.rule("json")]})
        limited = limits(content.lexer_fuel, content.max_symbols)
        matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=limited)
        keys = [key for key in KEYS if re.fullmatch(self.tool_format.key, key)]
        for tool in self.tools:
            begun = [f'{{"name": "{tool.name}", "{key}": {{' for key in keys]
            if any(matcher.validate_tokens([*text.encode()]) == len(text) for text in begun):
                return tool.name
        return None

    def _calls(self) -> list[str]:
        """The rules of calls as the format writes them, in the syntax of Lark."""
        own = self.tool_format
        at = "@" if isinstance(own.syntax, Json) else ""
        first, last = self._literal(own.first.removeprefix(own.marker)), self._literal(own.last)
        lines = [
            f"calls: {self._literal(own.marker)} marked_calls",
            f"marked_calls: {first} call {self._further_calls} {last}",
            f"call: {self._each('call')}",
        ]
        for i, tool in enumerate(self.tools):
            before, after = self._literal(own.before + tool.name + own.middle), self._literal(own.after)
            lines.append(f"call_{i}: {before} {at}arguments_{i} {after}")
        return lines

    def _calls_without_marker(self) -> list[str]:
        """The rules of calls that lack their marker, alone and behind a text."""
        own = self.tool_format
        if not own.may_lack_marker:
            return []
        more = f"{self._further_calls} ({self._literal(own.last)})?"
        lines = [f"unmarked: call {more}", f"late_unmarked: ({self._each('late')}) {more}"]
        without = self._without([re.escape(own.marker)])
        for i, tool in enumerate(self.tools):
            rest, after = self._literal(own.middle.removeprefix(TAG_END)), self._literal(own.after)
            lines += [
                f"late_{i}: begun_{i} {rest} arguments_{i} {after}",
                f"begun_{i}[lazy]: BEGUN_{i}",
                rf"BEGUN_{i}: /(?s:.*){re.escape(own.before + tool.name + TAG_END)}/{without}",
            ]
        return lines

    def _bare_calls(self) -> list[str]:
        """The rules of calls that are objects without a marker."""
        if not self._reads_objects:
            return []
        without = self._without([re.escape(self.tool_format.marker)] if self.tool_format.marker else [])
        lines = [
            f"bare: ({self._each('bare')}) {self._more(self._each('next'))} CLOSED?",
            f"CLOSED: /{SPACE}```{SPACE}/",
        ]
        for i, tool in enumerate(self.tools):
            opened = bare([tool.name], self.tool_format.key)
            lines += [
                f"bare_{i}: {'FIRST' if self.is_required else 'opened'}_{i} object_{i}",
                f"next_{i}: NEXT_{i} object_{i}",
                rf"object_{i}: SPACE? @loose_{i} /{SPACE}\}}/",
                rf"opened_{i}[lazy]: OPENED_{i}",
                rf"OPENED_{i}: /(?s:.*){opened}/{without}",
                rf"FIRST_{i}: /[ \n\r\t]{{0,8}}{FENCE}{opened}/",
                rf"NEXT_{i}: /[ \n\r\t]{{0,8}}(```)?[ \n\r\t,;]{{0,8}}{FENCE}{opened}/",
            ]
        return lines

    def _objects(self, lines: list[str]) -> list[str]:
        """One call without a marker beside content. It is made of the lexer's parts of JSON, so that both can begin.

        The rules that it needs are added to the lines.
        """
        if not self.tool_format.bare:
            return []
        own = self.tool_format
        for i, tool in enumerate(self.tools):
            parts = " ".join(map(self._literal, JSON_PARTS.findall(own.before + tool.name + own.middle)))
            lines.append(f"json_{i}: {parts} @arguments_{i} {self._literal(own.after)}")
        return [self._each("json")]

    def _text(self, lines: list[str]) -> str:
        """An answer that may be a text. The rules that it needs are added to the lines."""
        own, openings = self.tool_format, list[str]()
        marker = own.marker
        calls = ["marked_calls" if own.prompt_marks else "calls", *["unmarked"] * own.may_lack_marker]
        if self.is_required:
            return " | ".join([*calls, *["bare"] * self._reads_objects])
        if self.content is not None:
            calls = [*calls * bool(marker), *self._objects(lines)] if self.max_calls else []
            return " | ".join([f"{self._literal(own.opening)} @content", *calls])
        if self._reads_objects:
            openings.append(bare([tool.name for tool in self.tools], own.key))
        if marker:
            openings.append(re.escape(marker))  # as text, too, where it is a token
        if own.may_lack_marker:
            openings += [re.escape(own.before + tool.name + TAG_END) for tool in self.tools]
        is_text = bool(marker) and marker not in self.added and not own.opening
        without, token = self._without(openings), self._token({marker})
        first = ""
        if own.prompt_marks:
            names = "|".join(re.escape(tool.name) for tool in self.tools)
            first = rf" & ~/\s*({names})[ \t]*\r?\n(?s:.*)/"
        if is_text:
            lines += ["marked[lazy]: MARKED", rf"MARKED: /(?s:.*){re.escape(marker)}/{first}"]
        without += first
        before = ".*" if self.max_calls else r"\s*"  # without calls, a text that begins like one would be no answer
        lines += [f"TEXT: /(?s:.+)/{without}", f"SAID: /(?s:{before}{SAYS}.*)/{without}"]
        if not self.max_calls:
            said = f"SAID ({token} TEXT?)*" if token else "SAID"
            return f"{self._literal(own.opening)} {said}"
        lines.append(f"pre: {self._with_tokens('TEXT?', {marker})}")
        answers = ["pre SAID", *([f"pre TEXT? {token} TEXT?"] if token else [])]
        if own.opening:
            return f"calls | {self._literal(own.opening)} ({' | '.join(answers)})"
        if marker:
            answers.append("pre marked marked_calls" if is_text else "pre TEXT? calls")
        if own.may_lack_marker:
            answers.append("pre TEXT? late_unmarked")
        if own.prompt_marks:
            answers.append("marked_calls")
        if self._reads_objects:
            answers.append("pre bare")
        return " | ".join(answers)

    def _without(self, openings: Sequence[str]) -> str:
        """Leaves out texts in which a call opens."""
        return f" & ~/(?s:.*)({'|'.join(openings)})(?s:.*)/" if openings else ""

    def _with_tokens(self, text: str, without: Collection[str]) -> str:
        """Any number of the tokens that stand in texts on their own, each with a text before it."""
        token = self._token(without)
        return f"({text} {token})*" if token else '""'

    def _token(self, without: Collection[str]) -> str:
        """One of the tokens that stand in texts on their own; empty if there is none."""
        ids = [number for name, number in self.added.items() if name not in without and number in self.shown]
        return f"<[{','.join(map(str, sorted(ids)))}]>" if ids else ""

    @property
    def _further_calls(self) -> str:
        """The calls behind the first one, as the format writes them."""
        return self._more(f"{self._literal(self.tool_format.between or '')} call")

    def _more(self, call: str) -> str:
        """Further calls."""
        return "" if self.tool_format.between is None or self.max_calls <= 1 else f"({call}){{0,{self.max_calls - 1}}}"

    def _each(self, rule: str) -> str:
        """One of the rules of all tools."""
        return " | ".join(f"{rule}_{i}" for i in range(len(self.tools)))

    def _literal(self, text: str) -> str:
        """A text that is written as it is: text, and tokens that are no part of a text."""
        names = sorted(self.added, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
        written = [f"<[{self.added[part]}]>" if part in self.added else json.dumps(part) for part in parts if part]
        return " ".join(written) or '""'
