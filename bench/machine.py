"""The date and the machine, for the head of every table."""

from __future__ import annotations

import os
import platform
from datetime import date
from pathlib import Path

import torch

import specbeam

INT8_AND_BF16_EXTENSIONS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "asimddp", "i8mm")


def describe(*peers: str) -> str:
    """One line: date, processor or GPU, threads, versions."""
    return f"{date.today()}, {machine(*peers)}"


def machine(*peers: str) -> str:
    """One line: processor or GPU, threads, versions. ``peers``: the versions of other packages."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    versions = [f"specbeam {specbeam.__version__}", f"torch {torch.__version__}", *peers]
    return f"{device}, Python {platform.python_version()}, {', '.join(versions)}"


def processor() -> str:
    """The processor's name, and its extensions for int8 and bfloat16."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    flags = fields.get("flags", fields.get("Features", "")).split()
    extensions = [name for name in INT8_AND_BF16_EXTENSIONS if name in flags]
    return f"{fields.get('model name', platform.machine())} ({' '.join(extensions)})"
