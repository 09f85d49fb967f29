"""The rows that a bench prints: each figure, and the value that it must reach."""

from __future__ import annotations

from collections.abc import Sequence

from figures import Figures


class Table:
    """Prints the rows and keeps their figures."""

    def __init__(self, figures: Figures, model: str) -> None:
        self.figures = figures
        self.model = model

    def head(self) -> None:
        """The first two lines."""
        print("| figure | measured (min to max) | must reach |\n| --- | --- | --- |", flush=True)

    def row(
        self,
        *names: str,
        unit: str,
        samples: Sequence[float],
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        """One row. The value is the median of the samples."""
        figure = self.figures.add(self.model, *names, unit=unit, samples=samples)
        measured = f"{figure.value:.3g} ({figure.min:.3g} to {figure.max:.3g}) {unit}"
        goal = f"at least {at_least:g}" if at_least else f"at most {at_most:g}" if at_most else ""
        print(f"| {', '.join(names)} | {measured} | {goal} |", flush=True)

    def missing(self, *names: str, reason: str) -> None:
        """A row without a figure. The file says why, too."""
        self.figures.missing[" / ".join([self.model, *names])] = reason
        print(f"| {', '.join(names)} | {reason} | |", flush=True)
