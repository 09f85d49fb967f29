"""How the Ray launcher scales: jobs that wait, on 1, 2 and 4 nodes of one processor each, all on this machine.

    python bench/ray_scaling.py [--jobs 80] [--seconds 0.25] [--json FILE]

The jobs only wait, so the bench measures the launcher, not the processors. A job's way to a worker and back counts,
and so does how evenly jobs are given out. The clock starts when every worker has returned a result, and stops at the
last result.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from functools import partial

from figures import Figures, add_json_option
from machine import describe

from specbeam.jobs.launchers import run_on_ray

OBJECT_STORE_BYTES = 80 * 2**20
TARGET_SPEEDUPS = {2: 1.8, 4: 3.4}
"""By the number of workers: the least rate, in multiples of one worker's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=80)
    parser.add_argument("--seconds", type=float, default=0.25)
    add_json_option(parser)
    given = parser.parse_args()
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": OBJECT_STORE_BYTES})
    try:
        for _ in range(max(TARGET_SPEEDUPS)):
            cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
        print(describe(f"ray {ray.__version__}"))
        figures = Figures.of_this_run(f"ray {ray.__version__}")
        print(f"{given.jobs} jobs that wait {given.seconds:g} s\n")
        print("| workers | seconds | jobs/s | times one worker | target |")
        print("| --- | --- | --- | --- | --- |")
        one = 0.0
        for workers in (1, *TARGET_SPEEDUPS):
            rate = jobs_per_second(workers, given.jobs, given.seconds)
            one = one or rate
            figures.add("Ray launcher", f"{workers} workers", unit="jobs/s", samples=[rate])
            target = f"{TARGET_SPEEDUPS[workers]:g}" if workers in TARGET_SPEEDUPS else "-"
            print(f"| {workers} | {given.jobs / rate:.2f} | {rate:.2f} | {rate / one:.2f} | {target} |", flush=True)
        figures.write(given.json)
    finally:
        ray.shutdown()
        cluster.shutdown()


def jobs_per_second(workers: int, jobs: int, seconds: float) -> float:
    """The rate of finished jobs once all workers are up."""
    finished: list[float] = []
    seen: set[int] = set()
    begun = 0.0

    def done(job: int, process: int) -> None:
        nonlocal begun
        seen.add(process)
        if begun:
            finished.append(time.perf_counter())
        elif len(seen) == workers:  # the last worker's first result
            begun = time.perf_counter()

    def enough() -> Iterator[int]:
        """Jobs until enough are finished. A few more begin, and nobody waits for their results."""
        job = 0
        while len(finished) < jobs:
            yield job
            job += 1

    run_on_ray(enough(), partial(waiting, seconds), done, workers=workers)
    return jobs / (finished[jobs - 1] - begun)


def waiting(seconds: float) -> Callable[[int], int]:
    def work(job: int) -> int:
        time.sleep(seconds)
        return os.getpid()

    return work


if __name__ == "__main__":
    main()
