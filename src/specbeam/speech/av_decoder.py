"""The program that decodes a file of audio: a child process with limits, in which FFmpeg runs, by way of PyAV.

It reads the file on standard input and writes samples to standard output: 16 kHz, mono, int16. The last line on
standard error is a :class:`Report` as JSON.

A file of audio may be made to harm its reader. Some formats name other files or addresses to read, so once the modules
are loaded this process may open no file and no connection.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
from array import array
from collections.abc import Iterator
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, TypedDict

from specbeam.system import child_processes

if TYPE_CHECKING:
    from av import AudioFrame

SAMPLE_RATE = 16_000
GROUP_SAMPLES = 500_000
"""Samples of the file that are resampled together. Faster-whisper has the same number."""
CPU_SECONDS = 10.0
"""Processor time until the first group, and then for each. Most take a tenth of a second."""
MEMORY_BYTES = 512 << 20
"""Memory beside what the process has at its start."""

LEAST_GAP, LEAST_GAP_OF_DAMAGE, MOST_GAP = 0.1, 0.005, 600.0
"""Seconds between two frames from which on they count as missing: anywhere, and behind what cannot be decoded. Above
the last, the times in the file are damaged, too."""
SILENT_SAMPLES = 4096
"""Of a frame of silence, for each channel."""
OGG, OGG_FLAGS, OGG_LAST, OGG_HEADER_BYTES, OGG_PAGE_BYTES = b"OggS", 5, 4, 27, 65_307
"""The beginning of each page of an Ogg file, where its flags are, the last page's flag, and the largest sizes."""

HEAD_BYTES = 1 << 16
NO_LENGTH = 0x7FFF0000
"""A WAV file that names at least this many bytes, or none, was written to a pipe: by FFmpeg or SoX, for example."""
MP4_BOXES = (b"ftyp", b"mdat", b"wide", b"free", b"skip")
"""What files of MP4 and QuickTime begin with, unless it is the index, ``moov``. Without that, nothing can be read."""
INCOMPLETE = "it is incomplete: its index, which is at the end, is missing. Fetch it again"
FLOAT_TYPES = {"flt": "f", "dbl": "d"}


class Report(TypedDict):
    """What became of a file.

    Attributes:
        error: why no audio could be read; None: it was.
        samples: how many were written.
        seconds: the length that the file names; None: it names none.
        damaged: damaged packets, which may be left out.
        damaged_at: the second of the audio where the first damage is; None: there is none, or nobody knows.
        missing: seconds that could not be read, for which there is silence.
        not_numbers: samples that are NaN or infinite in the file, for which there is silence.
    """

    error: str | None
    samples: int
    seconds: float | None
    damaged: int
    damaged_at: float | None
    missing: float
    not_numbers: int


def main(suffix: str, max_samples: int, cpu_seconds: float) -> Report:
    """Decode the file.

    Args:
        suffix: the end of its name, such as ".mp3". For some formats FFmpeg looks at nothing else.
        max_samples: the maximum that are written. More is an error.
        cpu_seconds: as for ``CPU_SECONDS``.
    """
    import av
    import av.subtitles.stream  # PyAV imports it when it opens a file, and then no file can be opened any more

    report = Report(error=None, samples=0, seconds=None, damaged=0, damaged_at=None, missing=0.0, not_numbers=0)
    source: Any = io.FileIO(0)
    source.name = f"sound{suffix}"
    child_processes.limit_memory(child_processes.memory_of_this_process() + MEMORY_BYTES)
    head = source.read(HEAD_BYTES)
    source.seek(0)
    _open_nothing_more()
    child_processes.end_after(cpu_seconds)
    try:
        with av.open(source, metadata_errors="ignore") as container:
            if not container.streams.audio:
                return report | {"error": INCOMPLETE if _is_cut_mp4(head, source) else "it has no audio"}
            stream = container.streams.audio[0]
            report["seconds"] = _named_seconds(container, stream)
            frames = _decoded(container, stream, report, names_no_end=_names_no_end(head))
            for frame in _resampled(_of_numbers(frames, stream, report)):
                report["samples"] += frame.samples
                if report["samples"] > max_samples:
                    return report | {"error": f"it has more than {max_samples / SAMPLE_RATE:g} seconds of audio"}
                sys.stdout.buffer.write(memoryview(frame.planes[0])[: 2 * frame.samples])
                child_processes.end_after(cpu_seconds)
        report["damaged"] += _lacks_its_last_page(source)
        sys.stdout.buffer.flush()
    except MemoryError:
        report["error"] = f"it needs more than {MEMORY_BYTES >> 20} MB of memory"
    except av.error.InvalidDataError:
        otherwise = "it is no audio file, or its beginning is damaged"
        report["error"] = INCOMPLETE if _is_cut_mp4(head, source) else otherwise
    except (av.error.FFmpegError, ValueError) as error:
        report["error"] = f"it cannot be decoded: {getattr(error, 'strerror', None) or error}"
    except OSError as error:
        report["error"] = f"it cannot be read, or its samples cannot be written: {error.strerror}"
    return report


