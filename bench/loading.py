"""From a fresh process to the first token: seconds, and the peak memory, against the size of the weights.

    python bench/loading.py MODEL [MODEL ...] [--dtype float32] [--repeats 3] [--json FILE]

Each run is a process of its own, so that imports count. The allowance is 1.15 x the weights in their dtype + 0.5 GB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from figures import Figures, add_json_option
from machine import describe

CHILD = """
import json, sys, specbeam
lm = specbeam.load(sys.argv[1], dtype=sys.argv[2])
weights = sum(p.numel() * p.element_size() for p in lm.backend.model.parameters())
stream = specbeam.stream(lm, "Why is the sky blue?", max_new_tokens=2)
next(stream)
print(json.dumps({"weights": weights, "peak": lm.backend.peak_memory()}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    add_json_option(parser)
    given = parser.parse_args()
    print(describe())
    figures = Figures.of_this_run()
    print(f"{given.dtype}\n")
    print("| model | seconds to the first token | peak memory, GB | allowed, GB |")
    print("| --- | --- | --- | --- |")
    for model in given.models:
        seconds, peaks = [], []
        for _ in range(given.repeats):
            start = time.perf_counter()
            out = subprocess.run(
                [sys.executable, "-c", CHILD, model, given.dtype], check=True, capture_output=True, text=True
            )
            seconds.append(time.perf_counter() - start)
            found = json.loads(out.stdout)
            peaks.append(found["peak"] / 1e9)
        name = Path(model).stem
        time_taken = figures.add(name, f"first token, {given.dtype}", unit="s", samples=seconds)
        peak = figures.add(name, f"peak memory, {given.dtype}", unit="GB", samples=peaks)
        allowed = 1.15 * found["weights"] / 1e9 + 0.5
        print(
            f"| {name} | {time_taken.value:.1f} ({time_taken.min:.1f} to {time_taken.max:.1f}) | {peak.value:.2f} "
            f"| {allowed:.2f} |",
            flush=True,
        )
        figures.write(given.json)


if __name__ == "__main__":
    main()
