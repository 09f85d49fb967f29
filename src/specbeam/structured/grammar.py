"""Constraints by a grammar: JSON schemas, regular expressions and context-free grammars.

llguidance parses them (https://github.com/guidance-ai/llguidance). An output spec is plain data, and refuses what
cannot be enforced. The automaton that it makes for a model serves any number of requests.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from importlib.util import find_spec
from itertools import islice
from threading import Lock
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from specbeam.errors import ConstraintError, SpecbeamError, not_allowed, shown
from specbeam.structured import trials
from specbeam.structured.gbnf import to_lark
from specbeam.structured.json_schema import (
    MAX_FORCED,
    ONE_OF,
    ONE_OF_ADVICE,
    NotEnforceable,
    check_flags,
    check_length,
    enforceable,
    places_of,
)
from specbeam.structured.trials import TooCostly, Trial, byte_tokenizer, limits, trial
from specbeam.structured.trie import TokenTrie

MAX_SCHEMA_BYTES, MAX_GRAMMAR_BYTES = 10**6, 64 * 1024
"""Nothing can interrupt the compilation of a larger one."""
MAX_MESSAGE_CHARACTERS = 600
MAX_PLACES = 3
"""Of those where a message may be about any."""
WHITESPACE = r"[ \n\r\t]{0,64}"
"""Between the parts of JSON. Without a limit a model may go on with it."""
ANY_JSON = r"""start: %s
value: object | array | STRING | NUMBER | "true" | "false" | "null"
object: "{" SPACE (member (ITEM member)*)? SPACE "}"
member: STRING KEY value
array: "[" SPACE (value (ITEM value)*)? SPACE "]"
STRING: /"([^"\\\x00-\x1f\x7f]|\\["\\bfnrt])*"/
NUMBER: /-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?([eE][-+]?[0-9]{1,3})?/
SPACE: /%s/
ITEM: /%s/
KEY: /%s/
"""
"""JSON with numbers of 64 bits, as in llama.cpp. With a number of any length a model that has to write one goes on."""
HALF_A_PAIR = "it has half a surrogate pair, which no text can have"
NO_FORCING = '%llguidance {"no_forcing": true}\n'
"""Otherwise a terminal that may go on before another one is forced to, for ever: /a+/ before "ab"."""
PRIVATE = "\ue000"
"""A character without a meaning."""
NO_TEXT = "NoExtension"
"""The error of a parser that nothing can follow begins so."""
MAX_LISTED_TEXTS, MAX_LISTING_STEPS = 256, 5_000
"""A longer list is not made, nor one that takes more steps: a step takes 20 microseconds."""
LISTING_FUEL = 5_000
"""For a step: 0.4 milliseconds at most."""


class OutputSpec(ABC):
    """What may be written, as plain data.

    Attributes:
        kind: its name in messages.
    """

    kind: str

    @abstractmethod
    def compile(self, lm: Any) -> Any:
        """The constraint for a model that :func:`specbeam.load` returned.

        Raises:
            SpecbeamError: the model has no tokenizer, or no text of its tokens satisfies the spec.
        """

    def listed(self, lm: Any) -> TokenTrie | None:
        """A constraint that gives each text one spelling in tokens, where there are few texts with several spellings.

        Otherwise beams that are to be different texts may go to other spellings of the same.
        """
        return None

    def to_dict(self) -> dict[str, Any]:
        """The spec as JSON can hold it, which :func:`output_spec_of` reads."""
        name = next(name for name, kind in OUTPUT_SPECS.items() if kind is type(self))
        return {name: {field.name: getattr(self, field.name) for field in fields(cast(Any, self))}}


class Parsed(OutputSpec):
    """An output spec that llguidance parses.

    Attributes:
        lexer_fuel: the work of llguidance's lexer for one mask, about 14,000 in a millisecond; None for its own limit.
        max_symbols: of llguidance's grammar. Schemas of applications have up to 12,000.
        is_forcing: the forced text is asked for. Not with :data:`NO_FORCING`: it may be endless.
    """

    lexer_fuel: int | None = None
    max_symbols = 25_000
    is_forcing = True

    @property
    @abstractmethod
    def text(self) -> str:
        """The grammar as llguidance reads it."""

    def compile(self, lm: Any) -> GrammarConstraint:
        return GrammarConstraint(self, lm)

    def listed(self, lm: Any) -> TokenTrie | None:
        texts = texts_of(self.text, self.max_symbols)
        if not texts or not all(texts):  # a trie has no empty text
            return None
        control = [token.content for token in lm.tokenizer.added_tokens_decoder.values()]
        if any(token and token in text for token in control for text in texts):  # which the trie would have as tokens
            return None
        return TokenTrie(texts, lm)

    @property
    def text_in_bytes(self) -> str:
        """The grammar for a tokenizer whose tokens are bytes."""
        return self.text

    def trial(self) -> Trial:
        """What comes of its compilation, in a process with limits."""
        try:
            return trial(self.text_in_bytes, self.is_forcing, self.lexer_fuel, self.max_symbols)
        except TooCostly as error:
            raise ConstraintError(f"the {self.kind} {error}: use fewer or smaller parts") from None

    def _check(self) -> None:
        """Refuse a grammar that llguidance does not take, or takes with a warning: then it would not be enforced."""
        try:
            tried = self.trial()
        except SpecbeamError:
            raise
        except ValueError as error:
            raise self._refused(str(error)) from error
        if tried.problem is not None:
            raise self._refused(tried.problem)
        self._check_stop(tried.stop)
        if tried.forced > MAX_FORCED:
            raise self._refused(f"its texts begin with the same {tried.forced:,} bytes, and {MAX_FORCED:,} are allowed")

    def check_parser(self, matcher: Any) -> None:
        """Refuse to go on with a parser in error."""
        self._check_stop(matcher.get_error() if matcher.is_error() else None)

    def _check_stop(self, error: str | None) -> None:
        if error is not None:
            if error.startswith(NO_TEXT):
                raise ConstraintError(f"no text satisfies the {self.kind}: change it")
            raise self._refused(error, "has reached a limit of its parser")

    def _refused(self, problem: str, what: str = "cannot be enforced") -> ConstraintError:
        where = " or ".join(islice(self._places(problem), MAX_PLACES))
        problem = problem.removesuffix("<non-verbose/>").partition("<backtrace>")[0]
        message = f"the {self.kind} {what}: {problem}{where and f' (at {where})'}"
        message = " ".join(message.split())
        if len(message) > MAX_MESSAGE_CHARACTERS:
            message = f"{message[: MAX_MESSAGE_CHARACTERS - 3]}..."
        return ConstraintError(message)

    def _places(self, problem: str) -> Iterator[str]:
        """Where it has what an error of llguidance is about, as far as that is known."""
        yield from ()


@dataclass(frozen=True)
class JsonSchema(Parsed):
    """Allows JSON that is valid by a JSON Schema.

    Keys come in the schema's order. A ``format`` holds for the form: a date may be the 29th of February in any year.
    Strings have no ``\\u`` escapes, so that each key has one form.

    Args:
        schema: a dictionary, its JSON text, or a pydantic model. ``{}`` and ``True`` allow any JSON.
        whitespace: allow up to 64 spaces and line breaks between the parts. Else there is one space after a comma and a
            colon, as in Python's ``json.dumps`` and in most JSON that models have read.

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
        return json.dumps({"grammars": [self.rule("json")]})

    def rule(self, name: str, whitespace: bool = False) -> Any:
        """The schema as one of llguidance's grammars, which others may name.

        Args:
            whitespace: allow it, whatever the schema says.
        """
        is_free = self.whitespace or whitespace
        space, item, key = (WHITESPACE, ",", ":") if is_free else ("", ", ", ": ")
        if self.schema in ({}, {"type": "object"}):
            around = (space + separator + space for separator in (item, key))
            return {"name": name, "lark_grammar": ANY_JSON % (self.schema.get("type", "value"), space, *around)}
        options = {
            "item_separator": item,
            "key_separator": key,
            "whitespace_pattern": space or None,
            "whitespace_flexible": False,
            "coerce_one_of": False,
            "lenient": False,
            "json_allowed_escapes": 'bfnrt"\\',  # no u: a key could be written in another form
            "json_allow_general_unicode_escapes": False,
        }
        made = _llguidance().LLMatcher.grammar_from_json_schema(self.schema, overrides=options)
        (rule,) = json.loads(made)["grammars"]
        return {**rule, "name": name}

    def _refused(self, problem: str, what: str = "cannot be enforced") -> ConstraintError:
        return super()._refused(problem.replace(ONE_OF, ONE_OF_ADVICE), what)

    def _places(self, problem: str) -> Iterator[str]:
        return places_of(self.schema, problem)

    def _read(self, given: Any) -> Any:
        """The schema as plain data, without annotations that llguidance does not know."""
        if hasattr(given, "model_json_schema"):
            given = given.model_json_schema()
        try:
            text = given if isinstance(given, str) else json.dumps(given, allow_nan=False)
            if len(text) > MAX_SCHEMA_BYTES:
                raise self._refused(f"it has {len(text):,} characters, and {MAX_SCHEMA_BYTES:,} are allowed")
            schema = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConstraintError(f"the JSON schema is no JSON: {error}") from error
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise ConstraintError(f"schema={shown(given)} is no JSON schema that allows anything: give an object")
        try:
            json.dumps(schema, ensure_ascii=False, allow_nan=False).encode()
            return enforceable(schema)
        except UnicodeEncodeError:
            raise self._refused(HALF_A_PAIR) from None
        except (NotEnforceable, ValueError) as error:
            raise self._refused(str(error)) from error
        except RecursionError:
            raise self._refused("it is nested too deeply") from None


@dataclass(frozen=True)
class Regex(Parsed):
    """Allows texts that match a regular expression as a whole, in the syntax of Rust's ``regex``, without lookaround.

    ``\\d``, ``\\w`` and ``\\s`` stand for characters of ASCII.

    Raises:
        SpecbeamError: the expression is wrong or too large.
    """

    kind = "regular expression"
    pattern: str

    def __post_init__(self) -> None:
        _check_text(self, self.pattern)
        try:
            check_flags(self.pattern, "it")
            check_length(self.pattern, "it")
        except NotEnforceable as error:
            raise self._refused(str(error)) from error
        self._check()

    @cached_property
    def text(self) -> str:
        llguidance = _llguidance()
        made: str = llguidance.LLMatcher.grammar_from_regex(llguidance.regex_to_lark(self.pattern, "dws"))
        return made


@dataclass(frozen=True)
class Grammar(Parsed):
    """Allows the texts of a context-free grammar: in the syntax of Lark as llguidance reads it, or in llama.cpp's GBNF.

    Terminals of Lark take as much as they can: ``/ */`` before ``" a"`` leaves nothing for it. In GBNF this is so in
    recursive grammars, for repeated sets of more than 24 characters.

    Args:
        source: a grammar with ``::=`` is GBNF. Texts begin with the rule ``start`` of Lark, or ``root`` of GBNF.

    Raises:
        SpecbeamError: the grammar is wrong or too large.
    """

    kind = "grammar"
    is_forcing = False
    source: str

    def __post_init__(self) -> None:
        _check_text(self, self.source)
        if self.source.lstrip().startswith("{"):  # llguidance's own format, which may have token limits
            raise self._refused("it begins with {: give Lark or GBNF, or a JsonSchema")
        for directive in ("%json", "%llguidance"):
            if directive in self.source:
                raise self._refused(f"it has {directive}, which is not checked")
        self._check()

    @cached_property
    def text(self) -> str:
        lark = to_lark(self.source) if "::=" in self.source else self.source
        made: str = _llguidance().LLMatcher.grammar_from_lark(NO_FORCING + lark)
        return made


@dataclass(frozen=True)
class Choice(OutputSpec):
    """Allows some texts: a :class:`TokenTrie` of them for each model.

    Args:
        texts: at least one.

    Raises:
        SpecbeamError: there is none, or one is empty or no text.
    """

    kind = "choice"
    texts: tuple[str, ...]

    def __post_init__(self) -> None:
        given = (self.texts,) if isinstance(self.texts, str) else tuple(self.texts)
        if not given or not all(isinstance(text, str) and text for text in given):
            raise not_allowed("texts", self.texts, "texts to choose from, none of them empty")
        object.__setattr__(self, "texts", given)

    def compile(self, lm: Any) -> TokenTrie:
        return TokenTrie(self.texts, lm)


OUTPUT_SPECS: dict[str, Any] = {"json_schema": JsonSchema, "regex": Regex, "grammar": Grammar, "choice": Choice}
"""The output specs by the names that they have in files. Each is made of one value of JSON."""


def output_spec_of(value: Any) -> OutputSpec:
    """An output spec that was saved (:meth:`OutputSpec.to_dict`)."""
    try:
        ((name, given),) = value.items()
        made: OutputSpec = OUTPUT_SPECS[name](**given)
    except SpecbeamError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SpecbeamError(f"{shown(value)} is no description of a constraint") from error
    return made


class _State:
    """The parser after some tokens, and the tokens that may follow. The next state has a parser of its own.

    Within forced tokens it has the parser before the first one, which says all of them at once. It would have to read
    the forced text again after each of them.

    Attributes:
        forced: tokens that follow the parser's because no other is allowed. Empty if that is not known, or not so.
        index: of the next of these.
        mask: of the tokens that may follow; None if that is not known.
    """

    __slots__ = ("forced", "index", "mask", "matcher")

    def __init__(self, matcher: Any, forced: Sequence[int] = (), index: int = 0) -> None:
        self.matcher = matcher
        self.forced = forced
        self.index = index
        self.mask: NDArray[np.uint8] | None = None


class GrammarConstraint:
    """The automaton of an output spec over a model's tokens: a :class:`specbeam.constraints.Constraint`.

    The mask says which tokens may follow. Where the grammar forces bytes, it allows only the tokens that the tokenizer
    makes of them.

    Raises:
        SpecbeamError: the model has no tokenizer, or no text satisfies the spec.
    """

    def __init__(self, spec: Parsed, lm: Any) -> None:
        self.spec = spec
        self._tokenizer = _tokenizer_of(lm)
        self._ends = np.array(sorted(self._tokenizer.eos_tokens), dtype=np.int64)
        spec.trial()
        limited = limits(spec.lexer_fuel, spec.max_symbols)
        matcher = _llguidance().LLMatcher(self._tokenizer, spec.text, log_level=0, limits=limited)
        self.spec.check_parser(matcher)
        self.start = _State(matcher)
        self.mask(self.start, self._tokenizer.vocab_size)  # the first one may take long, or reach a limit

    def __repr__(self) -> str:
        return f"GrammarConstraint({self.spec!r})"

    def advance(self, state: _State, token: int) -> _State | None:
        mask = self.mask(state, self._tokenizer.vocab_size)
        if token // 8 >= len(mask) or not mask[token // 8] >> token % 8 & 1:
            return None
        if state.index + 1 < len(state.forced):
            return _State(state.matcher, state.forced, state.index + 1)
        matcher = state.matcher.deep_copy()  # a matcher that was rolled back may give wrong masks
        matcher.consume_tokens([*state.forced] or [token])
        self.spec.check_parser(matcher)
        return _State(matcher)

    def mask(self, state: _State, vocab_size: int) -> NDArray[np.uint8]:
        if state.mask is None:
            state.mask = self._forced(state) if state.forced else self._read(state)
        return state.mask[: -(-vocab_size // 8)]

    def complete(self, state: _State) -> bool:
        return bool(state.matcher.is_accepting())

    def _read(self, state: _State) -> NDArray[np.uint8]:
        """The mask of a state, from its parser."""
        bits = np.frombuffer(state.matcher.compute_bitmask(), np.uint8).copy()
        self.spec.check_parser(state.matcher)  # in error the mask has the end tokens
        ends = self._ends[self._ends < 8 * len(bits)]
        np.bitwise_and.at(bits, ends // 8, ~(1 << ends % 8).astype(np.uint8))
        is_single = np.count_nonzero(bits) == 1 and int(bits.max()).bit_count() == 1
        if is_single and self.spec.is_forcing and not state.matcher.is_accepting():
            state.forced = state.matcher.compute_ff_tokens()
            self.spec.check_parser(state.matcher)
        return bits

    def _forced(self, state: _State) -> NDArray[np.uint8]:
        """The mask of a state within forced tokens."""
        token = state.forced[state.index]
        bits = np.zeros(-(-self._tokenizer.vocab_size // 8), np.uint8)
        bits[token // 8] = 1 << token % 8
        return bits


def _check_text(spec: Parsed, text: Any) -> None:
    if not isinstance(text, str):
        raise ConstraintError(f"a {spec.kind} is a text, and no {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise spec._refused(HALF_A_PAIR) from None
    if len(text) > MAX_GRAMMAR_BYTES:
        raise spec._refused(f"it has {len(text):,} characters, and {MAX_GRAMMAR_BYTES:,} are allowed")


def _llguidance() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise SpecbeamError(
            "JSON schemas, regular expressions and grammars need llguidance: pip install 'specbeam[structured]'"
        ) from error
    return llguidance


def without_special_texts(tokenizer: str) -> str:
    """A tokenizer.json whose control tokens have names that no text has.

    So "<|im_end|>" in a schema is a text of ordinary tokens, and no control token. llguidance takes all added tokens in
    angle brackets for such.
    """
    serialized = json.loads(tokenizer)
    model = serialized["model"]
    vocab, renamed = model.get("vocab", {}), set[str]()
    for token in serialized["added_tokens"]:
        number, text = token["id"], token["content"]
        if token["special"] or (text.startswith("<") and text.endswith(">")):
            token["special"] = True
            token["content"] = f"{PRIVATE}{number}"
            if isinstance(vocab, dict) and vocab.get(text) == number:
                vocab[token["content"]] = vocab.pop(text)
                renamed.add(text)
            elif isinstance(vocab, list) and number < len(vocab):
                vocab[number][0] = token["content"]
    if renamed and model.get("merges"):  # a special token may have been an ordinary one
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [pair for pair in pairs if renamed.isdisjoint((*pair, "".join(pair)))]
    return json.dumps(serialized)


def prepare(lm: Any) -> None:
    """Make what grammars for a model need, if llguidance is installed and can read its tokenizer."""
    if find_spec("llguidance") is not None and hasattr(lm.tokenizer, "backend_tokenizer"):
        trials.start()
        _tokenizer_of(lm)


_tokenizers: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()  # by the model's, its size and end tokens
_tokenizers_lock = Lock()


def _tokenizer_of(lm: Any) -> Any:
    """llguidance's tokenizer of a model, made once: a trie of its tokens' bytes takes up to 1.5 s."""
    tokenizer = lm.tokenizer
    if tokenizer is None or not hasattr(tokenizer, "backend_tokenizer"):
        problem = "has no tokenizer" if tokenizer is None else "has a tokenizer that llguidance cannot read"
        raise SpecbeamError(f"{lm.source} {problem}: a grammar is about texts")
    size, ends = lm.backend.vocab_size, lm.eos_token_ids
    with _tokenizers_lock:
        made = _tokenizers.setdefault(tokenizer, {})
        if (size, ends) not in made:
            text = without_special_texts(tokenizer.backend_tokenizer.to_str())
            given = sorted(ends) or [_no_text(text, size)]  # llguidance needs an end token
            made[size, ends] = _llguidance().LLTokenizer(text, n_vocab=size, eos_token=given)
        return made[size, ends]


def _no_text(tokenizer: str, size: int) -> int:
    """A token of a tokenizer.json that is part of no text: a special one if there is any, or else the last one."""
    special = (token["id"] for token in json.loads(tokenizer)["added_tokens"] if token["special"])
    return next((number for number in special if number < size), size - 1)


def texts_of(grammar: str, max_symbols: int) -> tuple[str, ...] | None:
    """All texts of a grammar as llguidance reads it; None if there are many, or if it takes long to find them."""
    from llguidance import LLMatcher

    start = LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=limits(LISTING_FUEL, max_symbols))
    found, level, steps = list[bytes](), [(b"", start)], 0
    while level:
        below = list[tuple[bytes, Any]]()
        for text, matcher in level:
            if matcher.is_accepting():
                found.append(text)
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            steps += 1
            if matcher.is_error():
                return None
            for byte in np.flatnonzero(np.unpackbits(bits, bitorder="little")[:256]).tolist():
                after = matcher.deep_copy()
                after.consume_token(byte)
                below.append((text + bytes([byte]), after))
            if len(found) + len(below) > MAX_LISTED_TEXTS or steps > MAX_LISTING_STEPS:
                return None
        level = below
    try:
        return tuple(text.decode() for text in found)
    except UnicodeDecodeError:
        return None
