"""Trackers get a study's figures as it runs, beside its folder. A new tracker is a class with three methods."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from specbeam.errors import SpecbeamError
from specbeam.study.config import Study
from specbeam.study.results import Record

logger = logging.getLogger("specbeam")

CONNECT_TIMEOUT_SECONDS = 30.0


class Tracker(Protocol):
    """Follows a run. Its failures must not stop the study."""

    def record(self, record: Record) -> None:
        """A generation is finished."""

    def summary(self, summary: Mapping[str, Any], folder: Path) -> None:
        """The study is finished; its folder holds the report, the plots and the table."""

    def close(self) -> None:
        """The study has ended."""


class WandbTracker:
    """Weights & Biases: config, a table of generations, metrics and plots.

    Without a key (WANDB_API_KEY or ``wandb login``), or with WANDB_MODE=offline, everything is written below the run's
    folder, for ``wandb sync``.
    """

    COLUMNS = ("key", "method", "category", "turn", "repeat", "prompt", "text", "new_tokens", "tokens_per_second")

    def __init__(self, study: Study, config: Mapping[str, Any], folder: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise SpecbeamError("tracking=wandb needs wandb: pip install specbeam[wandb]") from error
        self._wandb: Any = wandb
        self._rows: list[list[Any]] = []
        how: dict[str, Any] = {
            "project": study.tracking.project or study.project_name,
            "entity": study.tracking.entity,
            "tags": study.tracking.tags,
            "config": dict(config),
            "dir": str(folder),
            "name": folder.name,
            "id": hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12],  # a resumed run keeps its id
            "resume": "allow",
        }
        mode = os.environ.get("WANDB_MODE") or (
            "online" if self._wandb.login(prompt=False, verify=False) else "offline"
        )
        try:
            self._run = self._init(how, mode)
        except Exception as error:
            if mode != "online":
                raise
            logger.warning("tracking goes on offline: %s", " ".join(str(error).split()))
            # The run that failed has taken the other id.
            self._run = self._init(how | {"id": f"{how['id']}-offline"}, "offline")

    def _init(self, how: dict[str, Any], mode: str) -> Any:
        settings = self._wandb.Settings(silent=True, init_timeout=CONNECT_TIMEOUT_SECONDS, console="off")
        return self._wandb.init(**how, mode=mode, settings=settings)

    def record(self, record: Record) -> None:
        stats = record.get("stats") or {}
        flat = record | stats
        self._rows.append([flat.get(name) for name in self.COLUMNS])
        if stats:
            method = record["method"]
            names = ("tokens_per_second", "time_to_first_token", "acceptance_rate", "steps_per_target_pass")
            self._run.log({f"{method}/{name}": stats[name] for name in names if stats[name] is not None})

    def summary(self, summary: Mapping[str, Any], folder: Path) -> None:
        table = self._wandb.Table(columns=[*self.COLUMNS], data=self._rows)
        plots = {
            f"plots/{path.stem}": self._wandb.Image(str(path)) for path in sorted((folder / "plots").glob("*.png"))
        }
        self._run.log({"generations": table, **plots})
        for method in summary["methods"]:
            for name, estimate in method["metrics"].items():
                self._run.summary[f"{method['method']}/{name}"] = estimate["mean"]

    def close(self) -> None:
        self._run.finish()


class Unfailing:
    """A tracker, or none. Its first failure is a warning, and the study goes on without it."""

    def __init__(self, tracker: Tracker | None) -> None:
        self._tracker = tracker

    def _call(self, method: str, *given: Any) -> None:
        if self._tracker is not None:
            try:
                getattr(self._tracker, method)(*given)
            except Exception as error:
                logger.warning("tracking stopped: %s", " ".join(str(error).split()) or type(error).__name__)
                self._tracker = None

    def record(self, record: Record) -> None:
        self._call("record", record)

    def summary(self, summary: Mapping[str, Any], folder: Path) -> None:
        self._call("summary", summary, folder)

    def close(self) -> None:
        self._call("close")


def tracker_of(study: Study, config: Mapping[str, Any], folder: Path) -> Tracker:
    """The tracker of a study.

    Raises:
        SpecbeamError: its package is not installed.
    """
    tracker: Tracker | None = None
    if study.tracking.name == "wandb":
        try:
            tracker = WandbTracker(study, config, folder)
        except SpecbeamError:
            raise
        except Exception as error:
            logger.warning("no tracking: %s", " ".join(str(error).split()) or type(error).__name__)
    return Unfailing(tracker)
