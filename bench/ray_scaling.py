"""How the Ray launcher scales: jobs that wait, on 1, 2 and 4 nodes of one processor each, all on this machine.

    python bench/ray_scaling.py [--jobs 80] [--seconds 0.25]

The work only waits, so what is measured is what the launcher adds, not the machine's processors: a job's way to a
worker and back, and how evenly jobs are given out. The workers are up when the clock starts: it runs from the first
result that each of them gave to the last.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from functools import partial

from machine import describe

from specbeam.study.launchers import on_ray

MEMORY = 80 * 2**20
TARGETS = {2: 1.8, 4: 3.4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=80)
    parser.add_argument("--seconds", type=float, default=0.25)
    given = parser.parse_args()
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": MEMORY})
    try:
        for _ in range(max(TARGETS)):
            cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
        print(describe(f"ray {ray.__version__}"))
        print(f"{given.jobs} jobs that wait {given.seconds:g} s\n")
        print("| workers | seconds | jobs/s | times one worker | target |")
        print("| --- | --- | --- | --- | --- |")
        one = 0.0
        for workers in (1, *TARGETS):
            rate = jobs_per_second(workers, given.jobs, given.seconds)
            one = one or rate
            target = f"{TARGETS[workers]:g}" if workers in TARGETS else "-"
            print(f"| {workers} | {given.jobs / rate:.2f} | {rate:.2f} | {rate / one:.2f} | {target} |", flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


def jobs_per_second(workers: int, jobs: int, seconds: float) -> float:
    """The rate of jobs once all workers are up."""
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
        """Jobs until so many are finished that count; a few more are begun and their results are not waited for."""
        job = 0
        while len(finished) < jobs:
            yield job
            job += 1

    on_ray(enough(), partial(waiting, seconds), done, workers=workers)
    return jobs / (finished[jobs - 1] - begun)


def waiting(seconds: float) -> Callable[[int], int]:
    def work(job: int) -> int:
        time.sleep(seconds)
        return os.getpid()

    return work


if __name__ == "__main__":
    main()
