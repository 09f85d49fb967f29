"""Devices of PyTorch, for all backends: the choice of device and dtype, and the memory there is."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import torch

from specbeam.errors import SpecbeamError
from specbeam.machine import mapped_bytes, usable_memory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def devices() -> list[str]:
    """The kinds of device there are on this machine."""
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return [name for name, is_there in there.items() if is_there]


def _names() -> list[str]:
    """Each device of this machine, by the name that PyTorch has for it."""
    there = devices()
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if "cuda" in there else []
    return [*(name for name in there if name != "cuda"), *gpus]


def choose_device(device: str) -> torch.device:
    """The device of a name. It is tried out, so that a missing device is refused before anything is loaded.

    Raises:
        SpecbeamError: there is no such device. The message names the devices of this machine, and leaves out PyTorch's
            own text, which may take a kilobyte.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        if chosen.type == "meta":
            raise RuntimeError("it holds no data")
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise SpecbeamError(
            f"there is no device {device!r} here: give auto, or one of {', '.join(_names())}"
        ) from error
    return chosen


def choose_dtype(dtype: str, device: torch.device, own: str) -> torch.dtype:
    """The dtype of a name. "auto" gives the dtype that suits the device and the checkpoint."""
    if dtype == "auto":
        half = own if own in ("bfloat16", "float16") else "bfloat16"
        dtype = "float32" if device.type == "cpu" else half
    if dtype not in DTYPES:
        raise SpecbeamError(f"unknown dtype {dtype!r}: give auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def memory_for_caches(device: torch.device) -> int:
    """Bytes that the engine may fill with caches.

    Four fifths of a GPU's free memory. Else a quarter of the memory that this process may use, but at most four fifths
    of its free memory.
    """
    free = free_memory(device)
    return int(0.8 * free) if device.type == "cuda" else int(min(usable_memory().total * 0.25, free * 0.8))


def free_memory(device: torch.device) -> int:
    """Bytes of a device's memory that this process can still take, beside the weights that it has mapped."""
    if device.type != "cuda":
        return usable_memory(mapped=mapped_bytes()).free
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def peak_memory(device: torch.device) -> int | None:
    """Most bytes held so far: device memory on a GPU, the process's memory on a CPU; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_memory(device: torch.device) -> None:
    """Let :func:`peak_memory` begin anew, where that can be: for CUDA devices, and on Linux for the process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # man 5 proc
