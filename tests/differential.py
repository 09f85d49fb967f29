"""Compare two versions of specbeam: the same random cases, and each id, text and bit of a score that they return.

    python -m tests.differential record --cases 500 --seed 0 --out OLD.jsonl [--model FILE.gguf] [--seconds 170]
    python -m tests.differential compare OLD.jsonl NEW.jsonl
    python -m tests.differential fuzz --old-src PATH --cases 5000 --seed 1

``tests/cases.py`` draws the cases: tiny random models of every architecture and precision, every method, drafts,
constraints, ties, tight caches and cancels. With ``--model``, one case in twelve is for a model of real weights.

``record`` runs them on the specbeam that is imported, and writes one line each. It goes on with a file that was begun,
and ``--seconds`` ends it early with status 3. ``compare`` prints each difference in a line. Its status is 1 if there is
one. ``fuzz`` runs a copy of the source at PATH/src in a second process, beside the version that is imported. It names
the case of each difference: ``record --seed 1 --first 317 --cases 1 --out -`` runs case "1 317" alone.

Only what must not change is in a line: no times, counts of passes, or borders of streamed pieces. Bits of scores are
compared on the ``cpu`` backend. The first line of a file names what they depend on: the instruction set, PyTorch and
the weights.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
import transformers

import specbeam
from specbeam.backends.cpu.library import library
from tests.cases import Models, draw_case, draw_real_case, run_case, write_models

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ROOT.parent / "shared/data/spec_bench.jsonl"
LONGEST_PROMPT = 700
"""Characters of a prompt for the real model."""
REAL_CASE_EVERY = 12
PATIENCE = 120.0
"""Seconds after which a case counts as hung: then the stacks of all threads are printed, and the process ends."""
Line = dict[str, Any]
WITHOUT_EDITABLE = """
import runpy, sys
sys.meta_path = [one for one in sys.meta_path if not type(one).__module__.startswith("_editable")]
runpy.run_module("tests.differential", run_name="__main__")
"""
"""Runs this module without the importer of an editable install, which comes before PYTHONPATH."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="write what the imported specbeam returns")
    record.add_argument("--cases", type=int, default=500)
    record.add_argument("--seed", type=int, default=0)
    record.add_argument("--first", type=int, default=0, help="the number of the first case")
    record.add_argument("--out", required=True, help='a file, or "-" for standard output')
    record.add_argument("--model", type=Path, help="a GGUF file of real weights")
    record.add_argument("--prompts", type=Path, default=PROMPTS, help="for the model of real weights (Spec-Bench)")
    record.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    record.add_argument("--models", type=Path, help="the tiny models, written by an earlier run")
    compare = commands.add_parser("compare", help="compare two recorded files")
    compare.add_argument("old", type=Path)
    compare.add_argument("new", type=Path)
    fuzz = commands.add_parser("fuzz", help="compare another source with the imported specbeam")
    fuzz.add_argument("--old-src", type=Path, required=True, help="a checkout with a built library: its src is used")
    fuzz.add_argument("--cases", type=int, default=5000)
    fuzz.add_argument("--seed", type=int, default=1)
    fuzz.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("specbeam").addHandler(logging.NullHandler())  # else it prints the precision of each model
    return {"record": run_record, "compare": run_compare, "fuzz": run_fuzz}[given.command](given)


# Recording.


def run_record(given: argparse.Namespace) -> int:
    with tiny_models(given.models) as folder:
        head = header(folder, given)
        done: set[str] = set()
        if given.out == "-":
            return write_cases(given, folder, sys.stdout, head, done)
        if (path := Path(given.out)).exists():
            before, lines = read_file(path)
            if before != head:
                print(f"{path} was recorded otherwise: {differences_of(before, head)}", file=sys.stderr)
                return 2
            done = set(lines)
            path.write_text("".join(f"{json.dumps(line)}\n" for line in [head, *lines.values()]))  # no part of a line
        with path.open("a") as file:
            return write_cases(given, folder, file, None if done else head, done)


