"""Workers on a Ray cluster: hired while there are jobs, given jobs, and replaced when they die."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from specbeam.errors import SpecbeamError
from specbeam.jobs import Job, MakeWork, OnResult, WorkerDied
from specbeam.jobs.cluster import capacity_on, nodes_of, reason_of

JOBS_PER_WORKER = 2
"""Jobs that a worker has at a time: the one it works on, and the next, so that it need not wait for it."""
ROOM_TIMEOUT_SECONDS = 60.0
"""How long to wait for room for a first worker, when others fill the cluster."""


class _Worker:
    """The actor in a worker's process. Results travel pickled: one that cannot be pickled fails its job alone."""

    def __init__(self, make_work: MakeWork, cpus: float) -> None:
        if cpus >= 1:
            os.environ.setdefault("SPECBEAM_THREADS", str(int(cpus)))  # other workers use the other CPUs
        self.make_work = make_work

    def started(self) -> None:
        """Answer once the process runs."""

    def load(self) -> bytes:
        """Make the work. Returns None or the exception that it raised."""
        try:
            self.work = self.make_work()
        except (Exception, SystemExit) as error:
            return _pickled_error(error)
        return _pickled(None)

    def do(self, job: Job) -> bytes:
        try:
            return _pickled(self.work(job))
        except (Exception, SystemExit) as error:
            return _pickled_error(error)


def _pickled(value: Any) -> bytes:
    from ray import cloudpickle

    data: bytes = cloudpickle.dumps(value)
    return data


def _pickled_error(error: BaseException) -> bytes:
    from ray import cloudpickle

    try:
        data = _pickled(error)
        cloudpickle.loads(data)  # some exceptions can be pickled but not restored
    except Exception:
        data = b""
    if not data or not isinstance(error, Exception):  # sys.exit() in a worker must not end this process
        data = _pickled(RuntimeError(f"{type(error).__name__}: {error}"))
    return data


@dataclass
class _Task:
    """A job to do.

    Attributes:
        deaths: workers that died of it, one after the other.
        alone: a worker died that had this job and another. Its next worker gets no other job, so that a death shows
            which job causes it.
    """

    job: Job
    deaths: int = 0
    alone: bool = False


@dataclass(eq=False)
class _Member:
    """A worker, as this process sees it.

    Attributes:
        actor: Ray's handle.
        started: a reference that is ready once the process runs; None once that is known.
        loaded: a reference that is ready once its models are loaded; None once that is known.
        tasks: the jobs that it has to do, by reference, first to last.
    """

    actor: Any
    started: Any
    loaded: Any
    tasks: dict[Any, _Task] = field(default_factory=dict)

    @property
    def references(self) -> list[Any]:
        """The answers that are still to come, in that order."""
        return [reference for reference in (self.started, self.loaded, *self.tasks) if reference is not None]


