"""Compare the figures of two bench runs.

    python bench/compare.py OLD.json NEW.json [--tolerance 5]

Prints both values of each figure and how many times better the new one is. A figure is worse if it lost more than the
tolerance and its range does not overlap the old one. The exit status is 1 if any figure is worse.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from figures import Figure, Figures

HIGHER_IS_BETTER = {"tokens/s", "steps/pass", "tokens/pass", "times", "share", "%"}
LOWER_IS_BETTER = {"us", "s", "ms", "GB", "MB", "perplexity", "passes", "prompts", "times as long"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--tolerance", type=float, default=5, metavar="PERCENT", help="a smaller loss is noise (5)")
    given = parser.parse_args()
    try:
        old, new = Figures.read(given.old), Figures.read(given.new)
    except (OSError, ValueError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    print(f"old: {old.date}, {old.commit}, {old.machine}\nnew: {new.date}, {new.commit}, {new.machine}")
    if old.machine != new.machine:
        print("The machines or versions differ, so the ratios do too.")
    before, after = ({figure.name: figure for figure in run.figures} for run in (old, new))
    print("\n| figure | old | new | times as good | |\n| --- | --- | --- | --- | --- |")
    worse = 0
    for name, a in before.items():
        if not (b := after.get(name)):
            continue
        ratio = improvement(a, b)
        overlap = a.min <= b.max and b.min <= a.max
        verdict = "noise" if overlap or abs(ratio - 1) <= given.tolerance / 100 else "better" if ratio > 1 else "worse"
        worse += verdict == "worse"
        print(f"| {name} | {shown(a)} | {shown(b)} | {ratio:.3f} | {verdict} |")
    for title, names in (("old", before.keys() - after.keys()), ("new", after.keys() - before.keys())):
        if names:
            print(f"\n{len(names)} figures are in the {title} run only, such as {min(names)}")
    return int(worse > 0)


def improvement(old: Figure, new: Figure) -> float:
    """How many times better the new value is: above 1 is better, whichever way the unit counts."""
    if old.unit != new.unit or old.unit not in HIGHER_IS_BETTER | LOWER_IS_BETTER:
        raise SystemExit(f"compare: {old.name} has the units {old.unit!r} and {new.unit!r}: cannot compare them")
    better, base = (new, old) if old.unit in HIGHER_IS_BETTER else (old, new)
    return better.value / base.value if base.value else 1.0 if better.value == 0 else float("inf")


def shown(figure: Figure) -> str:
    return f"{figure.value:.4g} ({figure.min:.4g} to {figure.max:.4g}) {figure.unit}"


if __name__ == "__main__":
    sys.exit(main())
