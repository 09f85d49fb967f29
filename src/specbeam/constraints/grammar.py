"""Constraints by a grammar: JSON schemas, regular expressions and context-free grammars.

llguidance parses them (https://github.com/guidance-ai/llguidance). A description is plain data, and refuses what cannot
be enforced. The automaton that it makes for a model serves any number of requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from specbeam.errors import SpecbeamError, shown

MAX_SCHEMA_BYTES, MAX_GRAMMAR_BYTES = 10**6, 64 * 1024
"""Nothing can interrupt the compilation of a larger one."""
MAX_MULTIPLE_OF = 10_000
"""``multipleOf`` becomes an automaton with about as many states: 999983 takes 14 s and 370 MB."""
MAX_MESSAGE_CHARACTERS = 600
FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
"""The values of ``format`` that are enforced. Any other is an annotation, and is left out."""
SCHEMAS = (
    *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
SCHEMAS_BY_NAME = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
SCHEMAS_IN_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
"""The keywords of JSON Schema whose values are schemas, dictionaries of schemas and lists of schemas."""
NO_TEXT = "NoExtension"
"""The error of a parser that nothing can follow begins so."""
CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Description:
    """What a grammar allows, as plain data.

    Attributes:
        kind: the name of the option on the command line.
        text: the grammar as llguidance reads it.
    """

    kind: str

    @cached_property
    def text(self) -> str:
        raise NotImplementedError

    def compile(self, lm: Any) -> GrammarConstraint:
        """The constraint for a model that :func:`specbeam.load` returned.

        Raises:
            SpecbeamError: the model has no tokenizer, or no text of its tokens satisfies the grammar.
        """
        return GrammarConstraint(self, lm)

    def _check(self) -> None:
        """Refuse a grammar that llguidance does not take, or takes with a warning: then it would not be enforced."""
        _, problems = _llguidance().LLMatcher.validate_grammar_with_warnings(self.text, limits=_limits())
        if problems:
            raise self._refused(problems[0])

    def _refused(self, problem: str, what: str = "cannot be enforced") -> SpecbeamError:
        problem = " ".join(problem.removesuffix("<non-verbose/>").split())
        if len(problem) > MAX_MESSAGE_CHARACTERS:
            problem = f"{problem[:MAX_MESSAGE_CHARACTERS]}..."
        return SpecbeamError(f"the {self.kind} {what}: {problem}")


@dataclass(frozen=True)
class JsonSchema(Description):
    """Allows JSON that is valid by a JSON Schema.

    Keys come in the schema's order. Strings have no ``\\u`` escapes, so that each key has one form.

    Args:
        schema: a dictionary, its JSON text, or a pydantic model. ``{}`` and ``True`` allow any JSON.
        whitespace: allow spaces and line breaks between the parts. Else JSON is compact.

    Raises:
        SpecbeamError: it is no JSON Schema, or has something that cannot be enforced. Names the place.
    """

    kind = "JSON schema"
    schema: Any
    whitespace: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "schema", self._read(self.schema))
        self._check()

    @cached_property
    def text(self) -> str:
        options = {
            "item_separator": ",",
            "key_separator": ":",
            "whitespace_pattern": None,
            "whitespace_flexible": self.whitespace,
            "coerce_one_of": False,
            "lenient": False,
            "json_allowed_escapes": 'bfnrt"\\',  # no u: a key could be written in another form
            "json_allow_general_unicode_escapes": False,
        }
        made: str = _llguidance().LLMatcher.grammar_from_json_schema(self.schema, overrides=options)
        return made

    def _read(self, given: Any) -> Any:
        """The schema as plain data, without annotations that llguidance does not know."""
        if hasattr(given, "model_json_schema"):
            given = given.model_json_schema()
        try:
            text = given if isinstance(given, str) else json.dumps(given, allow_nan=False)
            schema = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise SpecbeamError(f"the JSON schema is no JSON: {error}") from error
        if len(text) > MAX_SCHEMA_BYTES:
            raise self._refused(f"it has {len(text):,} characters, and {MAX_SCHEMA_BYTES:,} are allowed")
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise SpecbeamError(f"schema={shown(given)} is no JSON schema that allows anything: give an object")
        try:
            return self._enforceable(schema, "#")
        except RecursionError:
            raise self._refused("it is nested too deeply") from None

    def _enforceable(self, schema: Any, place: str) -> Any:
        if not isinstance(schema, dict):
            return schema
        kept = dict(schema)
        if "x-guidance" in kept:
            raise self._refused(f"{place} has x-guidance, which may switch enforcement off")
        if isinstance(kept.get("format"), str) and kept["format"] not in FORMATS:
            del kept["format"]
        if kept.get("uniqueItems") is False:
            del kept["uniqueItems"]
        multiple = kept.get("multipleOf")
        if isinstance(multiple, int | float) and multiple > MAX_MULTIPLE_OF:
            raise self._refused(f"{place} has multipleOf {multiple}, and {MAX_MULTIPLE_OF:,} is the most")
        required = kept["required"] if isinstance(kept.get("required"), list) else []
        least = kept.get("minProperties")
        if isinstance(least, int | float) and least > len(required) + 1:
            raise self._refused(
                f"{place} has minProperties {least} and {len(required)} required keys: a repeated key would count"
            )
        for name in ("const", "enum", "pattern"):
            if any(CONTROL.search(text) for text in _texts(kept.get(name))):
                raise self._refused(f"{place}/{name} has a control character, which takes an escape with u")
        for name in SCHEMAS:
            if isinstance(kept.get(name), dict):
                kept[name] = self._enforceable(kept[name], f"{place}/{name}")
        for name in SCHEMAS_IN_LISTS:
            if isinstance(kept.get(name), list):
                kept[name] = [self._enforceable(one, f"{place}/{name}/{n}") for n, one in enumerate(kept[name])]
        for name in SCHEMAS_BY_NAME:
            if isinstance(kept.get(name), dict):
                if any(CONTROL.search(key) for key in kept[name]):
                    raise self._refused(
                        f"{place}/{name} has a key with a control character, which takes an escape with u"
                    )
                kept[name] = {key: self._enforceable(one, f"{place}/{name}/{key}") for key, one in kept[name].items()}
        return kept


@dataclass(frozen=True)
class Regex(Description):
    """Allows texts that match a regular expression as a whole, in the syntax of Rust's ``regex``, without lookaround.

    ``\\d``, ``\\w`` and ``\\s`` stand for characters of ASCII.

    Raises:
        SpecbeamError: the expression is wrong or too large.
    """

    kind = "regular expression"
    pattern: str

    def __post_init__(self) -> None:
        _check_text(self, self.pattern)
        self._check()

    @cached_property
    def text(self) -> str:
        llguidance = _llguidance()
        made: str = llguidance.LLMatcher.grammar_from_regex(llguidance.regex_to_lark(self.pattern, "dws"))
        return made


@dataclass(frozen=True)
class Grammar(Description):
    """Allows the texts of a context-free grammar: in the syntax of Lark as llguidance reads it, or in llama.cpp's GBNF.

    Args:
        source: a grammar with ``::=`` is GBNF. Texts begin with the rule ``start`` of Lark, or ``root`` of GBNF.

    Raises:
        SpecbeamError: the grammar is wrong or too large.
    """

    kind = "grammar"
    source: str

    def __post_init__(self) -> None:
        _check_text(self, self.source)
        if self.source.lstrip().startswith("{"):  # llguidance's own format, which may have token limits
            raise self._refused("it begins with {: give Lark or GBNF, or a JsonSchema")
        if "x-guidance" in self.source:
            raise self._refused("it has x-guidance, which may switch enforcement off")
        self._check()

    @cached_property
    def text(self) -> str:
        lark = self.source
        if "::=" in lark:
            from llguidance.gbnf_to_lark import any_to_lark

            try:
                lark = any_to_lark(lark)
            except Exception as error:  # the converter's own
                raise self._refused(str(error)) from error
        made: str = _llguidance().LLMatcher.grammar_from_lark(lark)
        return made


class _State:
    """The parser after some tokens, and the tokens that may follow. Neither changes: the next state has a copy."""

    __slots__ = ("mask", "matcher")

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self.mask: NDArray[np.uint8] | None = None


class GrammarConstraint:
    """The automaton of a description over a model's tokens: a :class:`specbeam.constraints.Constraint`.

    The mask says which tokens may follow. Where the grammar forces bytes, it allows only the tokens that the tokenizer
    makes of them.

    Raises:
        SpecbeamError: the model has no tokenizer, or no text satisfies the description.
    """

    def __init__(self, description: Description, lm: Any) -> None:
        self._description = description
        self._tokenizer = _tokenizer_of(lm)
        self._ends = np.array(sorted(lm.eos_token_ids), dtype=np.int64)
        matcher = _llguidance().LLMatcher(self._tokenizer, description.text, log_level=0, limits=_limits())
        self._check(matcher)
        self.start = _State(matcher)
        self.mask(self.start, self._tokenizer.vocab_size)  # the first one may take long, or reach a limit

    def compile(self, lm: Any) -> GrammarConstraint:
        """The same with a parser of its own: copies share a lexer, and a limit that one of them reaches ends all."""
        return self._description.compile(lm)

    def __repr__(self) -> str:
        return f"GrammarConstraint({self._description!r})"

    def advance(self, state: _State, token: int) -> _State | None:
        mask = self.mask(state, self._tokenizer.vocab_size)
        if token // 8 >= len(mask) or not mask[token // 8] >> token % 8 & 1:
            return None
        matcher = state.matcher.deep_copy()  # a matcher that was rolled back may give wrong masks
        matcher.consume_token(token)
        self._check(matcher)
        return _State(matcher)

    def mask(self, state: _State, vocab_size: int) -> NDArray[np.uint8]:
        if state.mask is None:
            bits = np.frombuffer(state.matcher.compute_bitmask(), np.uint8).copy()
            self._check(state.matcher)  # in error the mask has the end tokens
            ends = self._ends[self._ends < 8 * len(bits)]
            np.bitwise_and.at(bits, ends // 8, ~(1 << ends % 8).astype(np.uint8))
            state.mask = bits
        return state.mask[: -(-vocab_size // 8)]

    def complete(self, state: _State) -> bool:
        return bool(state.matcher.is_accepting())

    def _check(self, matcher: Any) -> None:
        """Refuse to go on with a parser in error."""
        if matcher.is_error():
            if matcher.get_error().startswith(NO_TEXT):
                raise SpecbeamError(f"no text satisfies the {self._description.kind}: change it")
            raise self._description._refused(matcher.get_error(), "has reached a limit of its parser")


def _check_text(description: Description, text: Any) -> None:
    if not isinstance(text, str):
        raise SpecbeamError(f"a {description.kind} is a text, and no {type(text).__name__}")
    if len(text) > MAX_GRAMMAR_BYTES:
        raise description._refused(f"it has {len(text):,} characters, and {MAX_GRAMMAR_BYTES:,} are allowed")


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield key
            yield from _texts(one)


def _llguidance() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise SpecbeamError(
            "JSON schemas, regular expressions and grammars need llguidance: pip install 'specbeam[structured]'"
        ) from error
    return llguidance


def _limits() -> Any:
    """llguidance's own limits, and errors without the parser's state."""
    return _llguidance().LLParserLimits(verbose_errors=False)


def prepare(lm: Any) -> None:
    """Make what grammars for a model need, if llguidance is installed and can read its tokenizer."""
    if find_spec("llguidance") is not None and hasattr(lm.tokenizer, "backend_tokenizer"):
        _tokenizer_of(lm)


_tokenizers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by the model's
_tokenizers_lock = Lock()


def _tokenizer_of(lm: Any) -> Any:
    """llguidance's tokenizer of a model, made once: a trie of its tokens' bytes takes up to 1.5 s."""
    tokenizer = lm.tokenizer
    if tokenizer is None or not hasattr(tokenizer, "backend_tokenizer"):
        problem = "has no tokenizer" if tokenizer is None else "has a tokenizer that llguidance cannot read"
        raise SpecbeamError(f"{lm.source} {problem}: a grammar is about texts")
    with _tokenizers_lock:
        if tokenizer not in _tokenizers:
            ends = sorted(lm.eos_token_ids) or [lm.backend.vocab_size - 1]
            text = tokenizer.backend_tokenizer.to_str()
            _tokenizers[tokenizer] = _llguidance().LLTokenizer(text, n_vocab=lm.backend.vocab_size, eos_token=ends)
        return _tokenizers[tokenizer]
