"""The figures of a bench run as JSON, so that a later run can be compared with them (``bench/compare.py``).

A file holds ``date``, ``commit``, ``machine``, ``command``, ``settings`` (versions, instruction sets and threads of the
engines that are compared, by name; empty in older files) and ``figures``. Each figure has a ``name``
("model / part / method"), a ``value`` (the median or the mean), ``min``, ``max`` and a ``unit``. ``missing`` has the
names of figures that the run does not have, each with the reason. Files that are kept lie in ``bench/results`` as
``BENCH-DATE-COMMIT.json``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from machine import machine

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Figure:
    name: str
    value: float
    unit: str
    min: float
    max: float


@dataclass
class Figures:
    """The figures of one run of a bench, and the machine it ran on."""

    date: str
    commit: str
    machine: str
    command: str
    figures: list[Figure] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_this_run(cls, *peers: str) -> Figures:
        """No figures yet. ``peers``: the versions of the other packages that are measured."""
        command = shlex.join(["python", "bench/" + Path(sys.argv[0]).name, *sys.argv[1:]])
        return cls(str(date.today()), commit(), machine(*peers), command)

    def add(self, *names: str, unit: str, samples: Sequence[float], value: float | None = None) -> Figure:
        """Add some measurements: their median (or ``value``, such as their mean), minimum and maximum."""
        value = statistics.median(samples) if value is None else value
        figure = Figure(" / ".join(names), value, unit, min(samples), max(samples))
        self.figures.append(figure)
        return figure

    def write(self, path: Path | None) -> None:
        """Write the JSON file, unless ``path`` is None."""
        if path:
            path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Figures:
        """Read a JSON file. Raises ValueError if it holds something else."""
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{**found, "figures": [Figure(**figure) for figure in found["figures"]]})
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"{path} holds no figures of a bench: {error}") from None


def commit() -> str:
    """The commit that is checked out; "-dirty" is appended if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=10"]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """The option that all benches share."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file, too")
