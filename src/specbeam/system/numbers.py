"""Whether a value that a person or a file gives is a number: Python's and NumPy's are, True and False are not."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, TypeGuard


def is_integer(value: Any) -> TypeGuard[int]:
    # A prompt has thousands of token ids, and asking an abstract class takes microseconds.
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def is_real(value: Any) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)
