"""A live table of a study that runs: how far each method is, how fast, and when it will be over."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

from specbeam.study.results import Record


class Progress:
    """Shows on standard error where a study is; on what is no terminal, a line now and then.

    Attributes:
        spent: seconds of generations that were made since it began.
    """

    LINE_EVERY = 30.0  # seconds, without a terminal

    def __init__(self, methods: list[str], total: int) -> None:
        from rich.console import Console
        from rich.live import Live

        self.total, self.spent = total, 0.0
        self._each: dict[str, list[Record]] = {method: [] for method in methods}
        self._made, self._began, self._said, self._told = 0, time.monotonic(), "", 0.0
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True, get_renderable=self._table)
        self._terminal = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        if self._terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._terminal:
            self._live.stop()

    def take(self, record: Record, spent: float | None = None) -> None:
        """A generation is there; spent says how long it took, if it was made just now."""
        self._each.setdefault(record["method"], []).append(record)
        if spent is not None:
            self.spent += spent
            self._made += 1
            if not self._terminal and time.monotonic() - self._told > self.LINE_EVERY:
                self._told = time.monotonic()
                print(self._line(), file=sys.stderr, flush=True)

    def say(self, what: str) -> None:
        """What is being done just now."""
        self._said = what

    @property
    def done(self) -> int:
        return sum(map(len, self._each.values()))

    @property
    def left(self) -> str:
        """The time left, if the rest takes as long as what was made."""
        if not self._made or self.done >= self.total:
            return ""
        seconds = (time.monotonic() - self._began) / self._made * (self.total - self.done)
        return f"{timedelta(seconds=round(seconds))} left"

    def _line(self) -> str:
        return ", ".join(filter(None, [f"{self.done} of {self.total} generations", self.left, self._said]))

    def _table(self) -> Any:
        from rich.table import Table

        table = Table(caption=self._line(), box=None, pad_edge=False, caption_justify="left")
        for name in ("method", "done", "failed", "tokens/s", "steps/pass", "accepted"):
            table.add_column(name, justify="left" if name == "method" else "right")
        for method, records in self._each.items():
            stats = [record["stats"] for record in records if record["error"] is None]
            seconds = sum(s["seconds"] for s in stats)
            drafted = sum(s["drafted"] for s in stats)
            steps = [s["steps_per_target_pass"] for s in stats if s["steps_per_target_pass"] is not None]
            table.add_row(
                method,
                str(len(records)),
                str(len(records) - len(stats)),
                f"{sum(s['new_tokens'] for s in stats) / seconds:.1f}" if seconds else "-",
                f"{sum(steps) / len(steps):.2f}" if steps else "-",
                f"{sum(s['accepted'] for s in stats) / drafted:.0%}" if drafted else "-",
            )
        return table
