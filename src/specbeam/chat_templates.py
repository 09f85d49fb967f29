"""Chat templates, rendered in a process of their own.

A chat template is a program that comes with a checkpoint. Jinja's sandbox keeps it from files, but lets it take all
memory and time. A single call of C code may do so, and no thread can interrupt that. So templates run in a child
process, which is this module run as a program, and the kernel limits its memory and its processor time. The rendering
itself is transformers'.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from threading import Lock
from typing import Any

CPU_SECONDS = 2.0
"""Processor time for one prompt. Most take a millisecond. Time in which the child waits for a processor is free."""
MEMORY_BYTES, MEMORY_PER_BYTE = 256 << 20, 32
"""Memory for one prompt beside what the child has at its start, and more for each byte of the messages."""
MAX_CHARACTERS, CHARACTERS_PER_BYTE = 1 << 20, 8
"""The longest prompt that a template may write, and more for each byte of the messages."""
MAX_REASON_CHARACTERS = 300
OWN_NAMES = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversations",
    "documents",
    "messages",
    "return_assistant_tokens_mask",
    "self",
    "tools",
)
"""Variables of a template that no caller may set: they are arguments of transformers' and Jinja's functions."""
OUT_OF_MEMORY, TOO_LONG = 64, 65
"""Exit statuses of the child."""


class Renderer:
    """The child process. It starts when it is first needed, and again after a template has exceeded a limit."""

    def __init__(self, cpu_seconds: float = CPU_SECONDS) -> None:
        self._cpu_seconds = cpu_seconds
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the child and do not wait: it needs half a second before it can render."""
        with self._lock:
            self._running()

    @property
    def is_ready(self) -> bool:
        """Whether the child runs and has nothing to do. So the last template was well-behaved."""
        child = self._process
        return child is not None and child.poll() is None and not self._lock.locked()

    def __call__(self, template: Any, messages: list[dict[str, Any]], /, **how: Any) -> str:
        """The text that a template makes of messages. Threads take turns.

        Args:
            template: its source.
            how: further arguments of transformers' ``render_jinja_template``, and variables of the template.

        Raises:
            ValueError: the template refuses the messages, or exceeds a limit.
        """
        task = {**how, "conversations": [messages], "chat_template": template}
        line = _line([self._cpu_seconds, task])
        with self._lock:
            child = self._running()
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                with suppress(BrokenPipeError):
                    child.stdin.write(line)
                    child.stdin.flush()
                answer = child.stdout.readline()
                if not answer.endswith(b"\n"):
                    raise ValueError(self._reason(child.wait()))
            except BaseException:  # after an interrupt, the next request would get this one's answer
                self._end()
                raise
        text, refusal = _read(answer)
        if refusal is not None:
            raise ValueError(refusal)
        return str(text)

    def end(self) -> None:
        """End the child."""
        with self._lock:
            self._end()

    def forget(self) -> None:
        """Leave the child to the process from which this one was forked."""
        self._lock, self._process = Lock(), None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "specbeam.chat_templates"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C in a terminal is not for the child
            )
        return self._process

    def _end(self) -> None:
        child, self._process = self._process, None
        if child is not None:
            child.kill()
            with suppress(BrokenPipeError), child:  # closes the pipes and waits
                pass

    def _reason(self, status: int) -> str:
        """Why the child ended while it rendered."""
        if status == OUT_OF_MEMORY:
            return f"it needs more than {MEMORY_BYTES >> 20} MB of memory"
        if status == TOO_LONG:
            return f"it writes more than {MAX_CHARACTERS:,} characters"
        if hasattr(signal, "SIGPROF") and status == -signal.SIGPROF:
            return f"it needs more than {self._cpu_seconds:g} seconds of processor time"
        return f"the process that renders it ended with status {status}"


render = Renderer()
"""The one of this process."""
atexit.register(render.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=render.forget)


def _line(value: Any) -> bytes:
    """One line of JSON. Texts may hold half a surrogate pair: the tokenizer refuses it, with a message of its own."""
    return json.dumps(value, ensure_ascii=False, default=str).encode(errors="surrogatepass") + b"\n"


def _read(line: bytes) -> Any:
    return json.loads(line.decode(errors="surrogatepass"))


def _serve() -> None:
    """The child: read tasks from standard input, one in a line, and answer each with a line on standard output."""
    from transformers.utils.chat_template_utils import render_jinja_template

    memory = _memory_of_this_process()
    for line in sys.stdin.buffer:
        _limit(memory + MEMORY_BYTES + MEMORY_PER_BYTE * len(line))
        text, refusal = "", None
        try:
            cpu_seconds, task = _read(line)
            _end_after(cpu_seconds)
            (text,), _ = render_jinja_template(**task)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except Exception as error:
            refusal = str(error)[:MAX_REASON_CHARACTERS] or type(error).__name__
        if len(text) > MAX_CHARACTERS + CHARACTERS_PER_BYTE * len(line):
            os._exit(TOO_LONG)
        sys.stdout.buffer.write(_line([text, refusal]))
        sys.stdout.flush()
        _end_after(0)


def _limit(memory: int) -> None:
    """Limit the address space of this process."""
    if sys.platform == "linux":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (memory if most < 0 else min(memory, most), most))


def _end_after(cpu_seconds: float) -> None:
    """End this process after some seconds of processor time from now; 0 for never."""
    if hasattr(signal, "setitimer"):  # not Windows
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)


def _memory_of_this_process() -> int:
    """Bytes of its address space; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


if __name__ == "__main__":
    _serve()
