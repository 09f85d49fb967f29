"""A CUDA device that is not there: what would run on it is checked by PyTorch's fake tensors, and computed on the CPU.

Fake tensors have a device, a shape and a dtype, but no values. Here each has a twin on the CPU with its values. So
whatever needs values on the host goes on as on a GPU, and each time that the host would wait for the GPU is noted.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
CPU = torch.device("cpu")
COPIES = {aten._to_copy.default, aten.copy_.default}
READS = {aten._local_scalar_dense.default, aten.equal.default}


@contextmanager
def fake_cuda() -> Iterator[Twins]:
    """Let the device "cuda:0" be there, for this thread. Tensors on the CPU are as ever."""
    guards = device_guards()
    own = guards[1]
    guards[1] = own or guards[0]
    try:
        with FakeTensorMode() as fakes, Twins(fakes) as twins:
            yield twins
    finally:
        guards[1] = own


class Twins(TorchDispatchMode):
    """Runs each operation of the device on fake tensors and on their twins.

    Attributes:
        waits: the operations for which the host would wait until the device has done all before them.
    """

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.fakes = fakes
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args)
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        target = kwargs.get("device") or (operands[0].device if operands else CPU)
        on_device = {is_fake(operand) for operand in operands if operand.dim() or is_fake(operand)}
        if True not in on_device and target.type != "cuda":
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func in READS or (func in COPIES and on_device | {target.type == "cuda"} == {False, True}):
            if not (kwargs.get("non_blocking") or args[2:] == (True,)):
                self.waits.append(str(func))
        elif len(on_device) == 2:
            raise AssertionError(f"{func} has operands on the device and on the host: {operands}")
        with unset_fake_temporarily():
            on_cpu = {**kwargs, "device": CPU} if "device" in kwargs else kwargs
            result = func(*map_tensors(twin, args), **map_tensors(twin, on_cpu))
        if func in READS or target.type != "cuda":
            return result
        fake = func(*map_tensors(self.fake, args), **map_tensors(self.fake, kwargs))
        with unset_fake_temporarily():
            for one, real in zip(tree_leaves(fake), tree_leaves(result), strict=True):
                if isinstance(one, Tensor):
                    assert (one.shape, one.device.type) == (real.shape, "cuda"), func
                    one.twin = real.to(one.dtype)  # the statistics of a norm in half precision differ
        return fake

    def fake(self, tensor: Tensor) -> Tensor:
        return tensor if is_fake(tensor) else self.fakes.from_tensor(tensor)


def device_guards() -> Any:
    """PyTorch's guards by the number of the kind of device: the CPU's, which does nothing, and CUDA's.

    A PyTorch without CUDA has no guard for it, and refuses ``x.to("cuda:0")`` before fake tensors see it. Where PyTorch
    has CUDA and the machine has not, FakeTensorMode itself sets a guard that does nothing.
    """
    name = {"linux": "libc10.so", "darwin": "libc10.dylib"}.get(sys.platform)
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / str(name)))
        return (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    except (OSError, ValueError):
        pytest.skip("no guard can be set for a device that is not there")


@cache
def is_composite(func: Any) -> bool:
    """Whether an operation is a function of others, which may be copies."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def twin(tensor: Any) -> Any:
    """The values of a tensor, on the CPU."""
    return tensor.twin if is_fake(tensor) else tensor


def map_tensors(change: Any, given: Any) -> Any:
    return tree_map_only(Tensor, change, given)
