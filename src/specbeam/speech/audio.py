"""Audio as samples: 16 kHz, mono.

Files are decoded by FFmpeg in a child process (:mod:`specbeam.speech.av_decoder`) into a temporary file, which the
system deletes once the samples are no longer used. So hours of audio take little memory, and a damaged file harms
nobody. The samples equal faster-whisper's bit for bit.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import re
import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from specbeam.errors import SpecbeamError, located, shown
from specbeam.speech import av_decoder
from specbeam.speech.av_decoder import CPU_SECONDS, SAMPLE_RATE, Report
from specbeam.system import child_processes
from specbeam.system.extras import require

Samples: TypeAlias = NDArray[np.int16] | NDArray[np.float32]
"""One dimension, 16 kHz. int16 stands for values from -1 to 1 in steps of 1 / 32768."""
Source: TypeAlias = str | os.PathLike[str] | BinaryIO | Samples
"""A path, a file that is open for reading bytes, or samples."""

logger = logging.getLogger("specbeam")
MAX_SECONDS = 24 * 3600.0
MAX_BYTES = 4 << 30
"""The maximum that is read of a pipe or an open file."""
COPIED_BYTES = 1 << 20
MAX_PEAK = 2.0
"""Resampling may leave floats a little above 1, which are taken as they are. Far above, they are on another scale."""
SHORT_BY_SECONDS, SHORT_BY_SHARE = 1.0, 0.01
"""Audio that ends sooner than its file says by more than this is cut. Some formats know their length only roughly."""


def load(source: Source, *, name: str | None = None, max_seconds: float = MAX_SECONDS) -> Samples:
    """The samples of a file, or samples that are given.

    Args:
        source: samples are checked, and come back as one dimension of int16 or float32. Files have any format that
            FFmpeg decodes: of a video the audio is taken. An open file is read from where it is. A file that is cut
            gives what comes before the cut, and a warning.
        name: what messages call it; None: its path or name.
        max_seconds: the longest audio that is taken.

    Raises:
        SpecbeamError: the file is not there, or has no audio that can be decoded, or too much of it; or samples have
            another form.
    """
    if isinstance(source, np.ndarray):
        with located(name or "the samples"):
            return _checked(source, max_seconds)
    with begin(source, name=name, max_seconds=max_seconds) as decoding:
        return decoding.samples()


def begin(
    source: str | os.PathLike[str] | BinaryIO,
    *,
    name: str | None = None,
    max_seconds: float = MAX_SECONDS,
    cpu_seconds: float = CPU_SECONDS,
) -> Decoding:
    """Begin to decode a file, and do not wait.

    Args:
        source, name, max_seconds: as for :func:`load`.
        cpu_seconds: as in :mod:`specbeam.speech.av_decoder`.
    """
    limits = str(int(max_seconds * SAMPLE_RATE)), str(cpu_seconds)
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        with located(name or str(path)), _opened(path) as file:
            return Decoding(file, name or str(path), path.suffix, *limits)
    if not callable(getattr(source, "read", None)):
        raise SpecbeamError(f"audio={shown(source)} is no audio: give a path, an open file, or an array of samples")
    file_name = getattr(source, "name", None)
    file_name = file_name if isinstance(file_name, str) else ""
    name = name or file_name or "the file"
    with located(name), _copied(source) as file:
        return Decoding(file, name, Path(file_name).suffix, *limits)


class Decoding:
    """A child process that decodes a file. A context manager that ends it.

    Args:
        file: it can be read from any place, and may be closed at once.
        name: what messages call it.
        suffix: the end of its name, such as ".mp3".
        limits: as the child takes them.
    """

    def __init__(self, file: IO[bytes], name: str, suffix: str, *limits: str) -> None:
        require("reading audio files", "av", extra="speech")
        if not os.fstat(file.fileno()).st_size:
            raise SpecbeamError("it is empty")
        suffix = suffix if re.fullmatch(r"\.\w{1,8}", suffix, re.ASCII) else ""
        self._name = name
        self._samples = TemporaryFile()  # noqa: SIM115  # closed by close
        how = {"stdin": file, "stdout": self._samples, "stderr": subprocess.PIPE}
        self._child = child_processes.start(av_decoder.__file__, suffix, *limits, **how)

    def __enter__(self) -> Decoding:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child if it still runs."""
        self._child.kill()
        with self._child:  # closes the pipe and waits
            self._samples.close()

    def samples(self) -> NDArray[np.int16]:
        """Wait for the samples, once."""
        with located(self._name):
            report = self._report()
            if report["error"] is not None:
                raise SpecbeamError(report["error"])
            if not report["samples"]:
                raise SpecbeamError("its audio cannot be decoded" if report["damaged"] else "it has no audio")
            _warn_of_damage(self._name, report)
            return np.frombuffer(mmap.mmap(self._samples.fileno(), 0, access=mmap.ACCESS_READ), np.int16)

    def _report(self) -> Report:
        _, output = self._child.communicate()
        try:
            report: Report = json.loads(output.splitlines()[-1])
        except (ValueError, IndexError):
            if child_processes.ran_out_of_time(self._child.returncode):
                raise SpecbeamError("decoding it takes too much processor time") from None
            raise SpecbeamError(f"the process that decodes it ended with status {self._child.returncode}") from None
        return report


