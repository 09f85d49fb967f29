"""Checks of the values that people give, by the kind of the option."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Rational, Real
from typing import Any

from specbeam.errors import not_allowed
from specbeam.options.declared import LARGEST, MAX_LOGIT_BIAS, Kind, NotGiven, Option

BIASES = f"numbers from -{MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}, or -inf, by token id, such as {{50256: -100}}"
WORDS = "lists of token ids, such as lm.tokenizer([...], add_special_tokens=False).input_ids"


def checked(option: Option, value: Any) -> Any:
    """The value of an option in the form in which options store it.

    Raises:
        SpecbeamError: the value is of another type, or out of the option's range.
    """
    return CHECKS[option.kind](option, value)


def check(name: str, holds: bool, value: Any, allowed: str, *named: str) -> None:
    """Refuse the value of an option unless something holds."""
    if not holds:
        raise not_allowed(name, value, allowed, *named)


def _integer(option: Option, value: Any) -> Any:
    return _in_range(option, _number(option, value, int, Integral, "a whole number"))


def _real(option: Option, value: Any) -> Any:
    return _in_range(option, _number(option, value, float, Real, "a number"))


def _number(option: Option, value: Any, make: type, kind: type, words: str) -> Any:
    """A Python number. The value may be a NumPy number."""
    # Asking abstract classes takes microseconds.
    if isinstance(value, int | float) and type(value) is make and abs(value) < LARGEST:
        return value
    check(option.name, isinstance(value, kind) and not isinstance(value, bool), value, words)
    is_exact = isinstance(value, Rational)  # Python's are of any size
    check(option.name, not is_exact or abs(value) < LARGEST, value, f"{words} between -2**63 and 2**63")
    return value if isinstance(value, NotGiven) else make(value)


def _in_range(option: Option, value: Any) -> Any:
    assert option.range is not None
    check(option.name, value in option.range, value, option.range.words)
    return value


def _flag(option: Option, value: Any) -> Any:
    check(option.name, isinstance(value, bool), value, "true or false")
    return value


def _size(option: Option, value: Any) -> Any:
    if isinstance(value, str) and value == "auto":
        return value
    assert option.range is not None
    check(option.name, isinstance(value, Integral) and not isinstance(value, bool), value, option.range.words)
    return int(_in_range(option, value))


def _stopping(option: Option, value: Any) -> Any:
    is_known = isinstance(value, bool) or (isinstance(value, str) and value == "never")
    check(option.name, is_known, value, 'true, false or "never"')
    return value


def _biases(option: Option, value: Any) -> Any:
    check(option.name, isinstance(value, Mapping), value, BIASES)
    are_ids = all(isinstance(token, Integral | str) and not isinstance(token, bool) for token in value)
    try:  # keys of JSON objects are strings
        biases = {int(token): float(bias) for token, bias in value.items()} if are_ids else {-1: 0.0}
    except (TypeError, ValueError, OverflowError):
        biases = {-1: 0.0}
    for token, bias in biases.items():
        in_range = abs(bias) <= MAX_LOGIT_BIAS or bias == float("-inf")
        check(option.name, 0 <= token < LARGEST and in_range, value, BIASES)
    check(option.name, len(biases) == len(value), value, 'each token id once: 5 and "5" are the same one')
    return biases


def _words(option: Option, value: Any) -> Any:
    try:
        words = tuple(() if isinstance(word, str | bytes) else tuple(word) for word in value)
    except TypeError:
        words = ((),)
    check(option.name, all(word and _are_token_ids(word) for word in words), value, WORDS)
    return tuple(tuple(map(int, word)) for word in words)


def _are_token_ids(values: Iterable[Any]) -> bool:
    return all(isinstance(one, Integral) and not isinstance(one, bool) and 0 <= int(one) < LARGEST for one in values)


def _tokens(option: Option, value: Any) -> Any:
    ids = tuple(map(int, _several(option, value, Integral)))
    check(option.name, _are_token_ids(ids), ids, "token ids")
    return ids


def _texts(option: Option, value: Any) -> Any:
    texts = _several(option, () if value is None else value, str)
    if not all(texts):
        raise not_allowed(option.name, "", "text that is not empty")
    return texts


def _several(option: Option, value: Any, kind: type) -> tuple[Any, ...]:
    """One value or several as a tuple."""
    values = (value,) if isinstance(value, kind) else value
    are_several = isinstance(values, Iterable) and not isinstance(values, str | bytes)
    values = tuple(values) if are_several else (None,)
    holds = all(isinstance(one, kind) and not isinstance(one, bool) for one in values)
    check(option.name, holds, value, "one or several of its kind")
    return values


def _constraint(option: Option, value: Any) -> Any:
    # They import NumPy, which the command line's help does not need.
    from specbeam.structured import Constraint
    from specbeam.structured.grammar import OutputSpec

    is_one = isinstance(value, Constraint | OutputSpec) and not isinstance(value, type)
    check(option.name, is_one, value, "a JsonSchema, Regex, Grammar, Choice, TokenTrie or another Constraint")
    return value


def _function(option: Option, value: Any) -> Any:
    check(option.name, callable(value), value, "a function")
    return value


def _functions(option: Option, value: Any) -> Any:
    functions = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    check(option.name, all(map(callable, functions)), value, "one function or several")
    return functions


CHECKS: dict[Kind, Callable[[Option, Any], Any]] = {
    Kind.INTEGER: _integer,
    Kind.NUMBER: _real,
    Kind.FLAG: _flag,
    Kind.SIZE: _size,
    Kind.STOPPING: _stopping,
    Kind.BIASES: _biases,
    Kind.WORDS: _words,
    Kind.TOKENS: _tokens,
    Kind.TEXTS: _texts,
    Kind.CONSTRAINT: _constraint,
    Kind.FUNCTION: _function,
    Kind.FUNCTIONS: _functions,
}
