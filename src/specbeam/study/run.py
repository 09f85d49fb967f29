"""A study from its configuration to its report."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

from specbeam import plugins
from specbeam.checkpoints import locate, open_checkpoint
from specbeam.drafting.resolve import draft_kind
from specbeam.errors import SpecbeamError
from specbeam.jobs.crew import Crew
from specbeam.jobs.files import write_whole
from specbeam.jobs.launchers import crew_on_ray, run_here
from specbeam.jobs.progress import Progress
from specbeam.study.composition import as_yaml
from specbeam.study.config import Study, check, methods
from specbeam.study.data import Row, local_file, read_rows
from specbeam.study.execution import completion_of, passes
from specbeam.study.metrics import CustomMetrics, finished
from specbeam.study.results import (
    SUMMARY,
    Record,
    Run,
    default_folder,
    fingerprint,
    read,
    read_json,
    reporting_full_disk,
    write_parquet,
)
from specbeam.study.samples import chosen
from specbeam.study.summary import summarize
from specbeam.study.tracking import tracker_of
from specbeam.study.work import Work, jobs_of_turn, key_of, new_record, with_messages

logger = logging.getLogger("specbeam")

KEYS_WITHOUT_EFFECT = ("output", "tracking", "launcher", "report")
"""Keys of the configuration that do not change what a run keeps. Neither do custom metrics."""

SECONDS_PER_LINE = 30.0
"""A study takes hours. Without a terminal, a line is printed at most this often."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a study.

    Attributes:
        folder: the run's folder, which has the finished generations.
        done, total: the number of finished generations, and of all.
    """

    def __init__(self, folder: Path, done: int, total: int) -> None:
        super().__init__()
        self.folder, self.done, self.total = folder, done, total


def run_study(config: Mapping[str, Any], show: Callable[[str], object] = print, swept: str = "") -> Path:
    """Run a study, or the rest of an interrupted one, and write its table, plots and report.

    Args:
        config: as :func:`specbeam.study.composition.compose` returns it.
        show: called with a line for people at the start and at the end.
        swept: the keys and values of a sweep that this run stands for. They are part of the default folder's name.

    Returns:
        The run's folder.

    Raises:
        SpecbeamError: wrong input, or no room on the disk. Finished generations are kept.
        Interrupted: Ctrl-C. Finished generations are kept.
    """
    began = time.perf_counter()
    study = check(config)
    rows = read_rows(study.data, study.prompts, study.seed)
    custom_metrics = CustomMetrics(study.metrics.own)
    relevant = {key: value for key, value in config.items() if key not in KEYS_WITHOUT_EFFECT}
    if "metrics" in relevant:
        relevant["metrics"] = {key: value for key, value in config["metrics"].items() if key != "own"}
    about = fingerprint(relevant, _sources(study), local_file(study.data))
    folder = Path(study.output) if study.output is not None else default_folder(study.project_name, about, swept)
    run = Run(folder, about, as_yaml(config))
    total = len(methods(study)) * study.repeats * sum(len(row.turns) for row in rows)
    state = f"goes on, {len(run.records)} of {total} generations are there" if run.records else "a new run"
    show(f"{folder}: {state}")
    try:
        with ExitStack() as last:
            last.callback(run.close)
            tracker = tracker_of(study, folder)
            last.callback(tracker.close)
            names = [method.name for method in methods(study)]
            shown = Progress(
                progress_line,
                total,
                len(run.records),
                seconds_per_line=SECONDS_PER_LINE,
                table=lambda progress: progress_table(names, [*run.records.values()], progress_line(progress)),
            )
            progress = last.enter_context(shown)

            def follow(record: Record) -> None:
                custom_metrics.measure(record)
                tracker.record(record)

            for record in run.records.values():
                follow(record)
            work = cache(partial(Work, config))
            earlier = _seconds(run)
            _generate(study, config, rows, run, work, follow, progress)
            generating = _seconds(run)
            progress.activity = "scoring the texts"
            _score(study, run, work)
            progress.activity = "recording what the report shows"
            first = [key_of(method.name, rows[0].id, 0, 0) for method in methods(study)]
            _record(run, work, first)
            records = [
                with_recording(record, run.recordings, first) | {"own": custom_metrics.values.get(record["key"], {})}
                for record in run.records.values()
            ]
            summary = _summarize(study, records, run.scores, custom_metrics.failures)
            overhead = max(0.0, time.perf_counter() - began - (generating - earlier))
            from specbeam.study.report import write_report

            with reporting_full_disk(folder):
                write_whole(folder / SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
                write_parquet(folder / "generations.parquet", records)
                progress.activity = "writing the report"
                page = write_report(
                    folder,
                    title=study.project_name,
                    config=config,
                    fingerprint=run.fingerprint,
                    summary=summary,
                    records=records,
                    overhead=overhead / (overhead + generating) if generating else None,
                    header=header(study, run.fingerprint, records),
                    latex_columns=study.report.latex_columns,
                )
            tracker.summary(summary, folder)
    except KeyboardInterrupt:
        raise Interrupted(folder, len(run.records), total) from None
    failed = sum(record["error"] is not None for record in records)
    show(f"{len(records)} generations, {failed} failed: {page}")
    return folder


def progress_line(progress: Progress) -> str:
    left = None if progress.seconds_left is None else f"{timedelta(seconds=round(progress.seconds_left))} left"
    return ", ".join(filter(None, [f"{progress.done} of {progress.total} generations", left, progress.activity]))


def progress_table(methods: Sequence[str], records: list[Record], caption: str) -> Any:
    """How far each method is, and how fast."""
    from rich.table import Table

    table = Table(caption=caption, box=None, pad_edge=False, caption_justify="left")
    for name in ("method", "done", "failed", "tokens/s", "steps/pass", "accepted"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for method in methods:
        done = [record for record in records if record["method"] == method]
        stats = [record["stats"] for record in done if record["error"] is None]
        seconds = sum(s["seconds"] for s in stats)
        drafted = sum(s["drafted"] for s in stats)
        steps = [s["steps_per_target_pass"] for s in stats if s["steps_per_target_pass"] is not None]
        table.add_row(
            method,
            str(len(done)),
            str(len(done) - len(stats)),
            f"{sum(s['new_tokens'] for s in stats) / seconds:.1f}" if seconds else "-",
            f"{sum(steps) / len(steps):.2f}" if steps else "-",
            f"{sum(s['accepted'] for s in stats) / drafted:.0%}" if drafted else "-",
        )
    return table


def header(study: Study, about: Mapping[str, Any], records: Sequence[Record]) -> list[tuple[str, str]]:
    """The facts at the top of a report, by name: models with their precision, machine, versions and date."""
    good = finished(records)
    precisions: dict[str, dict[str, None]] = {}
    for record in good:
        precisions.setdefault(record["stats"]["precision"], {})[record["method"]] = None
    if len(precisions) == 1:
        target = ", ".join([study.target_model, *precisions])
    else:
        each = (f"{precision} ({', '.join(names)})" for precision, names in precisions.items())
        target = ": ".join(filter(None, [study.target_model, "; ".join(each)]))
    draft_of = {method.name: method.draft for method in methods(study)}
    drafts = dict.fromkeys(
        ", ".join(filter(None, [draft, record["draft_precision"]]))
        for record in good
        if (draft := draft_of[record["method"]]) is not None
    )
    machine = about["machine"]
    has = [machine["processor"], f"{machine['cores']} cores", machine["memory"], machine.get("gpu")]
    days = sorted(time.strftime("%Y-%m-%d", time.localtime(record["started"])) for record in records)
    facts = {
        "target": target,
        "drafts": "; ".join(drafts),
        "machine": ", ".join(filter(None, has)),
        "versions": ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
        "date": " to ".join(dict.fromkeys([days[0], days[-1]])),
    }
    return [(name, fact) for name, fact in facts.items() if fact]


def summary_of(folder: Path) -> dict[str, Any]:
    """The summary of a run, which may still be going on."""
    about, records, scores = read(folder)
    if isinstance(summary := read_json(folder / SUMMARY), dict):
        return summary
    return _summarize(check(about["config"]), records, scores)


def _seconds(run: Run) -> float:
    """The seconds that the generations of a run took."""
    return sum(record["wall"] for record in run.records.values())


def _generate(
    study: Study,
    config: Mapping[str, Any],
    rows: list[Row],
    run: Run,
    work: Callable[[], Work],
    follow: Callable[[Record], None],
    progress: Progress,
) -> None:
    """Make all generations that are missing, one turn after the other: answers are part of the next turn's prompt.

    Args:
        work: returns the work of this process, whose models it loads the first time.
        follow: called with each finished generation.
    """

    def loaded() -> Work:
        progress.activity = "loading"
        loaded_work = work()
        progress.activity = ""
        return loaded_work

    def keep(job: Any, result: Any) -> None:
        if isinstance(result, Exception):  # a worker died, or could not load its models
            if isinstance(result, SpecbeamError):
                raise result
            result = new_record(job) | {"error": " ".join(str(result).split()), "wall": 0.0}
        run.records.add(result)
        follow(result)
        progress.show(len(run.records))

    with ExitStack() as last:
        crew: Crew | None = None
        for turn in range(max(len(row.turns) for row in rows)):
            jobs = jobs_of_turn(study, rows, turn, run.records)
            if study.launcher.name == "local":
                run_here(jobs, loaded, keep)
            elif jobs:
                if crew is None:
                    how = {key: value for key, value in vars(study.launcher).items() if key != "name"}
                    warn = partial(setattr, progress, "activity")
                    crew = last.enter_context(crew_on_ray(partial(Work, config), keep, warn=warn, **how))
                crew.do(jobs)


def _record(run: Run, work: Callable[[], Work], first: Sequence[str]) -> None:
    """Record the generations that the report shows, where recordings are missing.

    These are each method's generation for the first prompt, and the samples with drafts. Each runs once more for that:
    a trace costs time, and methods that are measured with one look slower than they are.

    Args:
        first: the keys for the first prompt.
    """
    drafted = [r["key"] for _, r in chosen(run.records.values()) if r["stats"]["drafted"]]
    for key in dict.fromkeys([*first, *drafted]):
        record = run.records.get(key)
        if record is None or record["error"] is not None or key in run.recordings:
            continue
        loaded = work()
        try:
            events = loaded.recording(with_messages(record, run.records))
        except Exception as error:  # the report does without it
            logger.warning("%s was not recorded: %s", key, " ".join(str(error).split()))
        else:
            run.recordings.add({"key": key, "events": events})


def with_recording(record: Record, recordings: Mapping[str, Any], first: Sequence[str]) -> Record:
    """A generation with its trace, if it was recorded, and with its recording, if it is for the first prompt."""
    events = recordings.get(record["key"])
    trace = [event for event in events if event["event"] == "round"] if events else None
    return record | {"trace": trace, "recording": events if record["key"] in first else None}


def _score(study: Study, run: Run, work: Callable[[], Work]) -> None:
    """Add perplexities, and whether programs pass their tests, where they are missing.

    Equal texts from models that were loaded in the same way are scored once.
    """
    left = [r for r in finished(run.records.values()) if r["key"] not in run.scores]
    if not (study.metrics.perplexity or any(r["problem"] for r in left)):
        return
    loads = {method.name: sorted(method.load.items()) for method in methods(study)}
    known: dict[str, dict[str, Any]] = {}
    for record in left:
        job = with_messages(record, run.records)
        # Passes over several beams may round otherwise than passes over one text, in the last bit.
        beams = record["mode"] in ("beam", "speculative-beam")
        same = json.dumps([loads[record["method"]], beams, job["messages"], record["token_ids"]])
        if same not in known:
            perplexity = {name: work().perplexity(name, job) for name in study.metrics.perplexity}
            scores: dict[str, Any] = {"perplexity": perplexity, "passed": None}
            if (problem := record["problem"]) and study.metrics.pass_at_1:
                program = completion_of(record["text"], problem["entry_point"])
                scores["passed"], scores["reason"] = passes(problem, program)
            known[same] = scores
        run.scores.add({"key": record["key"], "scores": known[same]})


def _summarize(
    study: Study,
    records: list[Record],
    scores: Mapping[str, Any],
    failed_metrics: Mapping[str, Mapping[str, str]] = {},
) -> dict[str, Any]:
    compared = methods(study)
    twins = {method.name: method.twin for method in compared if method.twin is not None}
    baseline = study.metrics.baseline or compared[0].name
    order = {method.name: i for i, method in enumerate(compared)}
    records = sorted(records, key=lambda record: order.get(record["method"], len(order)))
    return summarize(
        records,
        scores,
        baseline=baseline,
        twins=twins,
        confidence=study.metrics.confidence,
        failed_metrics=failed_metrics,
    )


def _sources(study: Study) -> dict[str, Path]:
    """The path of every model, of the base model of an adapter, and of the files of custom strategies and drafters.

    One that is not there is an error at once.
    """
    compared = methods(study)
    drafts = [method.draft for method in compared if method.draft is not None]
    plugin_names = {(method.strategy, "strategy") for method in compared if method.strategy is not None}
    plugin_names |= {(draft, "drafter") for draft in drafts if draft_kind(draft) == "custom"}
    named = {name: plugins.resolve(name, kind, from_here=True) for name, kind in sorted(plugin_names)}
    plugin_files = {name: plugins.source_file(plugin) for name, plugin in named.items()}
    draft_models = [draft for draft in drafts if draft_kind(draft) == "model"]
    judges = [name for name in study.metrics.perplexity if name != "target"]
    paths = {name: locate(name) for name in dict.fromkeys([study.target_model, *draft_models, *judges])}
    for name, path in [*paths.items()]:
        if (checkpoint := open_checkpoint(path)).adapter is not None:
            paths[f"{name} (base model)"] = checkpoint.path
    return paths | {name: file for name, file in plugin_files.items() if file is not None}