def _named_seconds(container: Any, stream: Any) -> float | None:
    """The length that a file names for its audio."""
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    if container.duration is not None and len(container.streams) == 1:
        return float(container.duration / 1e6)
    return None


def _names_no_end(head: bytes) -> bool:
    """Whether a file of WAV or CAF was written to a pipe: it names no length, since its writer could not go back."""
    if head.startswith(b"caff"):
        return head[head.find(b"data") :][4:12] == b"\xff" * 8
    place = 12
    while head.startswith(b"RIFF") and (name := head[place : place + 4]):
        size = int.from_bytes(head[place + 4 : place + 8], "little")
        if name == b"data":
            return size == 0 or size >= NO_LENGTH
        place += 8 + size + size % 2
    return False


def _is_cut_mp4(head: bytes, source: io.FileIO) -> bool:
    """Whether a file of MP4 lacks a part of its index. Boxes begin with their size and name (ISO/IEC 14496-12, 4.2)."""
    if head[4:8] not in MP4_BOXES:
        return False
    place, end = 0, source.seek(0, os.SEEK_END)
    while place < end:
        source.seek(place)
        box = source.read(16)
        size = int.from_bytes(box[:4], "big")
        place += max(8, int.from_bytes(box[8:], "big") if size == 1 else size or end)
        if box[4:8] == b"moov":
            return place > end
    return True


def _lacks_its_last_page(source: io.FileIO) -> bool:
    """Whether a file of Ogg was cut: its last page has a flag (RFC 3533, 6), and FFmpeg does not miss it."""
    size = source.seek(0, os.SEEK_END)
    source.seek(max(0, size - OGG_PAGE_BYTES))
    end = source.read(OGG_PAGE_BYTES)
    source.seek(0)
    if source.read(len(OGG)) != OGG or (place := end.rfind(OGG)) < 0:
        return False
    header, rest = end[place:][:OGG_HEADER_BYTES], end[place:][OGG_HEADER_BYTES:]
    if len(header) < OGG_HEADER_BYTES:
        return True
    pieces = header[-1]  # their lengths follow, and then they
    is_whole = len(rest) >= pieces + sum(rest[:pieces])
    return not (is_whole and header[OGG_FLAGS] & OGG_LAST)


