"""A live table of a running study: how far each method is, how fast it is, and the time left."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

from specbeam.study.results import Record


class Progress:
    """Shows the progress of a study on standard error: a table on a terminal, else a line now and then."""

    SECONDS_PER_LINE = 30.0  # without a terminal

    def __init__(self, methods: list[str], total: int) -> None:
        from rich.console import Console
        from rich.live import Live

        self.total = total
        self._each: dict[str, list[Record]] = {method: [] for method in methods}
        self._made, self._began, self._activity, self._last_line_at = 0, time.monotonic(), "", 0.0
        console = Console(stderr=True)
        self._live = Live(console=console, refresh_per_second=4, transient=True, get_renderable=self._table)
        self._terminal = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        if self._terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._terminal:
            self._live.stop()

    def take(self, record: Record, *, made_now: bool = False) -> None:
        """Count a finished generation."""
        self._each.setdefault(record["method"], []).append(record)
        if made_now:
            self._made += 1
            if not self._terminal and time.monotonic() - self._last_line_at > self.SECONDS_PER_LINE:
                self._last_line_at = time.monotonic()
                print(self._line(), file=sys.stderr, flush=True)

    def say(self, activity: str) -> None:
        """Show the current activity."""
        self._activity = activity

    def _line(self) -> str:
        """How many generations are done, the time left if the others take as long on average, and the activity."""
        done, left = sum(map(len, self._each.values())), ""
        if self._made and done < self.total:
            seconds = (time.monotonic() - self._began) / self._made * (self.total - done)
            left = f"{timedelta(seconds=round(seconds))} left"
        return ", ".join(filter(None, [f"{done} of {self.total} generations", left, self._activity]))

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