def release(samples: Samples) -> None:
    """Give back the memory of samples that come from a file. They are read from it again when they are used again."""
    base: Any = samples
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)


def seconds_of(samples: Samples) -> float:
    """How long samples are."""
    return len(samples) / SAMPLE_RATE


def _checked(samples: NDArray[Any], max_seconds: float) -> Samples:
    if samples.ndim == 2 and 1 in samples.shape:  # one channel, as torchaudio and soundfile have it
        samples = samples.ravel()
    if samples.ndim != 1:
        shape = " x ".join(map(str, samples.shape)) or "no dimensions"
        raise SpecbeamError(f"they have the shape {shape}: give one dimension, of mono audio at 16 kHz")
    is_float = samples.dtype.kind == "f"
    if not is_float and samples.dtype != np.int16:
        raise SpecbeamError(f"they are of type {samples.dtype}: give floats from -1 to 1, or int16")
    if seconds_of(samples) > max_seconds:
        raise SpecbeamError(f"they are more than {max_seconds:g} seconds of audio")
    if is_float and len(samples):
        lowest, highest = float(samples.min()), float(samples.max())  # NaN if one is
        if not math.isfinite(highest - lowest):
            place = int(np.flatnonzero(~np.isfinite(samples))[0])
            raise SpecbeamError(f"the one at {place / SAMPLE_RATE:.2f} s is {samples[place]:g}: give numbers")
        if max(-lowest, highest) > MAX_PEAK:
            raise SpecbeamError(f"they reach from {lowest:g} to {highest:g}: give floats from -1 to 1, or int16")
    return samples.astype(np.float32, copy=False) if is_float else samples


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """A file that can be read from any place: the path's, or a copy of all that comes through its pipe."""
    with ExitStack() as stack:
        try:
            kind = path.stat().st_mode
            if not stat.S_ISREG(kind) and not stat.S_ISFIFO(kind):
                raise SpecbeamError("it is a folder" if stat.S_ISDIR(kind) else "it is no file")
            file: IO[bytes] = stack.enter_context(path.open("rb"))
        except OSError as error:
            raise SpecbeamError(f"it cannot be read: {error.strerror}") from error
        except ValueError as error:  # a null character
            raise error if isinstance(error, SpecbeamError) else SpecbeamError(f"it cannot be read: {error}") from error
        yield file if stat.S_ISREG(kind) else stack.enter_context(_copied(file))


@contextmanager
def _copied(source: Any) -> Iterator[IO[bytes]]:
    """A temporary file with the rest of an open file."""
    with TemporaryFile() as file:
        try:
            while piece := source.read(COPIED_BYTES):
                file.write(piece)
                if file.tell() > MAX_BYTES:
                    raise SpecbeamError(f"it has more than {MAX_BYTES >> 30} GB")
            file.seek(0)
        except OSError as error:
            raise SpecbeamError(f"it cannot be copied to a temporary file: {error.strerror}") from error
        except TypeError as error:
            raise SpecbeamError("it gives text: open it for reading bytes") from error
        yield file


def _warn_of_damage(name: str, report: Report) -> None:
    has, stated = report["samples"] / SAMPLE_RATE, report["seconds"]
    place = "" if report["damaged_at"] is None else f" at {report['damaged_at']:.1f} s"
    if stated is not None and has < stated * (1 - SHORT_BY_SHARE) - SHORT_BY_SECONDS:
        logger.warning("%s is cut or damaged%s: of %.1f seconds of audio, %.1f could be read", name, place, stated, has)
    elif report["not_numbers"]:
        logger.warning("%s is damaged%s: %d samples are no numbers, and are silent", name, place, report["not_numbers"])
    elif report["damaged"] or report["missing"]:
        lacks = f"{report['missing']:.1f} seconds of silence stand for what is missing"
        read = lacks if round(report["missing"], 1) else f"{has:.1f} seconds of audio could be read"
        logger.warning("%s is damaged%s: %s", name, place, read)
