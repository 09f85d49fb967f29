"""How jobs are run: here, one after the other, or by workers on a Ray cluster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from specbeam.errors import not_allowed
from specbeam.jobs import Job, MakeWork, OnResult, Work
from specbeam.jobs.cluster import joined_cluster
from specbeam.jobs.crew import Crew

logger = logging.getLogger("specbeam")


def run_here(jobs: Iterable[Job], make_work: MakeWork, on_result: OnResult) -> None:
    """Do jobs in this process, one after the other.

    Args:
        jobs: taken one at a time.
        make_work: called once, before the first job. Its exceptions are not caught.
        on_result: called with each job and its result, or the exception that the work raised.
    """
    work: Work | None = None
    for job in jobs:
        work = work or make_work()
        try:
            result = work(job)
        except Exception as error:
            result = error
        on_result(job, result)


def run_on_ray(jobs: Iterable[Job], make_work: MakeWork, on_result: OnResult, **cluster: Any) -> None:
    """Do jobs on a Ray cluster, with workers for these jobs alone.

    Args:
        jobs: taken as workers come free, never more than a few ahead.
        make_work, on_result, cluster: as for :func:`crew_on_ray`.
    """
    with crew_on_ray(make_work, on_result, **cluster) as crew:
        crew.do(jobs)


@contextmanager
def crew_on_ray(
    make_work: MakeWork,
    on_result: OnResult,
    *,
    address: str | None = None,
    workers: int | None = None,
    cpus: float = 1,
    gpus: float = 0,
    retries: int = 3,
    warn: Callable[[str], object] = logger.warning,
) -> Iterator[Crew]:
    """Workers on a Ray cluster that each load their models once, and whose ``do(jobs)`` does jobs.

    When a worker dies, others do the jobs that it had not finished, and a new worker takes its place where the cluster
    has room. Each job is reported once. When the context ends, no worker is left.

    Args:
        make_work: called once in each worker. It travels there pickled. Where a worker runs, specbeam and the module
            of ``make_work`` must be installed.
        on_result: called in this thread with each job and its result. That is the value that the work returned, the
            exception that it raised, or a :class:`specbeam.jobs.WorkerDied`.
        address: the cluster: "auto", "host:port" or "ray://host:port". None starts one on this machine, and stops it
            afterwards. If Ray is already initialized in this process, its cluster is used.
        workers: the most workers; None: as many as the cluster has room for.
        cpus: CPUs per worker, and so its threads.
        gpus: GPUs per worker. A number below 1 shares one.
        retries: how many workers may die of a job, while it is their only one, before it is given up.
        warn: called with one line when workers die or cannot start.

    Raises:
        SpecbeamError: Ray is not installed, no cluster answers, it has no room for a worker, or workers die while they
            load their models. Exceptions of ``make_work`` in a worker are raised by ``do``.
    """
    if workers is not None and workers < 1:
        raise not_allowed("workers", workers, "at least 1")
    for name, amount in {"cpus": cpus, "gpus": gpus}.items():
        if not 0 <= amount < float("inf") or (amount > 1 and amount != int(amount)):  # Ray's own rule
            raise not_allowed(name, amount, "0 to 1, or a whole number")
    if retries < 1:
        raise not_allowed("retries", retries, "at least 1")
    with (
        joined_cluster(address) as ray,
        closing(Crew(ray, make_work, on_result, workers, float(cpus), float(gpus), retries, warn)) as crew,
    ):
        yield crew
