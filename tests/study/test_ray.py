"""Jobs on a Ray cluster of several nodes, all on this machine: what is lost when workers die, and what is not."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from specbeam.errors import SpecbeamError
from specbeam.study import launchers
from specbeam.study.launchers import WorkerDied, local, on_ray

ray = pytest.importorskip("ray")
MEMORY = 80 * 2**20


@pytest.fixture(scope="module")
def cluster():
    """A head without processors, and nodes with one each; this process has joined it."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": MEMORY})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def square():
    def work(job):
        time.sleep(0.05)  # or one worker would be done before the other is up
        return job**2, os.getpid()

    return work


def slow():
    def work(job):
        time.sleep(0.1)
        return job

    return work


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


class Once:
    """Work that ends its process at one job, the first time it is tried."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self):
        def work(job):
            time.sleep(0.02)
            if job == 5:
                try:
                    (self.folder / "died").touch(exist_ok=False)
                except FileExistsError:
                    return job
                os._exit(1)
            return job

        return work


def collected(jobs, make_work, launch=on_ray, **how):
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
        on_ray([1], square, print, **wrong)


def test_a_cluster_that_does_not_answer_is_an_error_and_no_hang(monkeypatch):
    if ray.is_initialized():
        pytest.skip("this process has joined a cluster")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        with pytest.raises(SpecbeamError, match=f"no Ray cluster answers at {address} .Connection refused."):
            on_ray([1], square, print, address=address)
    for address in ("cluster", "cluster:port"):
        with pytest.raises(SpecbeamError, match="is no address of a Ray cluster"):
            on_ray([1], square, print, address=address)


def test_without_ray_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SpecbeamError, match=r"pip install specbeam\[ray\]"):
        on_ray([1], square, print)


OWN = """
import sys, time
from specbeam.study.launchers import on_ray
from tests.study.test_ray import slow
on_ray(range(int(sys.argv[1])), slow, lambda job, result: print(result, flush=True), workers=2)
"""


def own(jobs):
    """A process that starts a cluster of its own."""
    command = [sys.executable, "-c", OWN, str(jobs)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_a_cluster_of_its_own_is_started_and_stopped_quietly():
    process = own(4)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, sorted(out.split()), err) == (0, ["0", "1", "2", "3"], "")
    wait_until_gone(process.pid)


def test_ctrl_c_leaves_nothing_running():
    process = own(10**6)
    process.stdout.readline()
    begun = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - begun < 15
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    wait_until_gone(process.pid)


def wait_until_gone(session):
    deadline = time.monotonic() + 15
    while left := subprocess.run(["ps", "-s", str(session), "-o", "pid=,args="], capture_output=True, text=True).stdout:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_a_worker_keeps_what_it_loaded_and_all_of_them_work(cluster):
    results = collected(range(100), square)
    assert {job: value for job, (value, _) in results.items()} == {job: job**2 for job in range(100)}
    assert len({process for _, process in results.values()}) == 2
    assert os.getpid() not in {process for _, process in results.values()}


def test_no_more_workers_than_asked_for_and_none_are_left(cluster):
    results = collected(range(10), square, workers=1)
    processes = {process for _, process in results.values()}
    assert len(processes) == 1
    deadline = time.monotonic() + 10
    while any(map(alive, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("launch", [local, on_ray])
def test_what_the_work_raises_is_its_result(cluster, launch):
    results = collected(["raise", 1, 2], fragile, launch)
    assert repr(results.pop("raise")) == "ValueError('it broke')"
    assert results == {1: 1, 2: 2}


def test_what_cannot_travel_is_an_error_of_that_job(cluster):
    results = collected(["exit", "odd", "lambda", 1], fragile)
    assert repr(results["exit"]) == "RuntimeError('SystemExit: gone')"
    assert repr(results["odd"]) == "RuntimeError('Odd: one')"
    assert isinstance(results["lambda"], TypeError)
    assert results[1] == 1


def test_what_cannot_be_loaded_is_raised_once(cluster):
    with pytest.raises(SpecbeamError, match="there is no such model"):
        collected([1], broken)
    with pytest.raises(SpecbeamError, match="there is no such model"):
        collected([1], broken, local)


def test_a_worker_that_dies_costs_no_result(cluster, tmp_path):
    told = []
    results = collected(range(20), Once(tmp_path), tell=told.append)
    assert results == {job: job for job in range(20)}
    assert (tmp_path / "died").exists()
    assert len(told) == 1
    assert "a worker died" in told[0]
    assert "\n" not in told[0]


def test_a_job_that_kills_every_worker_is_given_up_and_the_others_are_done(cluster):
    told = []
    results = collected([1, "die", 2, 3], fragile, retries=2, workers=1, tell=told.append)
    died = results.pop("die")
    assert isinstance(died, WorkerDied)
    assert "2 workers in a row died of it" in str(died)
    assert results == {1: 1, 2: 2, 3: 3}
    assert 2 <= len(told) <= 3  # the first may have died of the job before


def test_workers_that_die_while_they_load_are_an_error(cluster):
    with pytest.raises(SpecbeamError, match="2 workers in a row died while they loaded"):
        collected([1], deadly, retries=2, tell=lambda line: None)


def test_jobs_are_taken_as_they_are_needed(cluster):
    taken, finished, ahead = itertools.count(), [], []

    def jobs():
        for job in taken:
            ahead.append(job - len(finished))
            yield job

    def done(job, result):
        finished.append(job)
        if len(finished) == 30:
            raise KeyboardInterrupt  # as Ctrl-C would

    with pytest.raises(KeyboardInterrupt):
        on_ray(jobs(), square, done)
    assert max(ahead) <= 2 * launchers.IN_FLIGHT + 1
    free = time.monotonic() + 10
    while ray.available_resources().get("CPU") != 2:  # nothing is left running
        assert time.monotonic() < free
        time.sleep(0.05)


def test_no_room_is_an_error_and_no_hang(cluster, monkeypatch):
    with pytest.raises(SpecbeamError, match=r"no room for a worker with 64 CPUs and 0 GPUs \(its nodes have 1 CPUs"):
        collected([1], square, cpus=64)
    with pytest.raises(SpecbeamError, match="no room for a worker with 1 CPUs and 1 GPUs"):
        collected([1], square, gpus=1, workers=2)
    monkeypatch.setattr(launchers, "PATIENCE", 1.5)
    others = [ray.remote(num_cpus=1)(Other).remote() for _ in range(int(ray.cluster_resources()["CPU"]))]
    ray.get([other.here.remote() for other in others])
    try:
        with pytest.raises(SpecbeamError, match="and others use them"):
            collected([1], square)
    finally:
        for other in others:
            ray.kill(other)


class Other:
    def here(self):
        return True


def test_a_node_that_is_lost_costs_no_result_and_a_new_one_is_used(cluster):
    """One of three nodes is killed while it works, then another comes."""
    node = cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
    results, told = {}, []

    def done(job, result):
        assert job not in results
        results[job] = result
        if len(results) == 30:
            cluster.remove_node(node, allow_graceful=False)
        if len(results) == 60:
            cluster.add_node(num_cpus=1, object_store_memory=MEMORY)

    on_ray(range(120), slow, done, tell=told.append)
    assert results == {job: job for job in range(120)}
    assert told
