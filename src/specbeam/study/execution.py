"""Programs that models wrote, run against their tests, such as HumanEval's (Chen et al. 2021).

A program runs in a child process, which is this file run as a script. Its time, memory and files are limited, and
nothing that it starts outlives it. It can read all files that the user can read: this guards against mistakes of
models, not against attacks.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
STOP = re.compile(r"\n(?:class|def|#|if|print)")
"""The start of another statement of the module, which ends the function (Chen et al. 2021, 2.1)."""
MAX_ERROR_CHARACTERS = 200
NOBODY_USER_ID = 65534


def completion_of(text: str, entry_point: str) -> str:
    """The code in a model's answer.

    In a chat, it is the first fenced block that defines the function. Without such a block, the text continues the
    prompt, and the code ends before the first line that begins another statement of the module.
    """
    for block in FENCED.findall(text):
        if re.search(rf"^\s*(?:async\s+)?def\s+{re.escape(entry_point)}\b", block, re.MULTILINE):
            return "\n" + textwrap.dedent(block)
    return STOP.split(text, maxsplit=1)[0]


def passes(
    problem: Mapping[str, str], completion: str, *, seconds: float = 5.0, megabytes: int = 512
) -> tuple[bool, str]:
    """Whether a completion of a problem's prompt passes its tests, and if not, why, in one line.

    The program has no input and no arguments. Its output goes nowhere, and its folder is empty. It can write no byte to
    a file and start no process or thread. Where the system allows, it can delete no file, it sees no network and no
    other process, and it does not run as root.

    Args:
        problem: "prompt", "test" (which defines ``check``) and "entry_point", as in HumanEval.
        seconds: the maximum time that it may take, including the start of the interpreter.
        megabytes: the maximum address space that it may use.
    """
    if os.name != "posix":
        from specbeam.errors import SpecbeamError

        raise SpecbeamError("programs are run on POSIX systems only: leave out the data sets whose answers are code")
    program = f"{problem['prompt']}{completion}\n{problem['test']}\ncheck({problem['entry_point']})\n"
    nonce = secrets.token_hex(16)  # the program does not know it, so it cannot claim to have passed
    task = {"program": program, "passed": nonce, "seconds": seconds, "megabytes": megabytes}
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as verdict:
        with open(writing, "wb") as answering:
            in_time = _run(json.dumps(task).encode(), answering.fileno(), seconds)
        os.set_blocking(reading, False)  # do not wait for a process that escaped
        answer = verdict.read(4096) or b""
    if not in_time:
        return False, f"timed out after {seconds:g} s"
    first = answer.decode(errors="replace").partition("\n")[0]
    return (True, "") if first == nonce else (False, first or "ended without a verdict")


def _run(task: bytes, verdict_pipe: int, seconds: float) -> bool:
    """Run this file as a script that does the task and writes its verdict. Returns whether it ended in time."""
    with (
        tempfile.TemporaryDirectory(prefix="specbeam-", ignore_cleanup_errors=True) as folder,
        subprocess.Popen(
            [sys.executable, "-I", os.path.abspath(__file__), str(verdict_pipe)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            pass_fds=[verdict_pipe],
            start_new_session=True,
        ) as process,
    ):
        try:
            process.communicate(task, timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    return True


def _supervise(verdict_pipe: int) -> None:
    """The child process: run the program in a process of its own, and end all processes that are left of it."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    task = json.load(sys.stdin)
    _isolate(libc)
    if not (worker := os.fork()):
        _limit(libc, task["seconds"], task["megabytes"])
        _report(verdict_pipe, _verdict(task["program"], task["passed"]))
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    ended = f"exited with status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
    _report(verdict_pipe, f"{ended} before its tests had passed")  # no one reads it after the program's own verdict
    os.killpg(0, signal.SIGKILL)


def _report(verdict_pipe: int, line: str) -> None:
    os.write(verdict_pipe, line.encode(errors="replace") + b"\n")


def _verdict(program: str, passed: str) -> str:
    """The nonce if the program passes its tests, else its error in one line."""
    try:
        exec(compile(program, "program", "exec"), {"__name__": "program"})
        return passed
    except BaseException as error:
        kind = type(error).__name__
        with suppress(BaseException):  # the program's own code makes the message
            return f"{kind}: {error}".partition("\n")[0][:MAX_ERROR_CHARACTERS].removesuffix(": ")
        return kind


def _isolate(libc: Any) -> None:
    """Put the next process into namespaces without a network, and with processes that all end when it does."""
    user, pid, net = 0x10000000, 0x20000000, 0x40000000  # CLONE_NEW... of linux/sched.h
    with suppress(AttributeError):  # not Linux
        # Root needs no user namespace, and must not have one: there it could not become another user.
        libc.unshare(pid | net) and libc.unshare(user | pid | net)


def _limit(libc: Any, seconds: float, megabytes: int) -> None:
    """Limit this process for good."""
    import resource

    if os.geteuid() == 0:
        _leave_root(libc)
    with suppress(AttributeError):  # not Linux
        libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: end with the supervisor
        _lock_files(libc)
    limits = {"CPU": math.ceil(seconds) + 1, "AS": megabytes << 20, "FSIZE": 0, "NOFILE": 32, "CORE": 0, "NPROC": 0}
    for name, limit in limits.items():
        with suppress(AttributeError, ValueError, OSError):  # not every system has each limit, or can lower it
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))


def _lock_files(libc: Any) -> None:
    """Forbid to open files for writing, and to create, delete or rename them (Landlock, since Linux 5.13)."""
    import ctypes

    create, restrict, version = 444, 446, libc.syscall(444, None, 0, 1)
    writes = sum(1 << bit for bit in (1, *range(4, 13)))  # LANDLOCK_ACCESS_FS_... of linux/landlock.h
    if version >= 3:
        writes |= 1 << 14  # to truncate
    rules = ctypes.c_uint64(writes)
    if version >= 1 and (ruleset := libc.syscall(create, ctypes.byref(rules), 8, 0)) >= 0:
        libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        libc.syscall(restrict, ruleset, 0)
        os.close(ruleset)


def _leave_root(libc: Any) -> None:
    """Become "nobody", since root is exempt from the limit on processes.

    The capability to read all files stays: Python may be installed in root's home.
    """
    read_search = 1 << 2  # CAP_DAC_READ_SEARCH
    header, sets = (0x20080522, 0), (read_search, read_search, 0, 0, 0, 0)
    with suppress(AttributeError, OSError):
        import ctypes

        os.setgroups([])
        os.setresgid(NOBODY_USER_ID, NOBODY_USER_ID, NOBODY_USER_ID)
        os.setresuid(NOBODY_USER_ID, NOBODY_USER_ID, 0)  # the saved user id is root, so the capabilities stay
        refused = libc.capset((ctypes.c_uint32 * 2)(*header), (ctypes.c_uint32 * 6)(*sets))
        if refused and not os.access(os.__file__, os.R_OK):
            os.setresuid(0, 0, 0)


if __name__ == "__main__":
    _supervise(int(sys.argv[1]))
