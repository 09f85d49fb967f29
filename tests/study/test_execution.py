"""Programs run against their tests: right ones pass, all others are contained."""

import gzip
import itertools
import json
import os
import socket
import tempfile
from pathlib import Path

import psutil
import pytest

from specbeam.study.execution import completion_of, passes

HUMAN_EVAL = Path(__file__).parents[3] / "shared" / "data" / "human_eval.jsonl.gz"
PROBLEM = {
    "prompt": 'def double(x):\n    """Twice x."""\n',
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(0) == 0\n",
    "entry_point": "double",
}


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path, monkeypatch):
    """Programs run in folders below tmp_path, and no process with such a folder is left behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    psutil.wait_procs(_running_below(tmp_path), timeout=1)
    assert not _running_below(tmp_path)


def _running_below(folder):
    """Processes in a folder. A dead process that its parent has not reaped yet has no folder any more."""
    return [p for p in psutil.process_iter(["cwd"]) if (p.info["cwd"] or "").startswith(str(folder))]


def run(body, **limits):
    return passes(PROBLEM, body, **limits)


def test_a_right_program_passes_and_a_wrong_one_does_not():
    assert run("    return 2 * x") == (True, "")
    assert run("    return 3 * x") == (False, "AssertionError")
    assert run("    return y") == (False, "NameError: name 'y' is not defined")
    assert run("    return (") == (False, "SyntaxError: '(' was never closed (program, line 3)")
    assert run("    raise ValueError('two\\nlines')") == (False, "ValueError: two")


@pytest.mark.skipif(not HUMAN_EVAL.exists(), reason="needs shared/data/human_eval.jsonl.gz")
def test_the_canonical_solutions_of_human_eval_pass():
    with gzip.open(HUMAN_EVAL, "rt", encoding="utf-8") as file:
        problems = [json.loads(line) for line in itertools.islice(file, 0, None, 13)]
    assert len(problems) >= 10
    for problem in problems:
        body = problem["canonical_solution"]
        assert passes(problem, completion_of(body, problem["entry_point"])) == (True, ""), problem["task_id"]
        whole = f"Sure!\n```python\n{problem['prompt']}{body}```\nThis is *it*."
        assert passes(problem, completion_of(whole, problem["entry_point"]))[0]
        assert not passes(problem, "    return None")[0]


def test_an_endless_program_is_stopped():
    assert run("    while True: pass", seconds=0.5) == (False, "timed out after 0.5 s")
    assert run("    import time\n    time.sleep(60)", seconds=0.5) == (False, "timed out after 0.5 s")
    deaf = "    import signal\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    while True:\n        pass"
    assert run(deaf, seconds=0.5)[1] == "timed out after 0.5 s"


def test_memory_is_limited():
    hog = "    hoard = []\n    while True:\n        hoard.append(bytearray(1 << 20))"
    assert run(hog, megabytes=128) == (False, "MemoryError")
    assert run("    return len(bytearray(64 << 20)) and 2 * x", megabytes=128)[0]


def test_no_process_is_started():
    passed, reason = run("    import os\n    while True:\n        os.fork()", seconds=1)
    assert not passed
    assert reason.startswith("BlockingIOError")
    assert not run("    import subprocess\n    subprocess.Popen(['sleep', '60'])\n    return 2 * x", seconds=1)[0]


def test_no_byte_is_written_to_a_file(tmp_path):
    tmp_path.chmod(0o777)
    precious = tmp_path / "precious"
    for place in ("'file'", repr(str(tmp_path / "new")), repr(str(precious))):
        precious.write_text("precious")
        precious.chmod(0o644)
        passed, reason = run(f"    with open({place}, 'a') as f:\n        f.write('x' * 10_000_000)\n    return 2 * x")
        assert not passed
        assert reason.split(":")[0] in ("OSError", "PermissionError")
        assert precious.read_text() == "precious"
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) == len("precious")


@pytest.mark.parametrize(
    "deed", ["os.remove({0!r})", "os.rename({0!r}, {0!r} + '2')", "os.truncate({0!r}, 0)", "open({0!r}, 'w').close()"]
)
def test_no_file_is_deleted(tmp_path, deed):
    tmp_path.chmod(0o777)
    precious = tmp_path / "precious"
    precious.write_text("precious")
    precious.chmod(0o666)
    passed, reason = run(f"    import os\n    {deed.format(str(precious))}\n    return 2 * x")
    if passed:
        pytest.skip("the system has no Landlock")
    assert reason.startswith("PermissionError")
    assert precious.read_text() == "precious"


def test_its_folder_is_empty_and_deleted_and_nothing_of_the_environment_is_told(monkeypatch):
    monkeypatch.setenv("SECRET", "42")
    passed, reason = run("    import os\n    raise ValueError(os.getcwd(), os.listdir(), 'SECRET' in os.environ)")
    folder, *found = eval(reason.removeprefix("ValueError: "))
    assert (passed, found) == (False, [[], False])
    assert folder != os.getcwd()
    assert not Path(folder).exists()


def test_output_goes_nowhere(capfd):
    assert run("    print('x' * 10_000_000)\n    return 2 * x") == (True, "")
    loud = "    import sys\n    while True:\n        print('x' * 100_000)\n        print('y', file=sys.stderr)"
    assert run(loud, seconds=0.5)[1] == "timed out after 0.5 s"
    _, reason = run("    raise ValueError('x' * 10_000_000)")
    assert len(reason) == 200
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "body",
    [
        "    import sys\n    sys.exit(0)",
        "    return 2 * x\nimport os\nos._exit(0)",
        "    return 2 * x\nraise SystemExit(0)",
        "    import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)",
        "    import ctypes\n    ctypes.string_at(0)",
        "    import os\n    [os.write(fd, b'\\n') for fd in range(3, 9) if os.path.exists(f'/proc/self/fd/{fd}')]",
        "    class Sly(Exception):\n        def __str__(self):\n            raise SystemExit(0)\n    raise Sly",
        "    return int(input())",
    ],
)
def test_a_program_that_ends_before_its_tests_has_not_passed(body):
    passed, reason = run(body, seconds=2)
    assert not passed
    assert reason
    assert "\n" not in reason
    assert "timed out" not in reason


def test_there_is_no_network():
    """Where the system allows no namespaces there is one; the test then tells nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        port = server.getsockname()[1]
        body = f"    import socket\n    socket.create_connection(('127.0.0.1', {port}), timeout=1)\n    return 2 * x"
        passed, reason = run(body, seconds=3)
        if passed:
            pytest.skip("the system allows no network namespace")
        assert reason.split(":")[0] in ("OSError", "ConnectionRefusedError")
        with pytest.raises(TimeoutError):
            server.accept()


