"""Devices and dtypes by their names: the choice of both, and the memory there is.

PyTorch is imported only where a device other than the CPU is in question.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from specbeam.errors import SpecbeamError
from specbeam.system.extras import are_installed, require
from specbeam.system.machine import mapped_bytes, usable_memory

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The bytes of a number."""
DRIVERS = ("/dev/nvidiactl", "/dev/nvidia0", "/proc/driver/nvidia", "/dev/dxg", "/dev/kfd")
"""One of these is there if Linux has a driver for CUDA or ROCm. /dev/dxg is WSL's."""


def devices() -> list[str]:
    """The kinds of device there are on this machine."""
    if not are_installed("torch"):
        return ["cpu"]
    import torch

    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return [name for name, is_there in there.items() if is_there]


def _names() -> list[str]:
    """Each device of this machine, by the name that PyTorch has for it."""
    there = devices()
    if "cuda" not in there:
        return there
    import torch

    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    return [*(name for name in there if name != "cuda"), *gpus]


def choose_device(device: str) -> str:
    """The device of a name. It is tried out, so that a missing device is refused before anything is loaded.

    Raises:
        SpecbeamError: there is no such device. The message names the devices of this machine, and leaves out PyTorch's
            own text, which may take a kilobyte.
    """
    if device == "cpu" or (device == "auto" and not _has_gpu()):
        return "cpu"
    require(f"device={device!r}", "torch")
    import torch

    try:
        chosen = torch.device("cuda" if device == "auto" else device)
        if chosen.type == "meta":
            raise RuntimeError("it holds no data")
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise SpecbeamError(
            f"there is no device {device!r} here: give auto, or one of {', '.join(_names())}"
        ) from error
    return str(chosen)


def _has_gpu() -> bool:
    """Whether PyTorch has a CUDA device. It is imported only where it is installed and a driver is there."""
    has_driver = sys.platform == "win32" or any(Path(driver).exists() for driver in DRIVERS)
    if "torch" not in sys.modules and not (has_driver and are_installed("torch")):
        return False
    import torch

    return torch.cuda.is_available()


def name_of_gpu() -> str | None:
    """The name of the first CUDA device; None if there is none."""
    if not _has_gpu():
        return None
    import torch

    return torch.cuda.get_device_name()


def has_kernels(device: str) -> bool:
    """Whether the kernels for GPUs run on a CUDA device: NVIDIA's since Ampere, which multiply bfloat16."""
    import torch

    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)


def kind(device: str) -> str:
    """The kind of a device: "cuda" for "cuda:1"."""
    return device.partition(":")[0]


def choose_dtype(dtype: str, device: str, own: str) -> str:
    """The name of a dtype. "auto" gives the dtype that suits the device and the checkpoint."""
    if dtype == "auto":
        half = own if own in ("bfloat16", "float16") else "bfloat16"
        dtype = "float32" if kind(device) == "cpu" else half
    if dtype not in DTYPES:
        raise SpecbeamError(f"unknown dtype {dtype!r}: give auto, {', '.join(DTYPES)}")
    return dtype


def memory_for_caches(device: str) -> int:
    """Bytes that the engine may fill with caches.

    Four fifths of a GPU's free memory. Else a quarter of the memory that this process may use, but at most four fifths
    of its free memory.
    """
    free = free_memory(device)
    return int(0.8 * free) if kind(device) == "cuda" else int(min(usable_memory().total * 0.25, free * 0.8))


def free_memory(device: str) -> int:
    """Bytes of a device's memory that are left for this process, mapped weights not counted."""
    if kind(device) != "cuda":
        return usable_memory(mapped=mapped_bytes()).free
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def peak_memory(device: str) -> int | None:
    """Most bytes held so far: device memory on a GPU, the process's memory on a CPU; None if unknown."""
    if kind(device) == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_memory(device: str) -> None:
    """Let :func:`peak_memory` begin anew, where that can be: for CUDA devices, and on Linux for the process."""
    if kind(device) == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # man 5 proc
