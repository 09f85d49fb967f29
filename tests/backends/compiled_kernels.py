"""A program: compile each kernel that a few passes launch, for a GPU that is not there.

    python -m tests.backends.compiled_kernels H100 FOLDER 1 3 40

The kernels are compiled with the arguments of real passes of a model over these numbers of nodes, and not launched. It
prints their names. It fails where Triton refuses one, or where one needs more shared memory than the GPU has.
"""

import sys
from unittest import mock

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from specbeam.backends.torch import kernels
from specbeam.backends.torch.gpu import GpuBackend
from specbeam.cache.slots import Slots
from specbeam.checkpoints import locate, open_checkpoint
from specbeam.core.selection import SelectionRequest
from specbeam.core.tree import Tree

GPUS = {"H100": (90, 227), "A100": (80, 163), "RTX 4090": (89, 99)}
"""Compute capability, and kilobytes of shared memory for a program (CUDA C++ Programming Guide)."""


class Utils:
    def __init__(self, shared):
        self.shared = shared

    def load_binary(self, name, kernel, shared, device):
        print(name, shared)
        return None, object(), 32, 0, 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": self.shared, "multiprocessor_count": 132}


class Driver:
    """Has a target and launches nothing."""

    def __init__(self, capability, kilobytes):
        self.utils = Utils(kilobytes * 1024)
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def launcher_cls(self, source, metadata):
        return lambda *args: None


def main(gpu, folder, *counts):
    driver.set_active(Driver(*GPUS[gpu]))
    kernels.shared_bytes = lambda device: GPUS[gpu][1] * 1024
    backend = GpuBackend(open_checkpoint(locate(folder)), "cpu", "bfloat16")
    tree = Tree([*range(70)])
    slots = Slots(tree, backend)
    nodes = slots.missing([tree.tip])
    backend.forward([slots.tree_batch(nodes, np.array([len(nodes) - 1]))])
    for count in map(int, counts):
        nodes = np.array(tree.add([tree.tip] * count, [*range(count)]))
        logits = backend.forward([slots.tree_batch(nodes, np.arange(count))])
        kernels.summarize(logits)
    with mock.patch("specbeam.backends.torch.gpu.MAX_SHARED_TILES", 0):
        backend.forward([slots.tree_batch(nodes, np.arange(count))])
    kernels.highest(torch.zeros(3, 9000), 8)
    kernels.gumbel(np.zeros(3, np.uint64), *np.zeros((2, 3), np.uint32), 9000, "cpu")
    more = slots.tree_batch(nodes[:1], np.arange(1), None, None, 1)
    backend.forward_ahead([more], [SelectionRequest()], [None], 2, [1], np.zeros(1, np.int32))


if __name__ == "__main__":
    main(*sys.argv[1:])
