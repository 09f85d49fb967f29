"""Engines in threads while the process ends or forks, and processes that may not have what the machine has."""

import subprocess
import sys

import pytest

from tests.conftest import random_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and limits memory")

PREAMBLE = """
import dataclasses, gc, os, resource, sys, threading
import specbeam
from specbeam import Engine

lm = specbeam.load(sys.argv[1], backend="cpu", threads=2)

def decode(started=None):
    engine = Engine(lm)
    while True:
        engine.submit([1, 2, 3] * 20, {"max_new_tokens": 50, "do_sample": True, "seed": 1})
        while engine.step():
            started and started.set()

def start_daemon():
    started = threading.Event()
    threading.Thread(target=decode, args=[started], daemon=True).start()
    started.wait()

def text():
    return specbeam.generate(lm, [1, 2, 3], max_new_tokens=20).token_ids

def in_children(count, work):
    statuses = []
    for _ in range(count):
        if child := os.fork():
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        else:
            work()
            sys.exit()
    print(statuses)
"""


@pytest.fixture(scope="module")
def folder(save):
    return save(random_model("llama", hidden_size=256, intermediate_size=512, vocab_size=40_000))


def run(folder, script):
    """What a script prints."""
    command = [sys.executable, "-c", PREAMBLE + script, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, (result.returncode, result.stderr[-2000:])
    return result.stdout


def test_processes_end_while_a_daemon_thread_decodes(folder):
    """Each child ends as a program does, while a thread of its own decodes."""
    assert run(folder, "in_children(10, start_daemon)") == f"{[0] * 10}\n"


def test_children_work_that_were_forked_while_a_thread_decodes(folder):
    script = """
expected = text()
start_daemon()

def work():
    resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
    assert text() == expected
    gc.collect()
    os._exit(0)

in_children(10, work)
"""
    assert run(folder, script) == f"{[0] * 10}\n"


def test_a_child_that_was_forked_inside_a_pass_says_why_it_cannot_work(folder):
    """A step that waits for the thread that forks cannot end before the fork."""
    script = """
from specbeam import whole_steps, SpecbeamError
whole_steps.MAX_WAIT_SECONDS = 0.1
inside, forked = threading.Event(), threading.Event()

def step():
    with whole_steps.whole_step:
        inside.set()
        forked.wait()

thread = threading.Thread(target=step)
thread.start()
inside.wait()

def work():
    try:
        text()
    except SpecbeamError as error:
        assert "forked while another thread was inside a pass" in str(error)
        os._exit(7)

in_children(1, work)
forked.set()
thread.join()
text()
"""
    assert run(folder, script) == "[7]\n"


def test_passes_go_on_with_fewer_threads(folder):
    """Each thread needs 8 MB of address space, and there is room for some of them only."""
    script = """
from pathlib import Path
from specbeam.backends.cpu import CpuBackend
from specbeam.checkpoints import open_checkpoint

expected = text()
resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, -1))
checkpoint = open_checkpoint(Path(sys.argv[1]))
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (400 << 20), -1))
backend = CpuBackend(checkpoint, "int8", threads=300)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
assert 1 <= backend.threads < 300
lm = dataclasses.replace(lm, backend=backend)
assert text() == expected
"""
    run(folder, script)
