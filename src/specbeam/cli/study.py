"""``specbeam study``: decoding methods compared on real data. ``show`` and ``diff`` print the results of runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from specbeam.errors import SpecbeamError
from specbeam.text.escapes import hint_for_prompt

EPILOG = """examples:
  specbeam study 'prompts=["Why is the sky blue?"]'
  specbeam study data=spec_bench data.source=spec_bench.jsonl data.per_category=2 decode.max_new_tokens=64
  specbeam study ablation=num_draft_tokens data.source=questions.jsonl
  specbeam study --config-dir my-study
  specbeam study --multirun decode.num_beams=2,4,8 data.source=questions.jsonl
  specbeam study show
  specbeam study diff runs/before runs/after
"""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "study",
        help="compare decoding methods over prompts and data sets",
        description="Run a study and write its table, plots and report. Every configuration has a folder of its own "
        "below runs/, so the same command resumes a study that was killed. The keys are in "
        "specbeam/study/conf/study.yaml, in Hydra's grammar; data, tracking, launcher and ablation name groups there. "
        "show RUN and diff RUN_A RUN_B print the results of runs; show alone takes the latest run.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="or: show [RUN], diff RUN_A RUN_B")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="a folder with your own config.yaml and groups")
    parser.add_argument(
        "--multirun", "-m", action="store_true", help="KEY=A,B makes one run for each value, each in its own folder"
    )
    parser.add_argument("--show-config", action="store_true", help="print the configuration and exit")
    parser.add_argument("--json", action="store_true", help="with show and diff: print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        import hydra  # noqa: F401
        import pandas  # noqa: F401
    except ImportError as error:
        raise SpecbeamError(f"the study bench needs {error.name}: pip install 'specbeam[study]'") from error
    match args.words:
        case ["show"]:
            from specbeam.study.results import latest_run

            return show(latest_run(), args.json)
        case ["show", folder]:
            return show(Path(os.path.expanduser(folder)), args.json)
        case ["diff", before, after]:
            return compare(Path(os.path.expanduser(before)), Path(os.path.expanduser(after)), args.json)
        case ["show" | "diff", *_]:
            raise SpecbeamError("give show, show RUN, or diff RUN_A RUN_B")
    for word in args.words:
        if "=" not in word and not word.startswith("~"):
            raise SpecbeamError(
                f"{word!r} is no KEY=VALUE: give decode.max_new_tokens=64 or so, show RUN, or diff RUN_A RUN_B"
            )
        if word.partition("=")[0].strip("+") == "prompts" and (hint := hint_for_prompt(word)):
            print(f"specbeam: {hint}", file=sys.stderr)
    from specbeam.study.composition import as_yaml, compose, sweep
    from specbeam.study.config import check
    from specbeam.study.results import file_name

    combinations = sweep(args.words) if args.multirun else [(args.words, "")]
    configs = [(compose(words, args.config_dir), swept) for words, swept in combinations]
    for config, swept in configs:
        if args.multirun and config["output"] is not None:
            config["output"] = str(Path(config["output"]) / (file_name(swept) or "0"))
    if args.show_config:
        for config, _ in configs:  # also one that the check refuses: it tells the keys
            print(as_yaml(config, explicit_start=args.multirun), end="")
    for config, _ in configs:
        check(config)  # every one, before the first runs
    if args.show_config:
        return 0
    from specbeam.study.run import Interrupted, run_study

    for config, swept in configs:
        try:
            print_table(run_study(config, partial(print, flush=True), swept))
        except Interrupted as stopped:
            if stopped.done:
                print_table(stopped.folder)
            kept = f"{stopped.done} of {stopped.total} generations are kept in {stopped.folder}"
            raise KeyboardInterrupt(f"{kept}; give the same command to go on") from None
    return 0


def show(folder: Path, as_json: bool) -> int:
    """Print the results of a run, also while it runs."""
    from specbeam.study.run import summary_of

    if as_json:
        print(json.dumps({"run": str(folder)} | summary_of(folder), ensure_ascii=False))
    else:
        print(f"{folder}:")
        print_table(folder)
    return 0


COLUMNS = {
    "tokens_per_second": ("tokens/s", "{:.1f}"),
    "time_to_first_token": ("first, s", "{:.2f}"),
    "target_passes": ("passes", "{:.0f}"),
    "steps_per_target_pass": ("steps/pass", "{:.2f}"),
    "acceptance_rate": ("accepted", "{:.0%}"),
    "evaluated_beams": ("beams evaluated", "{:.0%}"),
    "rougeL": ("ROUGE-L", "{:.3f}"),
    "perplexity": ("perplexity", "{:.2f}"),
}
"""The columns of the table, before custom metrics: a heading by metric, and how its figures are written."""


def print_table(folder: Path) -> None:
    """Print one line per method. A first line says if the measurements spread more than the methods differ."""
    from rich.console import Console
    from rich.table import Table

    from specbeam.study.report import failed_metrics, spread
    from specbeam.study.run import summary_of
    from specbeam.study.statistics import MIN_VALUES_FOR_INTERVAL, settled, too_few
    from specbeam.study.tables import custom_columns, measured

    summary = summary_of(folder)
    methods = summary["methods"]
    for sentence in [*spread(summary["fastest"] or {"unsettled": []}), *failed_metrics(summary)]:
        print(sentence.striptags())
    table = Table(box=None, pad_edge=False)
    columns = COLUMNS | {name: (heading, "{:.3g}") for name, heading, _ in custom_columns(measured(methods))}
    names = [name for name in columns if any(name in method["metrics"] for method in methods)]
    tested = any(method["pass_at_1"] is not None for method in methods)
    table.add_column("method")
    headings = ["n", *(columns[name][0] for name in names), *["pass@1"] * tested, "speed-up", "same text", "failed"]
    for heading in headings:
        table.add_column(heading, justify="right")
    counts = []
    for method in methods:
        estimates = [method["metrics"].get(name) for name in names]
        counts.append(n := max((estimate["n"] for estimate in estimates if estimate), default=0))
        cells = [str(n)]
        for name, estimate in zip(names, estimates, strict=True):
            with_interval = name == "tokens_per_second"
            cells.append(figure(estimate, "mean", columns[name][1], n, with_interval) if estimate else "-")
        if tested:
            cells.append("-" if method["pass_at_1"] is None else f"{method['pass_at_1']:.2f}")
        against, same = (method["against"] or {}).get("tokens_per_second"), method["agreement"]
        unsettled = "" if against is None or settled(against) else ", not settled"
        cells.append(figure(against, "ratio", "{:.2f}", n) + unsettled if against else "-")
        cells.append(f"{same['same']} of {same['of']}" if same else "-")
        table.add_row(method["method"], *cells, str(method["failed"]))
    Console(width=None if Console().is_terminal else 200, highlight=False).print(table)
    if few := sorted({n for n in counts if 0 < n < MIN_VALUES_FOR_INTERVAL}):
        print("; ".join(map(too_few, few)))


def figure(estimate: Mapping[str, Any], name: str, form: str, n: int, with_interval: bool = True) -> str:
    """A figure, its interval, and the number of its values where it is not the row's n."""
    ends = [estimate["low"], estimate["high"]] if with_interval and estimate["low"] is not None else []
    beside = [" to ".join(map(form.format, ends))] if ends else []
    beside += [f"n={estimate['n']}"] if estimate["n"] != n else []
    return form.format(estimate[name]) + (f" ({', '.join(beside)})" if beside else "")