class Crew:
    """The workers and their jobs; :func:`specbeam.jobs.launchers.crew_on_ray` makes one."""

    def __init__(
        self,
        ray: Any,
        make_work: MakeWork,
        on_result: OnResult,
        workers: int | None,
        cpus: float,
        gpus: float,
        retries: int,
        warn: Callable[[str], object],
    ) -> None:
        self.ray, self.on_result, self.retries, self.warn = ray, on_result, retries, warn
        self.workers, self.cpus, self.gpus = workers, cpus, gpus
        # max_restarts=0: a restarted worker would not have loaded its models, so a new one is hired instead.
        actor = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_task_retries=0)(_Worker)
        self.make_worker: Callable[[], Any] = lambda: actor.remote(make_work, cpus)
        self.members: list[_Member] = []
        self.waiting: deque[_Task] = deque()
        self.failed_loads = 0  # workers that died while loading, one after the other
        self.last_death = ""
        self.capacity = 0  # workers that the cluster has room for, if nobody else used it
        self.capacity_counted_at = -1.0
        self.last_seen_at: float | None = None  # when a worker last ran
        self.began_at = time.monotonic()

    def do(self, jobs: Iterable[Job]) -> None:
        """Do jobs. They are taken as workers come free, never more than a few ahead."""
        self.fresh = map(_Task, jobs)
        for member in self.members:  # a worker that has died since the last jobs died of none of these
            member.started = member.actor.started.remote()
        while self.waiting or any(member.tasks for member in self.members) or self._take():
            self._count_capacity()
            self._hire()
            self._hand_out()
            self._check_timeout()
            references = [reference for member in self.members for reference in member.references]
            # At most one second: then new room is seen, and Ctrl-C where signals do not interrupt the wait.
            if references:
                self.ray.wait(references, timeout=1.0)
            else:
                time.sleep(1.0)
            for member in [*self.members]:
                self._receive(member)

    def close(self) -> None:
        """End all workers."""
        for member in self.members:
            self._dismiss(member)
        self.members = []

    def _take(self) -> bool:
        """Take one more job. Returns whether there was one."""
        task = next(self.fresh, None)
        if task is not None:
            self.waiting.append(task)
        return task is not None

    def _count_capacity(self) -> None:
        """Count the workers that the cluster has room for, once per second: nodes come and go."""
        now = time.monotonic()
        if now - self.capacity_counted_at < 1:
            return
        nodes = nodes_of(self.ray)
        capacity = sum(capacity_on(nodes, self.cpus, self.gpus))
        amounts = {f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes}
        self.resources = ", ".join(sorted(amounts, reverse=True)) or "nothing"
        if self.capacity_counted_at < 0 and self.workers and 0 < capacity < self.workers:
            self.warn(f"the Ray cluster has room for {capacity} of {self.workers} workers")
        self.capacity_counted_at, self.capacity = now, capacity

    def _hire(self) -> None:
        """Ask for as many workers as are wanted and have jobs. Ray starts them when it has room for them."""
        wanted = self.workers or self.capacity
        while len(self.members) < wanted and self.failed_loads < self.retries:
            free = sum(member.loaded is not None or not member.tasks for member in self.members)
            if len(self.waiting) <= free and not self._take():
                return
            actor = self.make_worker()
            self.members.append(_Member(actor, actor.started.remote(), actor.load.remote()))

    def _hand_out(self) -> None:
        """Give jobs to the workers that have the fewest."""
        for load in range(JOBS_PER_WORKER):
            for member in self.members:
                if member.started is not None or member.loaded is not None or len(member.tasks) != load:
                    continue
                if not self.waiting and not self._take():
                    return
                if load and (self.waiting[0].alone or any(task.alone for task in member.tasks.values())):
                    continue
                task = self.waiting.popleft()
                member.tasks[member.actor.do.remote(task.job)] = task

    def _check_timeout(self) -> None:
        """Raise SpecbeamError if no worker starts, or if workers in a row died while they loaded."""
        now = time.monotonic()
        if any(member.started is None for member in self.members):
            self.last_seen_at = now
            return
        if not self.members and self.failed_loads >= self.retries:
            raise SpecbeamError(
                f"{self.failed_loads} workers in a row died while they loaded the models ({self.last_death}): do they "
                "fit into memory?"
            )
        waited = now - (self.last_seen_at or self.began_at)
        never_had_capacity = not self.capacity and self.last_seen_at is None  # a node that was lost may be replaced
        if waited > ROOM_TIMEOUT_SECONDS or never_had_capacity:
            used = ", and others use them" if self.capacity else ""
            raise SpecbeamError(
                f"the Ray cluster has no room for a worker with {self.cpus:g} CPUs and {self.gpus:g} GPUs (its nodes "
                f"have {self.resources}{used}): ask for less per worker"
            )

    def _receive(self, member: _Member) -> None:
        """Take the answers of a worker that are ready."""
        references = member.references
        ready = {*self.ray.wait(references, num_returns=len(references), timeout=0)[0]} if references else ()
        for reference in references:
            if reference not in ready:
                continue
            try:
                data = self.ray.get(reference)
            except self.ray.exceptions.RayError as error:
                self._bury(member, error)
                return
            if reference is member.started:
                member.started = None
                continue
            try:
                result = self.ray.cloudpickle.loads(data)
            except Exception as error:  # its class is not known here
                result = error
            if reference is member.loaded:
                if result is not None:
                    raise result
                member.loaded, self.failed_loads = None, 0
            else:
                self.on_result(member.tasks.pop(reference).job, result)

    def _bury(self, member: _Member, error: Exception) -> None:
        """Give the unfinished jobs of a dead worker to others."""
        self.members.remove(member)
        self._dismiss(member)  # it may only be out of reach
        self.last_death = reason_of(error)
        tasks = [*member.tasks.values()]
        self.failed_loads += member.loaded is not None
        given_up = None
        if len(tasks) == 1:
            tasks[0].deaths += 1
            if tasks[0].deaths >= self.retries:
                given_up = tasks.pop()
        for task in tasks:
            task.alone = True
        self.waiting.extendleft(reversed(tasks))
        moved = f"; given to others: {len(tasks)} of its jobs" if tasks else ""
        self.warn(f"a worker died: {self.last_death}{moved}")
        if given_up is not None:
            died = WorkerDied(f"{given_up.deaths} workers in a row died of it: {self.last_death}")
            self.on_result(given_up.job, died)

    def _dismiss(self, member: _Member) -> None:
        with suppress(Exception):  # the worker or the cluster is gone
            self.ray.kill(member.actor)
