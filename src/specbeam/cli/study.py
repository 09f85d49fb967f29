"""``specbeam study``: decoding methods compared on real data. ``show`` and ``diff`` print the results of runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from specbeam.errors import SpecbeamError

EPILOG = """examples:
  specbeam study 'prompts=["Why is the sky blue?"]'
  specbeam study data=spec_bench data.source=spec_bench.jsonl data.per_category=2 decode.max_tokens=64
  specbeam study ablation=k data.source=questions.jsonl
  specbeam study --multirun decode.num_beams=2,4,8 data.source=questions.jsonl
  specbeam study show runs/specbeam-study
  specbeam study diff runs/before runs/after
"""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "study",
        help="compare decoding methods over prompts and data sets",
        description="Run a study and write its table, plots and report. The same command resumes a study that was "
        "killed. The keys are in specbeam/study/conf/study.yaml, in Hydra's grammar; data, tracking, launcher and "
        "ablation name groups there. show RUN and diff RUN_A RUN_B print the results of runs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="or: show RUN, diff RUN_A RUN_B")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="a folder with your own config.yaml and groups")
    parser.add_argument(
        "--multirun", "-m", action="store_true", help="KEY=A,B makes one run for each value, each in its own folder"
    )
    parser.add_argument("--show-config", action="store_true", help="print the configuration and exit")
    parser.add_argument("--json", action="store_true", help="with show and diff: print one JSON object")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    try:
        import hydra  # noqa: F401
        import pandas  # noqa: F401
    except ImportError as error:
        raise SpecbeamError(f"the study bench needs {error.name}: pip install specbeam[study]") from error
    match given.words:
        case ["show", folder]:
            return show(Path(folder), given.json)
        case ["diff", before, after]:
            return compare(Path(before), Path(after), given.json)
        case ["show" | "diff", *_]:
            raise SpecbeamError("give show RUN, or diff RUN_A RUN_B")
    for word in given.words:
        if "=" not in word and not word.startswith("~"):
            raise SpecbeamError(
                f"{word!r} is no KEY=VALUE: give decode.max_tokens=64 or so, show RUN, or diff RUN_A RUN_B"
            )
    from specbeam.study.config import check, compose, sweep

    combinations = [*sweep(given.words)] if given.multirun else [given.words]
    configs = [dict(compose(overrides, given.config_dir)) for overrides in combinations]
    if given.multirun:
        for config, overrides in zip(configs, combinations, strict=True):
            swept = [o for o in overrides if o not in given.words]
            config["output"] = str(Path(config["output"]) / (",".join(swept).replace("/", "_") or "0"))
    for config in configs:
        check(config)  # every one, before the first runs
    for config in configs:
        if given.show_config:
            import yaml

            print(yaml.safe_dump(json.loads(json.dumps(config)), sort_keys=False, allow_unicode=True), end="")
            continue
        from specbeam.study.run import run_study

        print_table(run_study(config))
    return 0


def show(folder: Path, as_json: bool) -> int:
    """Print the results of a run, also while it runs."""
    from specbeam.study.results import SUMMARY, read, read_json

    _, records, scores = read(folder)
    if (summary := read_json(folder / SUMMARY)) is None:
        from specbeam.study.summary import summarize

        summary = summarize(records, scores)
    if as_json:
        print(json.dumps(summary, ensure_ascii=False))
    else:
        print_table(folder, summary)
    return 0


def print_table(folder: Path, summary: Any = None) -> None:
    """Print one line per method."""
    from rich.console import Console
    from rich.table import Table

    from specbeam.study.results import SUMMARY, read_json

    summary = summary or read_json(folder / SUMMARY)
    table = Table(box=None, pad_edge=False)
    names = {
        "tokens_per_second": ("tokens/s", "{:.1f}"),
        "time_to_first_token": ("first, s", "{:.2f}"),
        "target_passes": ("passes", "{:.0f}"),
        "steps_per_target_pass": ("steps/pass", "{:.2f}"),
        "acceptance_rate": ("accepted", "{:.0%}"),
        "perplexity": ("perplexity", "{:.2f}"),
        "rougeL": ("ROUGE-L", "{:.3f}"),
    }
    there = [name for name in names if any(name in method["metrics"] for method in summary["methods"])]
    table.add_column("method")
    tested = any(method["pass_at_1"] is not None for method in summary["methods"])
    for name in [*(names[n][0] for n in there), *["pass@1"] * tested, "speed-up", "same text", "failed"]:
        table.add_column(name, justify="right")
    for method in summary["methods"]:
        cells = []
        for name in there:
            estimate = method["metrics"].get(name)
            form = names[name][1]
            cells.append("-" if estimate is None else form.format(estimate["mean"]))
            if estimate is not None and name == "tokens_per_second":
                cells[-1] += f" ({form.format(estimate['low'])} to {form.format(estimate['high'])})"
        if tested:
            cells.append("-" if method["pass_at_1"] is None else f"{method['pass_at_1']:.2f}")
        against, same = (method["against"] or {}).get("tokens_per_second"), method["agreement"]
        cells.append(f"{against['ratio']:.2f} ({against['low']:.2f} to {against['high']:.2f})" if against else "-")
        cells.append(f"{same['same']} of {same['of']}" if same else "-")
        table.add_row(method["method"], *cells, str(method["failed"]))
    Console(width=None if Console().is_terminal else 200, highlight=False).print(table)


def compare(before: Path, after: Path, as_json: bool) -> int:
    """Print how a run differs from an earlier one. Returns 1 if a method became significantly slower, else 0."""
    from specbeam.study.results import read
    from specbeam.study.summary import diff

    (_, a, _), (_, b, _) = read(before), read(after)
    found = diff(a, b)
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        for method in found["methods"]:
            if (r := method["relative"]) is None:
                print(f"{method['method']:24} has no text in common")
                continue
            mark = "" if not method["significant"] else "  SLOWER" if r["ratio"] < 1 else "  FASTER"
            interval = f"{r['low']:.3f} to {r['high']:.3f}, p {method['p']:.3g}"
            same = f"same text {method['identical']['same']} of {method['identical']['of']}"
            faster = f"{r['ratio']:.3f} times as fast ({interval}), raw {method['raw']['ratio']:.3f}"
            print(f"{method['method']:24} {faster}, {same}{mark}")
        for side in ("a", "b"):
            if found[f"only_in_{side}"]:
                print(f"only in {before if side == 'a' else after}: {', '.join(found[f'only_in_{side}'])}")
        if found.get("note"):
            print(found["note"])
    return int(any(method["significant"] and method["relative"]["ratio"] < 1 for method in found["methods"]))
