"""A terminal in memory, with an encoding, and with a user who may press Ctrl-C."""

import io
import signal
import sys

import pytest


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
