"""Engines in threads while their process ends or forks, and a process that gets fewer threads than it asks for.

One process does all of it, because importing PyTorch takes seconds. Its children report by their exit codes.
"""

import json
import subprocess
import sys

import pytest

from tests.conftest import in_thorough_mode, random_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and limits memory")

SCRIPT = """
import dataclasses, json, os, resource, signal, sys, threading
from pathlib import Path
import specbeam
from specbeam import Engine, SpecbeamError
from specbeam.system import fork_guard
from specbeam.backends.cpu import CpuBackend
from specbeam.checkpoints import open_checkpoint

lm = specbeam.load(sys.argv[1], backend="cpu", threads=2)

def text(lm=lm):
    return specbeam.generate(lm, [1, 2, 3], max_new_tokens=10).token_ids

def decode(started):
    engine = Engine(lm)
    while True:
        engine.submit([1, 2, 3] * 20, {"max_new_tokens": 50, "do_sample": True, "seed": 1})
        while engine.step():
            started.set()

def decode_in_a_daemon_thread():
    started = threading.Event()
    threading.Thread(target=decode, args=[started], daemon=True).start()
    started.wait()

def leave_an_engine_running():
    engine = Engine(lm).start()
    engine.submit([1, 2, 3] * 20, {"max_new_tokens": 9}).result()
    threading.Thread(target=engine.submit([1], {"max_new_tokens": 900}).result, daemon=True).start()
    idle = Engine(lm).start()

def in_children(count, work):
    codes = []
    for _ in range(count):
        if child := os.fork():
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        else:
            signal.alarm(60)  # a child that hangs is killed
            work()
            sys.exit()  # a whole end of the interpreter
    return codes

results = {"ends": in_children(int(sys.argv[2]), decode_in_a_daemon_thread)}
results["ends"] += in_children(int(sys.argv[2]), leave_an_engine_running)
expected = text()

# Each thread needs 8 MB of address space, and there is room for some of them only.
resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, -1))
checkpoint = open_checkpoint(Path(sys.argv[1]))
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (400 << 20), -1))
backend = CpuBackend(checkpoint, "int8", threads=300)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
results |= {"threads": backend.threads, "same text": text(dataclasses.replace(lm, backend=backend)) == expected}

# A step that waits for the thread that forks cannot end before the fork.
inside, forked = threading.Event(), threading.Event()

@fork_guard.fork_guard
def step():
    inside.set()
    forked.wait()

def ask():
    try:
        text()
    except SpecbeamError as error:
        os._exit(7 if "forked while another thread was inside a pass" in str(error) else 8)

thread = threading.Thread(target=step)
thread.start()
inside.wait()
longest, fork_guard.MAX_WAIT_SECONDS = fork_guard.MAX_WAIT_SECONDS, 0.1
results["torn"] = in_children(1, ask)
fork_guard.MAX_WAIT_SECONDS = longest
forked.set()
thread.join()

decode_in_a_daemon_thread()
results["forks"] = in_children(4, lambda: os._exit(0 if text() == expected else 9))

# A child lacks the engine's thread.
engine = Engine(lm).start()

def take_over():
    by_hand = engine.submit([1, 2, 3], {"max_new_tokens": 10})
    try:
        by_hand.result()
    except SpecbeamError:
        engine.run()
    with engine:
        again = engine.submit([1, 2, 3], {"max_new_tokens": 10})
    os._exit(0 if by_hand.result().token_ids == again.result().token_ids == expected else 9)

results["forks"] += in_children(2, take_over)
print(json.dumps(results | {"parent": text() == expected}))
"""


def test_processes_end_and_fork_while_threads_decode_and_go_on_with_fewer_threads(save):
    """One test, so that workers of pytest start the process once."""
    folder = save(random_model("llama", hidden_size=128, vocab_size=20_000))
    ends = 12 if in_thorough_mode() else 1  # each takes a second or two: PyTorch is large
    command = [sys.executable, "-c", SCRIPT, str(folder), str(ends)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])  # this process ends so, too
    results = json.loads(done.stdout)
    assert set(results["ends"]) == {0}  # while a daemon thread decodes
    assert results["forks"] == [0] * 6  # children that were forked meanwhile work
    assert results["parent"]
    assert results["torn"] == [7]  # a child that was forked inside a pass says why it cannot work
    assert 1 <= results["threads"] < 300
    assert results["same text"]
    assert f"only {results['threads']} of 300 threads could be started" in done.stderr
