"""Commands in this process, on a tiny model with a chat template, and terminals in memory."""

import io
import itertools
import os
import signal
import sys

import pytest

import specbeam
from specbeam.backends.cpu import CpuBackend
from specbeam.cli import main
from tests.conftest import CHAT_TEMPLATE, byte_tokenizer, random_model


@pytest.fixture(scope="session")
def folder(save):
    """The folder of a tiny model with a chat template."""
    return str(save(random_model("llama"), byte_tokenizer(CHAT_TEMPLATE)))


@pytest.fixture(scope="session")
def model(folder):
    return specbeam.load(folder)


@pytest.fixture
def specbeam_command(capsys):
    """Runs a command. Returns its exit status, output and errors."""

    def run(*arguments):
        try:
            status = main(arguments)
        except SystemExit as stop:
            status = stop.code
        out, err = capsys.readouterr()
        return status, out, err

    return run


class Terminal(io.TextIOWrapper):
    """Takes text in an encoding. Presses Ctrl-C once it has shown ``interrupt_at``."""

    def __init__(self, encoding="utf-8", interrupt_at=None):
        super().__init__(io.BytesIO(), encoding)
        self.interrupt_at = interrupt_at

    def write(self, text):
        written = super().write(text)
        if self.interrupt_at is not None and self.interrupt_at in self.text():
            self.interrupt_at = None
            signal.raise_signal(signal.SIGINT)
        return written

    def text(self):
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)


@pytest.fixture
def terminal(monkeypatch):
    """Puts a terminal in the place of standard output, and returns it."""

    def terminal(**how):
        monkeypatch.setattr(sys, "stdout", Terminal(**how))
        return sys.stdout

    return terminal


@pytest.fixture
def closed_terminal(terminal, monkeypatch):
    """Puts a standard output in place that nobody reads on ``after`` some writes."""

    def closed_terminal(after=0):
        shown = terminal()
        write, writes = shown.write, itertools.count()

        def closing(text):
            if next(writes) >= after:
                raise BrokenPipeError(32, "Broken pipe")
            return write(text)

        monkeypatch.setattr(shown, "write", closing)
        monkeypatch.setattr(os, "dup2", lambda *_: None)  # the command silences the process's own standard output

    return closed_terminal


@pytest.fixture
def before_passes(monkeypatch):
    """Calls a function before each pass of the cpu backend, with the number of the pass and its segments."""

    def before_passes(act):
        forward, numbers = CpuBackend.forward, itertools.count(1)

        def watched(self, segments):
            act(next(numbers), segments)
            return forward(self, segments)

        monkeypatch.setattr(CpuBackend, "forward", watched)
        monkeypatch.delattr(CpuBackend, "forward_ahead", raising=False)  # each pass is one of these

    return before_passes


def flags(**options):
    """Options of Python for the command line. A list gives its option several times."""
    each = [(name, one) for name, value in options.items() for one in (value if isinstance(value, list) else [value])]
    return [part for name, value in each for part in (f"--{name.replace('_', '-')}", str(value))]


def fail_on_long_prompts(number, segments):
    """For ``before_passes``."""
    if any(len(s.tokens) > 60 for s in segments):
        raise RuntimeError("it\nbroke")


def press_ctrl_c_in(pass_number):
    """For ``before_passes``."""
    return lambda number, _: signal.raise_signal(signal.SIGINT) if number == pass_number else None
