"""Trackers get a study's figures as it runs, beside its folder. A new tracker is a class with three methods."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from specbeam.errors import SpecbeamError
from specbeam.plugins import failure, resolve, takes
from specbeam.study.config import Study
from specbeam.study.results import Record

logger = logging.getLogger("specbeam")

CONNECT_TIMEOUT_SECONDS = 30.0


class Tracker(Protocol):
    """Follows a run. It is made with the study's configuration, as plain data, and the run's folder.

    Its failures do not stop the study.
    """

    def record(self, record: Record) -> None:
        """A generation is finished, or was there from an earlier start of the same run."""

    def summary(self, summary: Mapping[str, Any], folder: Path) -> None:
        """The study is finished; its folder holds the report, the plots and the table."""

    def close(self) -> None:
        """The study has ended, or was interrupted."""


class WandbTracker:
    """Weights & Biases: config, a table of generations, metrics and plots.

    Without a key (WANDB_API_KEY or ``wandb login``), or with WANDB_MODE=offline, everything is written below the run's
    folder, for ``wandb sync``. A warning says so at the start, and where the files are at the end.
    """

    COLUMNS = ("key", "method", "category", "turn", "repeat", "prompt", "text", "new_tokens", "tokens_per_second")

    def __init__(self, config: Mapping[str, Any], folder: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise SpecbeamError("tracking=wandb needs wandb: pip install 'specbeam[wandb]'") from error
        self._wandb: Any = wandb
        self._rows: list[list[Any]] = []
        tracking = config["tracking"]
        how: dict[str, Any] = {
            "project": tracking["project"] or config["project_name"],
            "entity": tracking["entity"],
            "tags": tracking["tags"],
            "config": dict(config),
            "dir": str(folder),
            "name": folder.name,
            "id": hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12],  # a resumed run keeps its id
            "resume": "allow",
        }
        mode, why = os.environ.get("WANDB_MODE"), "WANDB_MODE says so"
        if not mode:
            mode = "online" if self._wandb.login(prompt=False, verify=False) else "offline"
            why = "there is no key; set WANDB_API_KEY, or run wandb login"
        try:
            self._run = self._init(how, mode)
        except Exception as error:
            if mode != "online":
                raise
            mode, why = "offline", " ".join(str(error).split())
            # The run that failed has taken the other id.
            self._run = self._init(how | {"id": f"{how['id']}-offline"}, mode)
        if mode != "online":
            logger.warning("W&B is %s (%s)", mode, why)

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
        if self._run.offline:
            files = shlex.quote(self._run.settings.sync_dir)
            logger.warning("W&B was offline, so the run's files are on this disk; send them with: wandb sync %s", files)


class Unfailing:
    """A tracker, or none. Its first failure is a warning, and the study goes on without it."""

    def __init__(self, tracker: Tracker | None) -> None:
        self._tracker = tracker

    def _call(self, method: str, *given: Any) -> None:
        if self._tracker is not None:
            try:
                getattr(self._tracker, method)(*copy.deepcopy(given))  # what a tracker changes is its own
            except Exception as error:
                logger.warning("tracking stopped: %s of the tracker failed: %s", method, failure(error))
                self._tracker = None

    def record(self, record: Record) -> None:
        self._call("record", record)

    def summary(self, summary: Mapping[str, Any], folder: Path) -> None:
        self._call("summary", summary, folder)

    def close(self) -> None:
        self._call("close")


def tracker_of(study: Study, folder: Path) -> Tracker:
    """The tracker of a study."""
    name = study.tracking.name
    if name == "none":
        return Unfailing(None)
    make: Any = WandbTracker if name == "wandb" else resolve(name, "tracker", from_here=True)
    if not callable(make) or not takes(make, 2):
        raise SpecbeamError(f"tracker {name!r} cannot be made: give a class with __init__(self, config, folder)")
    try:
        tracker = make(asdict(study), folder)
    except SpecbeamError:
        raise
    except Exception as error:
        logger.warning("no tracking: %s cannot be made: %s", name, failure(error))
        return Unfailing(None)
    for method in ("record", "summary", "close"):
        if not callable(getattr(tracker, method, None)):
            raise SpecbeamError(f"tracker {name!r} has no method {method}: it needs record, summary and close")
    return Unfailing(tracker)
