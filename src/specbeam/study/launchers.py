"""How jobs are run: here, one after the other, or by workers on a Ray cluster.

A worker is made once and keeps what it loaded; then it does one job after the other. Whoever launches the jobs takes
the results, in the thread it called from and in the order they come.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from specbeam.errors import SpecbeamError

logger = logging.getLogger("specbeam")

Job = Any
"""Something that can be pickled."""
Result = Any
"""What the work returned, or the exception that it raised."""
Work = Callable[[Job], Result]
"""What a worker does; it keeps its models loaded between jobs."""

IN_FLIGHT = 2
"""Jobs a worker has at a time: the one it works on, and one so that it need not wait for the next."""
PATIENCE = 60.0
"""Seconds to wait for room for a first worker, when others fill the cluster."""
REACH = 10.0
"""Seconds to wait for a cluster to answer."""
OBJECT_STORE = 256 * 2**20
"""Bytes of shared memory for a cluster of our own: jobs and results are small, and what is too much goes to disk."""


class WorkerDied(RuntimeError):
    """A job ended the process of every worker that tried it."""


def local(jobs: Iterable[Job], make_work: Callable[[], Work], done: Callable[[Job, Result], None]) -> None:
    """Do jobs in this process, one after the other.

    Args:
        jobs: taken one at a time.
        make_work: called once, before the first job; what it raises is raised.
        done: called with each job and its result, or the exception that the work raised.
    """
    work: Work | None = None
    for job in jobs:
        work = work or make_work()
        try:
            result = work(job)
        except Exception as error:
            result = error
        done(job, result)


def on_ray(jobs: Iterable[Job], make_work: Callable[[], Work], done: Callable[[Job, Result], None], **how: Any) -> None:
    """Do jobs on a Ray cluster: what :func:`crew_on_ray` does, with its arguments, for these jobs alone.

    Args:
        jobs: taken as workers come free, never more than a few ahead.
    """
    with crew_on_ray(make_work, done, **how) as crew:
        crew.do(jobs)


@contextmanager
def crew_on_ray(
    make_work: Callable[[], Work],
    done: Callable[[Job, Result], None],
    *,
    address: str | None = None,
    workers: int | None = None,
    cpus: float = 1,
    gpus: float = 0,
    retries: int = 3,
    tell: Callable[[str], object] = logger.warning,
) -> Iterator[Crew]:
    """Workers on a Ray cluster that each load their models once, and whose ``do(jobs)`` does jobs.

    A worker that dies costs the jobs it had not finished: others do them, and a new worker takes its place where the
    cluster has room. Each job is reported once. When the context ends, no worker is left.

    Args:
        make_work: called once in each worker. It goes there pickled, and where a worker runs, specbeam and the module
            it comes from must be installed.
        done: called in this thread with each job and its result, or the exception that the work raised, or a
            :class:`WorkerDied`.
        address: the cluster: "auto", "host:port" or "ray://host:port". None starts one on this machine, for as long as
            it is needed. If Ray is already initialized in this process, its cluster is used.
        workers: at most so many; None is as many as the cluster has room for.
        cpus: processors a worker is given, and so its threads.
        gpus: GPUs a worker is given; less than 1 shares one.
        retries: a job that so many workers died of, when they had no other, is not tried again.
        tell: called with a line when workers die or do not come.

    Raises:
        SpecbeamError: Ray is not installed, no cluster answers, it has no room for a worker, or workers die while they
            load. What make_work raises in a worker is raised by ``do``.
    """
    if workers is not None and workers < 1:
        raise SpecbeamError(f"workers={workers} is not allowed: give at least 1")
    for name, amount in {"cpus": cpus, "gpus": gpus}.items():
        if not 0 <= amount < float("inf") or (amount > 1 and amount != int(amount)):  # Ray's own rule
            raise SpecbeamError(f"{name}={amount} is not allowed: give 0 to 1, or a whole number")
    if retries < 1:
        raise SpecbeamError(f"retries={retries} is not allowed: give at least 1")
    with (
        _cluster(address) as ray,
        closing(Crew(ray, make_work, done, workers, float(cpus), float(gpus), retries, tell)) as crew,
    ):
        yield crew


@contextmanager
def _cluster(address: str | None) -> Iterator[Any]:
    """Ray, connected; what was started for it is stopped afterwards."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")  # as ever; unset, Ray warns that it may change
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # or it prints a page for each worker that dies
    try:
        import ray
    except ImportError as error:
        raise SpecbeamError("workers on a cluster need Ray: pip install specbeam[ray]") from error
    if ray.is_initialized():
        yield ray
        return
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address is None:
            ray.init("local", include_dashboard=False, object_store_memory=OBJECT_STORE, **quiet)
        else:
            _reach(address)
            with _one_try():
                ray.init(address, **quiet)
    except SpecbeamError:
        raise
    except Exception as error:  # ConnectionError, RuntimeError, ValueError, and its own: it depends on how it fails
        where = "cannot be started here" if address is None else f"at {address} cannot be joined"
        raise SpecbeamError(f"a Ray cluster {where}: {_gist(error)}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _one_try() -> Iterator[None]:
    """Where something answers that is no Ray cluster, Ray gives up after 40 s, and would try that twenty times."""
    name = "RAY_gcs_server_port_wait_time_s"
    before = os.environ.get(name)
    os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


def _reach(address: str) -> None:
    """Raises SpecbeamError if nothing listens at an address: Ray itself would try for minutes."""
    if address == "auto":
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        raise SpecbeamError(f'{address!r} is no address of a Ray cluster: give "auto", host:port or ray://host:port')
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SpecbeamError(
            f"no Ray cluster answers at {address} ({reason}): start one with ray start --head, or leave the address out"
        ) from error


class _Worker:
    """What runs in a worker's process. Results travel pickled, so that what cannot be is an error of that job alone."""

    def __init__(self, make_work: Callable[[], Work], cpus: float) -> None:
        if cpus >= 1:
            os.environ.setdefault("SPECBEAM_THREADS", str(int(cpus)))  # of the processors it shares with others
        self.make_work = make_work

    def here(self) -> None:
        """Answers once the process runs."""

    def load(self) -> bytes:
        """Make the work; returns None or the exception it raised."""
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
        cloudpickle.loads(data)  # some exceptions can be pickled and not made again
    except Exception:
        data = b""
    if not data or not isinstance(error, Exception):  # sys.exit() in a worker is no wish to end this process
        data = _pickled(RuntimeError(f"{type(error).__name__}: {error}"))
    return data


@dataclass
class _Task:
    job: Job
    deaths: int = 0  # workers that died of it, one after the other
    alone: bool = False  # a worker died that had it: the next gets no other, so that it is clear what kills


@dataclass(eq=False)
class _Member:
    """A worker as it is seen from here."""

    actor: Any
    here: Any  # a reference that is ready once its process runs; None when that is known
    loaded: Any  # the same of its models
    tasks: dict[Any, _Task] = field(default_factory=dict)  # what it has to do, by reference, first to last


class Crew:
    """The workers, and what they have to do."""

    def __init__(
        self,
        ray: Any,
        make_work: Callable[[], Work],
        done: Callable[[Job, Result], None],
        workers: int | None,
        cpus: float,
        gpus: float,
        retries: int,
        tell: Callable[[str], object],
    ) -> None:
        self.ray, self.done, self.retries, self.tell = ray, done, retries, tell
        self.workers, self.cpus, self.gpus = workers, cpus, gpus
        # max_restarts=0: a worker that is restarted would have to be told to load again, so another is made.
        actor = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_task_retries=0)(_Worker)
        self.make_worker: Callable[[], Any] = lambda: actor.remote(make_work, cpus)
        self.members: list[_Member] = []
        self.waiting: deque[_Task] = deque()
        self.failed_loads = 0  # workers that died while loading, one after the other
        self.last_death = ""
        self.counted = -1.0  # when the cluster was last asked for its room
        self.room = 0  # for so many workers, if nobody else used it
        self.last_here: float | None = None  # when there last was a worker
        self.begun = time.monotonic()

    def do(self, jobs: Iterable[Job]) -> None:
        """Do jobs, which are taken as workers come free, never more than a few ahead."""
        self.fresh = map(_Task, jobs)
        for member in self.members:  # one that has died since it was last used died of no job
            member.here = member.actor.here.remote()
        while self.waiting or any(member.tasks for member in self.members) or self._take():
            self._count_room()
            self._hire()
            self._hand_out()
            self._check_patience()
            references = [reference for member in self.members for reference in _references(member)]
            # A second at most, so that new room is seen, and Ctrl-C where signals do not interrupt the wait.
            if references:
                self.ray.wait(references, timeout=1.0)
            else:
                time.sleep(1.0)
            for member in [*self.members]:
                self._hear(member)

    def close(self) -> None:
        for member in self.members:
            self._dismiss(member)
        self.members = []

    def _take(self) -> bool:
        """Take one more job from where they come from; whether there was one."""
        task = next(self.fresh, None)
        if task is not None:
            self.waiting.append(task)
        return task is not None

    def _count_room(self) -> None:
        """How many workers the cluster has room for; nodes come and go."""
        now = time.monotonic()
        if now - self.counted < 1:
            return
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        needs = [(kind, need) for kind, need in (("CPU", self.cpus), ("GPU", self.gpus)) if need]
        fit = [min([int(node.get(kind, 0) / need + 1e-6) for kind, need in needs], default=1) for node in nodes]
        amounts = {f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes}
        self.has = ", ".join(sorted(amounts, reverse=True)) or "nothing"
        if self.counted < 0 and self.workers and 0 < sum(fit) < self.workers:
            self.tell(f"the Ray cluster has room for {sum(fit)} of {self.workers} workers")
        self.counted, self.room = now, sum(fit)

    def _hire(self) -> None:
        """Ask for workers, as many as are wanted and there are jobs for. Ray starts them when it has room for them."""
        wanted = self.workers or self.room
        while len(self.members) < wanted and self.failed_loads < self.retries:
            free = sum(member.loaded is not None or not member.tasks for member in self.members)
            if len(self.waiting) <= free and not self._take():
                return
            actor = self.make_worker()
            self.members.append(_Member(actor, actor.here.remote(), actor.load.remote()))

    def _hand_out(self) -> None:
        """Give jobs to the workers that have the fewest."""
        for load in range(IN_FLIGHT):
            for member in self.members:
                if member.here is not None or member.loaded is not None or len(member.tasks) != load:
                    continue
                if not self.waiting and not self._take():
                    return
                if load and (self.waiting[0].alone or any(task.alone for task in member.tasks.values())):
                    continue
                task = self.waiting.popleft()
                member.tasks[member.actor.do.remote(task.job)] = task

    def _check_patience(self) -> None:
        now = time.monotonic()
        if any(member.here is None for member in self.members):
            self.last_here = now
            return
        if not self.members and self.failed_loads >= self.retries:
            raise SpecbeamError(
                f"{self.failed_loads} workers in a row died while they loaded the models ({self.last_death}): do they "
                "fit into memory?"
            )
        waited = now - (self.last_here or self.begun)
        if waited > PATIENCE or (not self.room and self.last_here is None):  # a node that was lost may be replaced
            used = ", and others use them" if self.room else ""
            raise SpecbeamError(
                f"the Ray cluster has no room for a worker with {self.cpus:g} CPUs and {self.gpus:g} GPUs (its nodes "
                f"have {self.has}{used}): ask for less a worker"
            )

    def _hear(self, member: _Member) -> None:
        """Take in what a worker has to say."""
        references = _references(member)
        ready = {*self.ray.wait(references, num_returns=len(references), timeout=0)[0]} if references else ()
        for reference in references:
            if reference not in ready:
                continue
            try:
                data = self.ray.get(reference)
            except self.ray.exceptions.RayError as error:
                self._bury(member, error)
                return
            if reference is member.here:
                member.here = None
                continue
            try:
                result = self.ray.cloudpickle.loads(data)
            except Exception as error:  # of a class that is not known here
                result = error
            if reference is member.loaded:
                if result is not None:
                    raise result
                member.loaded, self.failed_loads = None, 0
            else:
                self.done(member.tasks.pop(reference).job, result)

    def _bury(self, member: _Member, error: Exception) -> None:
        """Take what a dead worker has not done to do it elsewhere."""
        self.members.remove(member)
        self._dismiss(member)  # it may only be out of reach
        self.last_death = _gist(error)
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
        self.tell(
            f"a worker died: {self.last_death}" + (f"; given to others: {len(tasks)} of its jobs" if tasks else "")
        )
        if given_up is not None:
            self.done(given_up.job, WorkerDied(f"{given_up.deaths} workers in a row died of it: {self.last_death}"))

    def _dismiss(self, member: _Member) -> None:
        with suppress(Exception):  # it is gone, or the cluster is
            self.ray.kill(member.actor)


def _references(member: _Member) -> list[Any]:
    """What is to come from a worker, in that order."""
    return [reference for reference in (member.here, member.loaded, *member.tasks) if reference is not None]


def _gist(error: BaseException) -> str:
    """What one of Ray's messages, which go on for pages, says of the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    line = next((line for line in lines if "because" in line), lines[0])
    return line.partition(" Some common causes")[0].partition(" Last connection error")[0].rstrip(".:")
