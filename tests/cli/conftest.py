"""Commands in this process, on a tiny model with a chat template, and terminals in memory."""

import io
import signal
import sys

import pytest

import specbeam
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
