"""Errors that end one request, made ready to be kept until somebody asks for its result."""

from __future__ import annotations

import traceback

import torch


def is_out_of_memory(error: Exception) -> bool:
    """Whether there was no memory, on a GPU or on the CPU."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


def forget_frames(error: Exception) -> Exception:
    """The error with its traceback as text: frames would keep alive the tensors that they worked on."""
    if error.__traceback__ is not None:
        error.add_note("".join(traceback.format_tb(error.__traceback__)))
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)