def write_cases(given: argparse.Namespace, folder: Path, file: IO[str], head: Line | None, done: set[str]) -> int:
    """Run the cases that are not done. Returns the exit status."""
    if head is not None:
        print(json.dumps(head), file=file, flush=True)
    seen: Counter[str] = Counter()
    begin = time.monotonic()
    models = Models(folder, given.model)
    cases = [case for case in all_cases(given) if case["seed"] not in done]
    for number, case in enumerate(cases, 1):
        if time.monotonic() - begin > given.seconds:
            print(f"{len(cases) - number + 1} cases are left: run the same command again", file=sys.stderr)
            return 3
        print(json.dumps(line_of(case, models, seen)), file=file, flush=True)
        if number % 100 == 0 or number == len(cases):
            print(f"{number} of {len(cases)} cases, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    if given.out != "-":
        report_kinds(read_file(Path(given.out))[1], seen)
    return 0


def all_cases(given: argparse.Namespace) -> Iterator[Line]:
    texts: list[str] = []
    if getattr(given, "model", None):
        rows = map(json.loads, given.prompts.read_text().splitlines())
        texts = [text for row in rows if len(text := row["turns"][0]) <= LONGEST_PROMPT]
    for index in range(given.first, given.first + given.cases):
        if texts and index % REAL_CASE_EVERY == REAL_CASE_EVERY - 1:
            yield draw_real_case(given.seed, index, texts)
        else:
            yield draw_case(given.seed, index)


def line_of(case: Line, models: Models, seen: Counter[str]) -> Line:
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    try:
        outcome = run_case(case, models, seen)
        outcome = [{"broken": True} if "broken" in one else one for one in outcome]  # times decide which have ended
    except Exception as error:  # the engine itself failed, not a request of it
        outcome = [{"error": type(error).__name__, "message": str(error), "of": "engine"}]
        seen["errors of the engine"] += 1
    finally:
        faulthandler.cancel_dump_traceback_later()
    return {"case": case, "outcome": outcome}


@contextmanager
def tiny_models(folder: Path | None) -> Iterator[Path]:
    """The folder of the tiny models, or a temporary one with them."""
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as made:
        write_models(Path(made))
        yield Path(made)


def header(folder: Path, given: argparse.Namespace) -> Line:
    """All that bits may depend on beside the code."""
    weights = hashlib.sha256()
    for path in sorted([*folder.rglob("*.safetensors"), *folder.rglob("*.gguf")]):
        weights.update(path.read_bytes())
    return {
        "isa": library().specbeam_isa(b"").decode(),
        "threads": 1,
        "torch": torch.__version__,
        "seed": given.seed,
        "tiny models": weights.hexdigest()[:16],
        "model": given.model.name if getattr(given, "model", None) else None,
    }


def report_kinds(lines: dict[str, Line], seen: Counter[str]) -> None:
    """Print how many requests of each kind there are in the file, and what happened in this run."""
    kinds: Counter[str] = Counter()
    for line in lines.values():
        case = line["case"]
        kinds[f"model {case['model'].removesuffix('.gguf')}"] += 1
        kinds[f"format {case['format'] or 'of the file'}"] += 1
        kinds["costs " + ("measured" if case["costs"] is None else "given")] += 1
        kinds["tight cache"] += case["limits"].get("max_cache_tokens") is not None
        for one in case["requests"]:
            kinds[f"method {one['kind']}"] += 1
            kinds[f"draft {(one['draft'] or 'none').split(' of ')[0]}"] += 1
            kinds[f"limit {next(iter(one.get('limit', {'none': 0})))}"] += 1
            kinds.update(f"option {name}" for name in one["options"])
            kinds.update(name for name in ("cancel", "timeout", "priority", "read") if name in one)
        for one in line["outcome"]:
            if "error" in one:
                kinds[f"outcome {one['error']}"] += 1
            kinds["outcome with texts"] += "sequences" in one
    for title, counts in (("In the file", kinds), ("Happened in this run", seen)):
        print(f"{title}: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))


# Comparing.


def read_file(path: Path) -> tuple[Line, dict[str, Line]]:
    """The first line, and the others by the seeds of their cases. A last line that was cut off is left out."""
    head, *lines = path.read_text().splitlines(keepends=True) or ["{}"]
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return json.loads(head), {line["case"]["seed"]: line for line in whole}


def run_compare(given: argparse.Namespace) -> int:
    (old_head, old), (new_head, new) = read_file(given.old), read_file(given.new)
    if old_head != new_head:
        print(f"recorded otherwise, so bits may differ: {differences_of(old_head, new_head)}")
        return 1
    both = [seed for seed in old if seed in new]
    different = [line for seed in both for line in compare_lines(old[seed], new[seed])]
    print(*different, sep="\n", end="\n" if different else "")
    wrong = {line.split(":")[0] for line in different}
    print(f"{len(both) - len(wrong)} of {len(both)} cases are equal", end="")
    missing = len(old.keys() ^ new.keys())
    print(f", and {missing} are in one file only" if missing else "")
    return int(bool(different or missing))


def compare_lines(old: Line, new: Line) -> list[str]:
    """One readable line for each request that differs."""
    case = old["case"]
    begin = f"case {case['seed']}: {case['model']} {case['format']}".rstrip()
    if case != new["case"]:
        return [f"{begin}: the cases themselves differ: tests/cases.py draws others"]
    if len(old["outcome"]) != len(new["outcome"]):
        return [f"{begin}: {len(old['outcome'])} outcomes, now {len(new['outcome'])}: {new['outcome'][-1]}"]
    lines = []
    for number, (before, now) in enumerate(zip(old["outcome"], new["outcome"], strict=True)):
        if before != now:
            one = case["requests"][number] if number < len(case["requests"]) else {}
            kind = f"{one.get('kind')}, draft {one.get('draft')}, limit {next(iter(one.get('limit', {})), None)}"
            lines.append(f"{begin}: request {number} ({kind}): {differences_of(before, now)}")
    return lines


def differences_of(old: Any, new: Any, at: str = "") -> str:
    """The first place where two values of JSON differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            if key not in old or key not in new:
                return f"{at}{key} only {'before' if key in old else 'now'}: {old.get(key, new.get(key))}"
            if old[key] != new[key]:
                return differences_of(old[key], new[key], f"{at}{key} ")
    if isinstance(old, list) and isinstance(new, list) and old and isinstance(old[0], dict):
        if len(old) != len(new):
            return f"{at}{len(old)} before, {len(new)} now"
        number = next(number for number in range(len(old)) if old[number] != new[number])
        return differences_of(old[number], new[number], f"{at}{number} ")
    return f"{at}was {_number(old)}, is {_number(new)}"


def _number(value: Any) -> Any:
    """A value, and hexadecimal numbers as decimals too."""
    if isinstance(value, str) and value.lstrip("-").startswith("0x"):
        return f"{float.fromhex(value)} ({value})"
    return value


# Fuzzing.


def run_fuzz(given: argparse.Namespace) -> int:
    """The old source writes its lines to a pipe, and this process runs the same cases beside it. Returns the status."""
    source = given.old_src.resolve() / "src"
    if not (source / "specbeam/__init__.py").is_file():
        print(f"--old-src: there is no {source}/specbeam", file=sys.stderr)
        return 2
    with tiny_models(None) as folder:
        command = [sys.executable, "-c", WITHOUT_EDITABLE, "record", "--models", str(folder), "--out", "-"]
        for name in ("cases", "seed", "first"):
            command += [f"--{name}", str(getattr(given, name))]
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        others = [path for path in paths if not (Path(path) / "specbeam").is_dir()]  # such as a sitecustomize's
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(source), *others])}
        with tempfile.TemporaryFile("w+") as errors:
            old = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
            assert old.stdout is not None
            try:
                status = compare_with(old.stdout, folder, given, str(source))
            finally:
                old.kill()
                old.wait()
            if status == 2:  # it ended early
                errors.seek(0)
                print(*errors.read().splitlines()[-20:], sep="\n", file=sys.stderr)
            return status


def compare_with(old: IO[str], folder: Path, given: argparse.Namespace, source: str) -> int:
    head = header(folder, given)
    first = json.loads(old.readline() or "{}")
    if first != head:
        print(f"the old source at {source} does not run as this one: {differences_of(first, head) if first else ''}")
        return 2
    print(f"old: {source}, new: {Path(specbeam.__file__).parent.parent}", flush=True)
    seen: Counter[str] = Counter()
    models, begin, wrong = Models(folder), time.monotonic(), 0
    for number, case in enumerate(all_cases(given), 1):
        line = json.loads(json.dumps(line_of(case, models, seen)))
        other = old.readline()
        if not other:
            print(f"case {case['seed']}: the old source ended here, by an error or after {PATIENCE:.0f} s")
            return 2
        if different := compare_lines(json.loads(other), line):
            wrong += 1
            print(*different, sep="\n", flush=True)
        if number % 250 == 0 or number == given.cases:
            print(f"{number} cases, {wrong} differ, {time.monotonic() - begin:.0f} s", flush=True)
    print("Happened: " + ", ".join(f"{name} {count}" for name, count in sorted(seen.items())))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