def _decoded(container: Any, stream: Any, report: Report, names_no_end: bool) -> Iterator[AudioFrame]:
    """The frames of a stream. Packets that cannot be decoded are left out, and damaged ones are counted.

    Where frames are missing in the middle there is silence, so that the others keep their times. How long it is say the
    times in the file. Formats without times count on from the frame before: there the bytes that cannot be decoded do.

    Args:
        names_no_end: so FFmpeg takes the last packet for a cut one.
    """
    from av.error import FFmpegError

    packets = container.demux(stream)
    seconds, read, lost, damaged = 0.0, 0, 0, 0  # the audio so far, its bytes, bytes since it, damage before it
    end: float | None = None  # of the frame before, as the file has it
    packet = None
    while True:
        try:
            if (packet := next(packets, None)) is None:
                return
            report["damaged"] += packet.is_corrupt and not names_no_end  # cut, for example
            for frame in packet.decode():
                start = end if frame.pts is None else float(frame.pts * frame.time_base)
                gap = 0.0 if start is None or end is None else start - end
                if seconds and report["damaged"] > damaged:
                    gap = max(gap, lost * seconds / read)
                if seconds and (LEAST_GAP if report["damaged"] == damaged else LEAST_GAP_OF_DAMAGE) < gap < MOST_GAP:
                    report["missing"] += gap
                    yield from _silence(frame, gap)
                else:
                    gap = 0.0
                if report["damaged_at"] is None and (gap or report["damaged"]):
                    report["damaged_at"] = seconds
                duration = frame.samples / frame.sample_rate
                end = None if start is None else start + duration
                seconds, lost, damaged = seconds + gap + duration, 0, report["damaged"]
                yield frame
            read += packet.size
        except FFmpegError:  # after an error of reading there are no more packets
            report["damaged"] += 1
            lost += 0 if packet is None else packet.size


def _of_numbers(frames: Iterator[AudioFrame], stream: Any, report: Report) -> Iterator[AudioFrame]:
    """Frames with silence in place of samples that are NaN or infinite, which FFmpeg makes full-scale clicks of.

    Only formats that store floating-point samples have such.
    """
    if not stream.codec_context.name.startswith(("pcm_f", "wavpack")):
        yield from frames
        return
    seconds = 0.0
    for frame in frames:
        kind = FLOAT_TYPES.get(frame.format.name.removesuffix("p"), "")
        for plane in frame.planes if kind else ():
            values: array[float] = array(kind, bytes(plane))
            channels = 1 if frame.format.is_planar else frame.layout.nb_channels
            used = memoryview(values)[: frame.samples * channels]
            if not math.isfinite(sum(used)):
                wrong = [place for place, value in enumerate(used) if not math.isfinite(value)]
                for place in wrong:
                    values[place] = 0.0
                plane.update(values.tobytes())
                report["not_numbers"] += len(wrong)
                if wrong and report["damaged_at"] is None:
                    report["damaged_at"] = seconds + wrong[0] // channels / frame.sample_rate
        seconds += frame.samples / frame.sample_rate
        yield frame


def _silence(like: AudioFrame, seconds: float) -> Iterator[AudioFrame]:
    """Silent frames, in the form of another one."""
    from av import AudioFrame

    rest = round(seconds * like.sample_rate)
    while rest:
        frame = AudioFrame(like.format, like.layout, min(rest, SILENT_SAMPLES))
        frame.sample_rate = like.sample_rate
        for plane in frame.planes:
            plane.update(bytes([0x80 if like.format.name.startswith("u8") else 0]) * plane.buffer_size)
        rest -= frame.samples
        yield frame


def _resampled(frames: Iterator[AudioFrame]) -> Iterator[AudioFrame]:
    """Frames of 16 kHz, mono, int16, as faster-whisper makes them. A file may change its form in the middle."""
    from av import AudioResampler

    for _, alike in groupby(frames, key=lambda frame: (frame.format.name, frame.layout.name, frame.sample_rate)):
        resampler = AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE)
        for group in chain(_grouped(alike), [None]):  # None: what the resampler still has
            yield from resampler.resample(group)


def _grouped(frames: Iterator[AudioFrame]) -> Iterator[AudioFrame]:
    """The same samples in larger frames."""
    from av.audio.fifo import AudioFifo

    fifo = AudioFifo()
    for frame in frames:
        frame.pts = None  # times of damaged files contradict each other
        fifo.write(frame)
        if fifo.samples >= GROUP_SAMPLES and (group := fifo.read()):
            yield group
    if group := fifo.read():
        yield group


def _open_nothing_more() -> None:
    """Let this process open no further file, pipe or connection."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


if __name__ == "__main__":
    suffix, max_samples, cpu_seconds = sys.argv[1:]
    os.write(2, json.dumps(main(suffix, int(max_samples), float(cpu_seconds))).encode())
    os._exit(0)  # FFmpeg's memory need not be freed