def test_no_file_stays_open():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        run("    return 2 * x")
    assert len(os.listdir("/proc/self/fd")) == before


PLAIN = "    return 2 * x\n\n"


@pytest.mark.parametrize(
    ("text", "completion"),
    [
        (PLAIN, PLAIN),
        (PLAIN + "\ndef other():\n    pass", PLAIN),
        (PLAIN + "\nclass Other:\n    pass", PLAIN),
        (PLAIN + "\nprint(double(1))", PLAIN),
        (PLAIN + "\nif __name__ == '__main__':\n    pass", PLAIN),
        (PLAIN + "\n# Next", PLAIN),
        ("    if x:\n        # none\n        print(x)\n    return 2 * x", None),
        ("Sure:\n```python\ndef double(x):\n    return 2 * x\n```\nDone.", "\ndef double(x):\n    return 2 * x\n"),
        ("```\nfoo()\n```\n```py\ndef double(x):\n    return 2\n```", "\ndef double(x):\n    return 2\n"),
        ("1. So:\n   ```python\n   def double(x):\n       return 2\n   ```\n", "\ndef double(x):\n    return 2\n"),
        ("```python\ndef double(x):\n    return 2", "\ndef double(x):\n    return 2"),
        ("```python\ndef doubled(x):\n    return 2\n```", "```python"),
    ],
)
def test_the_completion_in_an_answer(text, completion):
    assert completion_of(text, "double") == (text if completion is None else completion)
