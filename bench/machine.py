"""The date and the machine, for the head of every table."""

from __future__ import annotations

import os
import platform
from datetime import date
from pathlib import Path

import torch

import specbeam


def describe(*peers: str) -> str:
    """One line: date, processor or GPU, threads, versions."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    versions = [f"specbeam {specbeam.__version__}", f"torch {torch.__version__}", *peers]
    return f"{date.today()}, {device}, Python {platform.python_version()}, {', '.join(versions)}"


def processor() -> str:
    """The processor's name and what it can do with narrow numbers."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    extensions = [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16") if name in fields.get("flags", "")]
    return f"{fields.get('model name', platform.machine())} ({' '.join(extensions)})"
