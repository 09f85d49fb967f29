"""Limits of machines and containers, in fake trees of /proc and /sys, laid out as Linux and Docker lay them out."""

import ctypes
import os
from types import SimpleNamespace

import pytest

from specbeam.system.machine import usable_memory, usable_processors

GB = 1 << 30
MANY = {*range(64)}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Write files below a root with a machine of 64 processors and 100 GB, with 90 GB free. Returns the root."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: MANY, raising=False)

    def machine(cgroup="", **files):
        meminfo = f"MemTotal: {100 * GB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {90 * GB // 1024} kB\n"
        for name, text in {"proc/meminfo": meminfo, "proc/self/cgroup": cgroup, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n" if text else "")
        return tmp_path

    return machine


def group(path="", **values):
    """Files of a control group of version 2, or of version 1 if the path begins with a controller."""
    return {f"sys/fs/cgroup/{path}{name.replace('_', '.', 1)}": value for name, value in values.items()}


def test_without_control_groups_the_machine_is_the_limit(machine):
    root = machine()
    assert usable_memory(root) == (100 * GB, 90 * GB)
    assert usable_processors(root) == 64
    assert usable_memory(root, mapped=3 * GB) == (100 * GB, 87 * GB)  # files of this process are not free
    assert usable_memory(root, mapped=95 * GB) == (100 * GB, 0)


MAC = {
    "hw.memsize": (16 * GB, 8),
    "hw.pagesize": (16384, 8),
    "hw.perflevel0.logicalcpu": (4, 4),
    "vm.page_free_count": (65536, 4),
    "vm.page_pageable_external_count": (131072, 4),
    "vm.page_purgeable_count": (65536, 4),
}
"""What an Apple M1 answers: numbers and their bytes."""


@pytest.mark.parametrize(
    ("lacks", "memory", "processors"),
    [
        pytest.param((), (16 * GB, 4 * GB), 4, id="Apple's processor"),
        pytest.param(("hw.perflevel0.logicalcpu",), (16 * GB, 4 * GB), 8, id="Intel's, which has one kind"),
        pytest.param([name for name in MAC if name.startswith("vm.")], (16 * GB, 16 * GB), 4, id="counts no pages"),
    ],
)
def test_a_mac_says_it_by_sysctl(tmp_path, monkeypatch, lacks, memory, processors):
    """The function is C's to its caller: its arguments and results go through ctypes."""

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    def sysctlbyname(name, old, size, new, new_size):
        room = ctypes.c_size_t.from_address(size)
        if name.decode() not in MAC.keys() - {*lacks} or new is not None or new_size:
            return -1
        number, room.value = MAC[name.decode()]
        ctypes.memmove(old, number.to_bytes(room.value, "little"), room.value)
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(sysctlbyname=sysctlbyname))
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert usable_memory(tmp_path) == memory
    assert usable_memory(tmp_path, mapped=GB) == (memory[0], memory[1] - GB)
    assert usable_processors(tmp_path) == processors


def test_version_2_with_limits_at_several_levels(machine):
    root = machine(
        "0::/kubepods/pod/app",
        **group(memory_current=50 * GB),  # the root has no limit
        **group("kubepods/", memory_max=40 * GB, memory_current=30 * GB, memory_stat="anon 1\ninactive_file 0"),
        **group("kubepods/", cpu_max="800000 100000"),
        **group("kubepods/pod/", memory_max=20 * GB, memory_current=4 * GB, cpu_max="250000 100000"),
        **group("kubepods/pod/app/", memory_max="max", memory_current=3 * GB, cpu_max="max 100000"),
    )
    assert usable_memory(root) == (20 * GB, 10 * GB)  # the pod's limit; what its neighbours left
    assert usable_processors(root) == 3  # 2.5, rounded up


def test_files_that_memory_can_be_taken_from_are_free_and_a_full_container_has_nothing_free(machine):
    stat = f"anon {2 * GB}\ninactive_file {4 * GB}\nactive_file {3 * GB}\nfile_mapped {2 * GB}"
    root = machine("0::/", **group(memory_max=8 * GB, memory_current=7 * GB, memory_stat=stat))
    assert usable_memory(root) == (8 * GB, 6 * GB)
    root = machine("0::/", **group(memory_max=4 * GB, memory_current=5 * GB, memory_stat=""))  # a full container
    assert usable_memory(root) == (4 * GB, 0)


@pytest.mark.parametrize(
    ("cached", "touched", "free"),
    [
        pytest.param(0, 0, 4, id="read from the disk later"),
        pytest.param(3, 0, 4, id="in memory, and not touched yet"),
        pytest.param(3, 3, 4, id="in memory, and touched"),
        pytest.param(4, 4, 3, id="in memory beside another process's file"),
    ],
)
def test_files_that_this_process_needs_are_not_free_wherever_they_lie(machine, cached, touched, free):
    """The container has 1 GB of other data, and this process needs a file of 3 GB."""
    stat = f"anon {GB}\nactive_file {cached * GB}\nfile_mapped {touched * GB}"
    limits = group(memory_max=8 * GB, memory_current=(1 + cached) * GB, memory_stat=stat)
    assert usable_memory(machine("0::/", **limits), mapped=3 * GB) == (8 * GB, free * GB)


@pytest.mark.parametrize("path", ["/docker/0123abcd", "/", "/../../neighbour"])
def test_version_1_in_a_container(machine, path):
    """A container sees its own group where the host's groups begin, and its path may be the host's."""
    root = machine(
        f"7:memory:{path}\n4:cpuacct,cpu:{path}\n1:name=systemd:{path}\n0::/unused",
        **group("memory/", memory_limit_in_bytes=6 * GB, memory_usage_in_bytes=3 * GB),
        **group("memory/", memory_stat=f"inactive_file 1\ntotal_inactive_file {GB}\ntotal_active_file 0"),
        **group("cpu/", cpu_cfs_quota_us="50000", cpu_cfs_period_us="100000"),
    )
    assert usable_memory(root) == (6 * GB, 4 * GB)
    assert usable_processors(root) == 1


def test_version_1_without_limits(machine):
    """Version 1 says "no limit" as -1 processors, and as nearly 2^63 bytes."""
    root = machine(
        "7:memory:/a\n4:cpu:/a",
        **group("memory/a/", memory_limit_in_bytes=(1 << 63) - 4096, memory_usage_in_bytes=GB),
        **group("cpu/a/", cpu_cfs_quota_us="-1", cpu_cfs_period_us="100000"),
    )
    assert usable_memory(root) == (100 * GB, 90 * GB)
    assert usable_processors(root) == 64


def test_engines_take_a_share_of_the_container(machine, monkeypatch):
    """The threads of a backend and the room for caches follow the container, not the machine."""

    from specbeam.backends import devices
    from specbeam.backends.cpu import choose_threads

    limits = group(memory_max=8 * GB, memory_current=GB, cpu_max="300000 100000")
    root = machine("0::/", **limits)
    monkeypatch.setattr("specbeam.backends.cpu.usable_processors", lambda: usable_processors(root))
    monkeypatch.setattr(devices, "usable_memory", lambda **_: usable_memory(root))
    monkeypatch.delenv("SPECBEAM_THREADS", raising=False)
    assert choose_threads(None) == 3
    assert devices.memory_for_caches("cpu") == 2 * GB
    machine("0::/", **limits | group(memory_current=7 * GB))
    assert devices.memory_for_caches("cpu") == int(0.8 * GB)
