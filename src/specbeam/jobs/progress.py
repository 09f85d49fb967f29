"""How far long work is, on standard error: a bar or a table on a terminal, and elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

SECONDS_PER_LINE = 5.0
"""Without a terminal, a line is printed at most this often."""


class Progress:
    """A context manager that ends the bar or the table.

    Args:
        line: makes the line.
        done: the part of the total that an earlier process finished.
        table: makes a table of rich that a terminal shows in place of the bar.
        bar: arguments of tqdm.

    Attributes:
        activity: what is done at the moment, for the line or the table.
    """

    def __init__(
        self,
        line: Callable[[Progress], str],
        total: int = 0,
        done: int = 0,
        *,
        seconds_per_line: float | None = None,
        table: Callable[[Progress], Any] | None = None,
        **bar: Any,
    ) -> None:
        from tqdm import tqdm

        self.total, self.done, self.activity = total, done, ""
        self._line = line
        self._seconds_per_line = SECONDS_PER_LINE if seconds_per_line is None else seconds_per_line
        self._printed_at = time.monotonic()
        self._first: tuple[int, float] | None = None  # done, and the time, at the first result of this process
        self._is_terminal, self._shown = sys.stderr.isatty(), ExitStack()
        has_bar = self._is_terminal and table is None
        self._bar = self._shown.enter_context(tqdm(total=total or None, initial=done, disable=not has_bar, **bar))
        if self._is_terminal and table is not None:
            from rich.console import Console
            from rich.live import Live

            live = Live(console=Console(stderr=True), transient=True, get_renderable=lambda: table(self))
            self._shown.enter_context(live)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.close()

    def show(self, done: int) -> None:
        """Show that this part of the total is done."""
        now = time.monotonic()
        self._bar.total = self.total
        self._bar.update(done - self.done)
        self.done, self._first = done, self._first or (done, now)
        if not self._is_terminal and done < self.total and now - self._printed_at >= self._seconds_per_line:
            self._printed_at = now
            print(self._line(self), file=sys.stderr, flush=True)

    @property
    def per_second(self) -> float | None:
        """The speed since the first result of this process, for which models were loaded. None before a second one."""
        if self._first is None or self.done == self._first[0]:
            return None
        return (self.done - self._first[0]) / (time.monotonic() - self._first[1])

    @property
    def seconds_left(self) -> float | None:
        return None if (speed := self.per_second) is None else (self.total - self.done) / speed
