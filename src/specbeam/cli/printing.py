"""Results and errors as single lines, on terminals of any encoding and in files."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO

from specbeam.errors import SpecbeamError


def json_line(value: Any, default: Callable[[Any], str] | None = None, out: TextIO | None = None) -> str:
    """A value as JSON. Characters beyond ASCII are escaped unless the output (standard output) takes UTF-8."""
    utf8 = ((out or sys.stdout).encoding or "").lower().replace("-", "") == "utf8"
    return json.dumps(value, default=default, ensure_ascii=not utf8)


def one_line(error: Exception) -> str:
    """An error's message, after its type unless the error is for people."""
    kind = "" if isinstance(error, SpecbeamError) else f"{type(error).__name__}: "
    return kind + " ".join(str(error).split())


def print_lines(*lines: str, end: str = "\n", file: TextIO | None = None) -> None:
    """Print lines, if there are any, above the progress bars of the terminal."""
    tqdm = sys.modules.get("tqdm")  # if nothing has imported it, there are no bars
    if lines:
        with tqdm.tqdm.external_write_mode(file=file) if tqdm else nullcontext():
            print(*lines, sep="\n", end=end, file=file, flush=True)


def buffered(stream: TextIO) -> TextIO:
    """A stream that writes all of a text or raises.

    With PYTHONUNBUFFERED, standard output has no buffer. A raw file may take a part of a text, as on a full disk, and
    io.TextIOWrapper does not look at how much it took.
    """
    if not isinstance(getattr(stream, "buffer", None), io.RawIOBase):
        return stream
    by_lines = 1
    return open(stream.fileno(), "w", by_lines, encoding=stream.encoding, errors=stream.errors, closefd=False)


@contextmanager
def printing_to(file: str | None) -> Iterator[TextIO]:
    """Standard output, or a file in UTF-8. The file appears once all of it is written, and replaces one there."""
    if file is None or file == "-":
        yield sys.stdout
        return
    from specbeam.jobs.files import replacing

    path = Path(file)
    if path.exists() and not path.is_file() and not path.is_dir():  # a device or a pipe cannot be replaced
        with path.open("w", encoding="utf-8", errors="replace") as out:
            yield out
        return
    path = path.resolve()  # a link stays, and the file that it names is replaced
    check_writable(path, file)
    with replacing(path) as file_of_bytes:
        text = io.TextIOWrapper(file_of_bytes, encoding="utf-8", errors="replace", newline="\n")
        yield text
        text.detach()


def check_writable(path: Path, name: str | Path) -> None:
    """Refuse a file that cannot be written, before the work whose results it is for."""
    if path.is_dir():
        raise SpecbeamError(f"{name} cannot be written: it is a folder")
    if not path.parent.is_dir():
        raise SpecbeamError(f"{name} cannot be written: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise SpecbeamError(f"{name} cannot be written: the folder {path.parent} is not yours to write in")
