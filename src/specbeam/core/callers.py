"""Functions of the caller that get token ids and scores: NumPy arrays, or tensors where they ask for these."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from specbeam.errors import SpecbeamError
from specbeam.system.extras import require

Function = TypeVar("Function", bound=Callable[..., Any])
THEIRS = "transformers.generation.logits_process"
"""The module of transformers' processors."""


def tensors(function: Function) -> Function:
    """Mark a ``logits_processor`` or a ``prefix_allowed_tokens_fn`` that works on tensors of PyTorch.

    It gets them on the device of the model, in place of NumPy arrays. A class or a function of your own may be marked
    where it is defined: ``@specbeam.tensors``. Processors of transformers need no mark.

    Returns:
        The function itself, with the attribute ``wants_tensors``, or another one that calls it if it takes no
        attributes.
    """
    try:
        function.wants_tensors = True  # type: ignore[attr-defined]
    except AttributeError:  # a method, or a function written in C
        return tensors(partial(function))  # type: ignore[return-value]
    return function


def wants_tensors(function: Any) -> bool:
    """Whether a function gets tensors: it is marked, or a processor of transformers."""
    return getattr(function, "wants_tensors", False) is True or any(
        base.__module__ == THEIRS for base in type(function).__mro__
    )


def call(option: str, function: Callable[..., Any], device: str, *args: Any) -> Any:
    """Call a function of the caller.

    Args:
        option: names the function in errors.
        device: where tensors go.
        args: its arguments. Arrays become tensors where the function wants them.
    """
    if wants_tensors(function):
        require(f"{option} of tensors", "torch")
        import torch

        def tensor(array: Any) -> torch.Tensor:  # as in backends/torch/tensors.py
            return torch.from_numpy(array).to(device, non_blocking=device.startswith("cuda"))

        with torch.inference_mode(False):  # the caller may keep the tensors, and train with them
            return function(*(tensor(x) if isinstance(x, np.ndarray) else x for x in args))
    try:
        return function(*args)
    except (AttributeError, TypeError) as error:
        if _took_an_array_for_a_tensor(error):
            raise SpecbeamError(
                f"{option} got NumPy arrays and failed: {error}. Use methods of arrays, or give "
                "specbeam.tensors(function)"
            ) from error
        raise


def _took_an_array_for_a_tensor(error: AttributeError | TypeError) -> bool:
    if isinstance(error, AttributeError):
        return isinstance(error.obj, np.ndarray | np.generic)
    message = str(error)
    return "numpy.ndarray" in message or "unexpected keyword argument 'dim'" in message


def as_scores(option: str, returned: Any, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The scores that a function returned, an array or a tensor on any device, as float32 of a shape."""
    array = returned.detach().cpu().float().numpy() if hasattr(returned, "detach") else returned
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiub" or array.shape != shape:
        is_numbers = isinstance(array, np.ndarray) and array.dtype.kind in "fiub"
        got = f"of shape {[*array.shape]}" if is_numbers else type(returned).__name__
        raise SpecbeamError(f"{option} returned a value {got}: give scores of shape {[*shape]}")
    with np.errstate(over="ignore"):
        return array.astype(np.float32, copy=False)


def returned_scores(function: Callable[[NDArray[np.float32]], Any], scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """What a function of a selection request makes of scores, float32 [n, vocab].

    Raises:
        SpecbeamError: it returned no scores of this shape.
    """
    return as_scores("a function of a selection request", function(scores), scores.shape)
