"""The memory and the processors that this process may use: the machine's, or its container's where that has less.

A container has the limits of its control group, version 1 or 2, and of all groups above that group.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple
from weakref import WeakKeyDictionary

UNKNOWN_MEMORY_BYTES = 16 << 30
"""Assumed where the system does not say: outside of Linux and macOS."""
FREE_PAGES = ("vm.page_free_count", "vm.page_pageable_external_count", "vm.page_purgeable_count")
"""macOS's numbers of pages that can be taken: unused ones, copies of files, and what programs have given up."""


class Memory(NamedTuple):
    """Bytes.

    Attributes:
        total: the maximum that this process and its container may use.
        free: the part of it that can still be taken. Copies of files count as free, but mapped ones of a container and
            the ``mapped`` bytes of this process do not.
    """

    total: int
    free: int


def usable_processors(root: Path = Path("/")) -> int:
    """The number of processors that this process may keep busy, rounded up.

    Args:
        root: the folder with ``proc`` and ``sys``.
    """
    if hasattr(os, "sched_getaffinity"):
        processors = len(os.sched_getaffinity(0))
    else:  # of a Mac only the fast ones: the threads of a pass share its work evenly, so the slowest sets its time
        processors = _sysctl("hw.perflevel0.logicalcpu") or os.cpu_count() or 1
    quotas = [_quota(group) for group in _groups("cpu", root)]
    return max(1, math.ceil(min([processors, *quotas])))


def usable_memory(root: Path = Path("/"), mapped: int = 0) -> Memory:
    """The memory that this process may use.

    Args:
        root: the folder with ``proc`` and ``sys``.
        mapped: bytes of mapped files that this process needs again and again. They may lie in memory already, as
            copies that the system counts as free, or come there later.
    """
    machine = _machine_memory(root, mapped)
    groups = [found for group in _groups("memory", root) if (found := _group_memory(group, mapped)) is not None]
    return Memory(*(min(sizes) for sizes in zip(machine, *groups, strict=True)))


def reading_speeds(threads: int, size: int, repeats: int) -> list[float]:
    """How many bytes per second all threads together read from memory, by NumPy's sum.

    Args:
        size: bytes of the array that each thread reads. It must be larger than a processor's caches.
        repeats: how often they read. There is a figure for each time.
    """
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    arrays = [np.ones(size // 8) for _ in range(threads)]
    speeds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(1 + repeats):
            start = time.perf_counter()
            list(pool.map(np.sum, arrays))
            speeds.append(threads * size / (time.perf_counter() - start))
    return speeds[1:]  # the first one warms up


def return_free_memory() -> None:
    """Give the system the memory that this process has freed. glibc keeps it otherwise, in pieces, for each thread."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def keep_in_memory(mapping: mmap.mmap, file: Path) -> None:
    """Count a mapping of a file as memory that this process needs, as long as the mapping lives."""
    with _mappings_lock:
        _mappings[mapping] = file


def mapped_bytes() -> int:
    """The bytes of files that this process has mapped and needs. A file that is mapped twice counts once."""
    with _mappings_lock:
        return sum({file: len(mapping) for mapping, file in _mappings.items()}.values())


_mappings: WeakKeyDictionary[mmap.mmap, Path] = WeakKeyDictionary()
_mappings_lock = Lock()


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of this process's control groups, and of those above them.

    In a container the path of a group may be the host's, and not exist. Then the folders above it are the container's.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("" if number == "0" else controller)  # version 2 has the number 0
        names = [name for name in path.split("/") if name not in ("", "..")]
        for depth in range(len(names), -1, -1):
            yield mount.joinpath(*names[:depth])


def _quota(group: Path) -> float:
    """The processors of a control group. Infinity if it has no limit."""
    quota, _, period = _read(group / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    limit, length = _number(quota), _number(period)
    return limit / length if limit and length else math.inf


def _group_memory(group: Path, mapped: int) -> Memory | None:
    """The memory of a control group, None if it has no limit."""
    for limit, used, prefix, by_all in (
        ("memory.max", "memory.current", "", "file_mapped"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_", "total_mapped_file"),
    ):
        if (total := _number(_read(group / limit))) is not None:
            facts = _facts(group / "memory.stat")
            cached = facts.get(f"{prefix}active_file", 0) + facts.get(f"{prefix}inactive_file", 0)
            needed = max(min(cached, facts.get(by_all, 0)), mapped)  # what this process has touched is in both
            kept = (_number(_read(group / used)) or 0) - cached + needed
            return Memory(total, min(max(0, total - kept), total))
    return None


def _machine_memory(root: Path, mapped: int) -> Memory:
    facts = _facts(root / "proc/meminfo")
    if "MemTotal" in facts:
        total = facts["MemTotal"] * 1024
        return Memory(total, max(0, facts.get("MemAvailable", facts["MemTotal"]) * 1024 - mapped))
    if total := _sysctl("hw.memsize"):
        free = sum(map(_sysctl, FREE_PAGES)) * _sysctl("hw.pagesize") or total
        return Memory(total, max(0, min(free, total) - mapped))
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        total = UNKNOWN_MEMORY_BYTES
    return Memory(total, max(0, total - mapped))


def _sysctl(name: str) -> int:
    """A number of macOS's; 0 if it has none of this name, and on other systems."""
    try:
        function = ctypes.CDLL(None).sysctlbyname
    except (AttributeError, OSError, TypeError):
        return 0
    function.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 3, ctypes.c_size_t]
    number, size = ctypes.c_uint64(), ctypes.c_size_t(8)  # some numbers have 4 bytes: the lower ones
    failed = function(name.encode(), ctypes.byref(number), ctypes.byref(size), None, 0)
    return 0 if failed else number.value


def _facts(path: Path) -> dict[str, int]:
    """The numbers in a file with lines such as ``name 7`` or ``name: 7 kB``."""
    words = [line.replace(":", " ").split() for line in _read(path).splitlines()]
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdecimal()}


def _number(text: str) -> int | None:
    """A limit; None for "max", for -1 and for a missing file."""
    return int(text) if text.strip().isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