def compare(before: Path, after: Path, as_json: bool) -> int:
    """Print how a run differs from an earlier one. Returns 1 if a method became significantly slower, else 0."""
    from specbeam.study.results import read
    from specbeam.study.statistics import settled, too_few
    from specbeam.study.summary import diff

    (_, a, _), (_, b, _) = read(before), read(after)
    differences = diff(a, b)
    if as_json:
        print(json.dumps(differences, ensure_ascii=False))
    else:
        for method in differences["methods"]:
            if (r := method["relative"]) is None:
                print(f"{method['method']:24} has no text in common")
                continue
            mark = "  not settled" if not settled(r) else ""
            if method["significant"]:
                mark = "  SLOWER" if r["ratio"] < 1 else "  FASTER"
            if r["low"] is None:
                interval = too_few(r["n"])
            else:
                interval = f"{r['low']:.3f} to {r['high']:.3f}, n={r['n']}, p {method['p']:.3g}"
            same = f"same text {method['identical']['same']} of {method['identical']['of']}"
            faster = f"{r['ratio']:.3f} times as fast ({interval}), raw {method['raw']['ratio']:.3f}"
            print(f"{method['method']:24} {faster}, {same}{mark}")
        for folder, names in ((before, differences["only_in_a"]), (after, differences["only_in_b"])):
            if names:
                print(f"only in {folder}: {', '.join(names)}")
        if differences["note"]:
            print(differences["note"])
    return int(any(method["significant"] and method["relative"]["ratio"] < 1 for method in differences["methods"]))
