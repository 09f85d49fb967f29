"""The exceptions that are for people, and the exit statuses of the commands."""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
"""Exit statuses: something failed, the input was wrong, or Ctrl-C."""
MAX_SHOWN_CHARACTERS = 200
"""Messages show this much of a wrong value."""
MAX_SHOWN_COUNTS = 20


class SpecbeamError(ValueError):
    """An error that the caller can fix. The message says what was wrong, with which value, and what to do.

    The command line prints the message in one line and exits with status 2.

    Args:
        message: names options as Python spells them.
        option: the option that was wrong; or all options that the message names, the wrong one first.

    Attributes:
        options: the same. The command line and the server put their own names in place of Python's.
    """

    def __init__(self, message: str = "", *, option: str | Iterable[str] = ()) -> None:
        super().__init__(message)
        self.options = (option,) if isinstance(option, str) else tuple(dict.fromkeys(option))

    @property
    def option(self) -> str | None:
        """The option that was wrong, if the error is about one."""
        return next(iter(self.options), None)


class Unsupported(SpecbeamError):
    """A sound checkpoint whose model is not one of our architectures, or has features that they lack."""


class TooManyNodes(SpecbeamError):
    """The memory of an engine cannot hold the nodes that a strategy asks for, although its request is alone.

    It is raised at the ``yield`` of a strategy that prefers to go on with fewer nodes (``Evaluate.or_fewer``).
    """


class NotFinite(SpecbeamError):
    """Logits are NaN or +inf, or all of a row are -inf. So no token has a probability.

    It is raised in the strategy, where it asked. One that asked about draft tokens may go on without them.
    """


class ConstraintError(SpecbeamError):
    """A constraint cannot be enforced, or has reached a limit of its parser, perhaps in the middle of a text."""


class QueueFull(SpecbeamError):
    """An engine has as many unfinished requests as it takes. Submit the request again later."""


class PromptTooLong(SpecbeamError):
    """A prompt has more tokens than it may have.

    Attributes:
        tokens: how many, such as "300" or "at least 8,200".
    """

    def __init__(self, message: str, tokens: str = "") -> None:  # the message alone makes it again in another process
        super().__init__(message)
        self.tokens = tokens


class PluginError(SpecbeamError):
    """A user-defined object failed, or made a mistake. The message names it, and its file and line."""


@contextmanager
def located(place: str, advice: str = "") -> Iterator[None]:
    """Put a place before the message of a SpecbeamError, unless the place is empty, and advice behind it."""
    try:
        yield
    except SpecbeamError as error:
        raise SpecbeamError(f"{place}: {error}{advice}" if place else str(error), option=error.options) from error


def wrong_value(option: str, value: object, says: str, *named: str) -> SpecbeamError:
    """The error for a value of an option. What it says may name other options, too."""
    return SpecbeamError(f"{option}={shown(value)} {says}", option=(option, *named))


def not_allowed(option: str, value: object, allowed: str, *named: str) -> SpecbeamError:
    """The error for a value of an option that only has other values."""
    return wrong_value(option, value, f"is not allowed: give {allowed}", *named)


def shown(value: object) -> str:
    """A value as messages show it: not all of it if it is long."""
    try:
        text = repr(value)
    except ValueError:
        return f"(a number of more than {sys.get_int_max_str_digits()} digits)"
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."


def shown_counts(counts: Counter[str]) -> str:
    """How often each value occurs, the most frequent first."""
    shown = [f"{count:,} {value}" for value, count in counts.most_common(MAX_SHOWN_COUNTS)]
    more = len(counts) - len(shown)
    return f"{', '.join(shown)}{f', and {more} others' if more else ''}"


def is_out_of_memory(error: Exception) -> bool:
    """Whether there was no memory, on a GPU or on the CPU."""
    on_gpu = getattr(sys.modules.get("torch"), "OutOfMemoryError", ())  # nobody raises it without PyTorch
    return isinstance(error, (MemoryError, on_gpu)) or "DefaultCPUAllocator" in str(error)


def forget_frames(error: Exception) -> Exception:
    """The error with its traceback as text: frames would keep alive the tensors that they worked on."""
    if error.__traceback__ is not None:
        error.add_note("".join(traceback.format_tb(error.__traceback__)))
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)
