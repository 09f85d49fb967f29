"""Errors that end one request, made ready to be kept until somebody asks for its result."""

from __future__ import annotations

import sys
import traceback

import numpy as np
from numpy.typing import NDArray

from specbeam.errors import NotFinite, SpecbeamError


def is_out_of_memory(error: Exception) -> bool:
    """Whether there was no memory, on a GPU or on the CPU."""
    on_gpu = getattr(sys.modules.get("torch"), "OutOfMemoryError", ())  # nobody raises it without PyTorch
    return isinstance(error, (MemoryError, on_gpu)) or "DefaultCPUAllocator" in str(error)


def forget_frames(error: Exception) -> Exception:
    """The error with its traceback as text: frames would keep alive the tensors that they worked on."""
    if error.__traceback__ is not None:
        error.add_note("".join(traceback.format_tb(error.__traceback__)))
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def out_of_memory(nodes: int) -> SpecbeamError:
    """There was no memory for a request alone, with this many nodes in its tree."""
    return SpecbeamError(
        f"out of memory with {nodes} nodes in the request's tree: ask for fewer new tokens, a shorter prompt, or a "
        "smaller dtype"
    )


def not_finite(source: str, length: int, logits: NDArray[np.float32]) -> NotFinite:
    """The logits of a node, float32 [1, vocab], are not finite, after this many tokens."""
    found = "NaN" if np.isnan(logits).any() else "+inf" if logits.max() > 0 else "-inf alone"
    return NotFinite(
        f"no token has a probability after {length} tokens, because the logits of {source} hold {found}: "
        "check its weights, or give dtype='float32' if numbers overflow",
        option="dtype",
    )
