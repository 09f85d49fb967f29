"""Jobs on a Ray cluster of several nodes, all on this machine. Workers die, and no result is lost."""

import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from functools import partial

import psutil
import pytest

from specbeam.errors import SpecbeamError
from specbeam.jobs import WorkerDied, crew
from specbeam.jobs.launchers import run_here, run_on_ray

ray = pytest.importorskip("ray")
OBJECT_STORE_BYTES = 80 * 2**20
TIMEOUT_SECONDS = 60  # after which a process that should have ended is a failure


@pytest.fixture(scope="module")
def cluster():
    """Two processors, which this process has joined: on two nodes beside the head, or on the head in quick mode."""
    from ray.cluster_utils import Cluster

    from tests.conftest import in_thorough_mode  # here, because workers import this module: it loads PyTorch

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    nodes = 2 if in_thorough_mode() else 0
    head = {"num_cpus": 2 - nodes, "object_store_memory": OBJECT_STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(nodes):
            cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def gate(workers):
    """The address of a gate, which holds workers up until a number of them has come."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        held = [server.accept()[0] for _ in range(workers)]
        while True:  # once it is open, whoever comes passes
            for connection in held:
                connection.send(b".")
            held = [server.accept()[0]]

    threading.Thread(target=serve, daemon=True).start()
    return server.getsockname()


def meeting(address):
    """Squares numbers. Each worker waits at the gate in its first job until others are there too."""
    passed = []

    def work(job):
        if not passed:
            passed.append(socket.create_connection(address).recv(1))
        return job**2, os.getpid()

    return work


def echo():
    return lambda job: job


def process_of():
    return lambda job: os.getpid()


class Processes:
    """Workers' processes, known while they run so that their end can be waited for."""

    def __init__(self):
        self.handles = {}

    def add(self, process):
        if process not in self.handles:
            self.handles[process] = os.pidfd_open(process)

    def wait_until_ended(self):
        for handle in self.handles.values():
            assert select.select([handle], [], [], TIMEOUT_SECONDS)[0]
            os.close(handle)


def fragile():
    def work(job):
        if job == "die":
            os._exit(1)
        if job == "exit":
            sys.exit("gone")
        if job == "raise":
            raise ValueError("it broke")
        if job == "odd":
            raise Odd("one", "two")
        if job == "lambda":
            return threading.Lock()
        return job

    return work


class Odd(Exception):
    """Can be pickled, but not made again."""

    def __init__(self, first, second):
        super().__init__(first)


def broken():
    raise SpecbeamError("there is no such model")


def deadly():
    os._exit(1)


def once(folder):
    """Work that ends its process at one job, the first time it is tried."""

    def work(job):
        if job == 5:
            try:
                (folder / "died").touch(exist_ok=False)
            except FileExistsError:
                return job
            os._exit(1)
        return job

    return work


def collected(jobs, make_work, launch=run_on_ray, **how):
    """The results by job; a job that is reported twice is a failure."""
    results = {}

    def done(job, result):
        assert threading.current_thread() is threading.main_thread()
        assert job not in results
        results[job] = result

    launch(jobs, make_work, done, **how)
    return results


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"cpus": -1}, {"cpus": 1.5}, {"gpus": float("nan")}, {"retries": 0}])
def test_amounts_that_make_no_sense_are_refused(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(SpecbeamError, match=f"{name}={value} is not allowed"):
        run_on_ray([1], echo, print, **wrong)


def test_a_cluster_that_does_not_answer_is_an_error_and_no_hang(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # another test may have joined a cluster
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        with pytest.raises(SpecbeamError, match=f"no Ray cluster answers at {address} .Connection refused."):
            run_on_ray([1], echo, print, address=address)
    for address in ("cluster", "cluster:port"):
        with pytest.raises(SpecbeamError, match="is no address of a Ray cluster"):
            run_on_ray([1], echo, print, address=address)


def test_without_ray_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SpecbeamError, match=r"pip install 'specbeam\[ray\]'"):
        run_on_ray([1], echo, print)


OWN_CLUSTER = """
import sys
from specbeam.jobs.launchers import run_on_ray
from tests.jobs.test_ray import echo
run_on_ray(range(int(sys.argv[1])), echo, lambda job, result: print(result, flush=True), workers=2)
"""


def own_cluster(jobs):
    """A process that starts a cluster of its own."""
    command = [sys.executable, "-c", OWN_CLUSTER, str(jobs)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.thorough
def test_a_cluster_of_its_own_is_started_and_stopped_quietly():
    process = own_cluster(4)
    out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert (process.returncode, sorted(out.split()), err) == (0, ["0", "1", "2", "3"], "")
    wait_until_gone(process.pid)


@pytest.mark.thorough
def test_ctrl_c_leaves_nothing_running():
    process = own_cluster(10**9)
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    wait_until_gone(process.pid)


def wait_until_gone(session):
    """Wait for the processes of a session that have not ended yet."""
    left = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session:
                left.append(process)
        except ProcessLookupError:
            pass
    assert psutil.wait_procs(left, timeout=TIMEOUT_SECONDS)[1] == []


@pytest.mark.thorough
def test_a_worker_keeps_what_it_loaded_and_all_of_them_work(cluster):
    results = collected(range(100), partial(meeting, gate(2)))
    assert {job: value for job, (value, _) in results.items()} == {job: job**2 for job in range(100)}
    assert len({process for _, process in results.values()}) == 2
    assert os.getpid() not in {process for _, process in results.values()}


@pytest.mark.thorough
def test_no_more_workers_than_asked_for_and_none_are_left(cluster):
    processes = Processes()
    run_on_ray(range(10), process_of, lambda job, process: processes.add(process), workers=1)
    assert len(processes.handles) == 1
    processes.wait_until_ended()


@pytest.fixture(params=[run_here, pytest.param(run_on_ray, marks=pytest.mark.thorough)])
def launch(request):
    if request.param is run_on_ray:
        request.getfixturevalue("cluster")
    return request.param


def test_what_the_work_raises_is_its_result(launch):
    results = collected(["raise", 1, 2], fragile, launch)
    assert repr(results.pop("raise")) == "ValueError('it broke')"
    assert results == {1: 1, 2: 2}


def test_what_cannot_be_loaded_is_raised_once(launch):
    with pytest.raises(SpecbeamError, match="there is no such model"):
        collected([1], broken, launch)


@pytest.mark.thorough
def test_what_cannot_travel_is_an_error_of_that_job(cluster):
    results = collected(["exit", "odd", "lambda", 1], fragile)
    assert repr(results["exit"]) == "RuntimeError('SystemExit: gone')"
    assert repr(results["odd"]) == "RuntimeError('Odd: one')"
    assert isinstance(results["lambda"], TypeError)
    assert results[1] == 1


def test_a_worker_that_dies_costs_no_result(cluster, tmp_path):
    warnings = []
    results = collected(range(20), partial(once, tmp_path), warn=warnings.append)
    assert results == {job: job for job in range(20)}
    assert (tmp_path / "died").exists()
    assert len(warnings) == 1
    assert "a worker died" in warnings[0]
    assert "\n" not in warnings[0]


@pytest.mark.thorough
def test_a_job_that_kills_every_worker_is_given_up_and_the_others_are_done(cluster):
    warnings = []
    results = collected([1, "die", 2, 3], fragile, retries=2, workers=1, warn=warnings.append)
    died = results.pop("die")
    assert isinstance(died, WorkerDied)
    assert "2 workers in a row died of it" in str(died)
    assert results == {1: 1, 2: 2, 3: 3}
    assert 2 <= len(warnings) <= 3  # the first may have died of the job before


@pytest.mark.thorough
def test_workers_that_die_while_they_load_are_an_error(cluster):
    with pytest.raises(SpecbeamError, match="2 workers in a row died while they loaded"):
        collected([1], deadly, retries=2, warn=lambda line: None)


@pytest.mark.thorough
def test_jobs_are_taken_as_they_are_needed(cluster):
    finished, ahead, processes = [], [], Processes()

    def jobs():
        for job in itertools.count():
            ahead.append(job - len(finished))
            yield job

    def done(job, process):
        processes.add(process)
        finished.append(job)
        if len(finished) == 30:
            raise KeyboardInterrupt  # as Ctrl-C would

    with pytest.raises(KeyboardInterrupt):
        run_on_ray(jobs(), process_of, done)
    assert max(ahead) <= 2 * crew.JOBS_PER_WORKER + 1
    processes.wait_until_ended()


@pytest.mark.thorough
def test_no_room_is_an_error_and_no_hang(cluster, monkeypatch):
    with pytest.raises(SpecbeamError, match=r"no room for a worker with 64 CPUs and 0 GPUs \(its nodes have 1 CPUs"):
        collected([1], echo, cpus=64)
    with pytest.raises(SpecbeamError, match="no room for a worker with 1 CPUs and 1 GPUs"):
        collected([1], echo, gpus=1, workers=2)
    monkeypatch.setattr(crew, "ROOM_TIMEOUT_SECONDS", 0.0)
    others = [ray.remote(num_cpus=1)(Other).remote() for _ in range(int(ray.cluster_resources()["CPU"]))]
    ray.get([other.here.remote() for other in others])
    try:
        with pytest.raises(SpecbeamError, match="and others use them"):
            collected([1], echo)
    finally:
        for other in others:
            ray.kill(other)


class Other:
    def here(self):
        return True


@pytest.mark.thorough
def test_a_node_that_is_lost_costs_no_result_and_a_new_one_is_used(cluster):
    """One of three nodes is killed while it works, then another comes."""
    node = cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
    results, warnings = {}, []

    def done(job, result):
        assert job not in results
        results[job] = result
        if len(results) == 30:
            cluster.remove_node(node, allow_graceful=False)
        if len(results) == 60:
            cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)

    run_on_ray(range(120), partial(meeting, gate(3)), done, warn=warnings.append)
    assert {job: square for job, (square, _) in results.items()} == {job: job**2 for job in range(120)}
    assert warnings
