"""Forward passes over the nodes of several requests. A failure ends only the request that causes it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from specbeam.engine.costs import pass_times
from specbeam.engine.failures import forget_frames
from specbeam.engine.request import Request
from specbeam.engine.scheduler import Batch
from specbeam.tree import Nodes


def run_pass(batch: Batch, one_torch_thread: bool) -> None:
    """Evaluate a batch in one pass, and let each request go on with its logits.

    Args:
        one_torch_thread: let the requests use one thread of PyTorch, because the target's passes have their own.
    """
    for request, nodes, logits in _evaluate(batch):
        with _one_torch_thread(one_torch_thread):
            request.receive(nodes, logits)


def _evaluate(batch: Batch) -> Iterator[tuple[Request, Nodes, Tensor]]:
    """One pass over the batch. If it fails, each request is tried alone. One that fails alone is ended."""
    backend, start = batch[0][0].backend, time.perf_counter()
    try:
        rows = _forward(batch)
    except Exception as error:
        failure = forget_frames(error)
    else:
        for (request, nodes), row in zip(batch, rows, strict=True):
            yield request, nodes, row
        # The time includes the use of the logits by the requests: choosing among them has a cost, too.
        pass_times(backend).add(sum(len(nodes) for _, nodes in batch), time.perf_counter() - start)
        return
    # Outside of the except block: inside it, Python would hold on to the memory of the failed pass.
    if len(batch) == 1:
        batch[0][0].fail(failure)
    else:
        for one in batch:
            yield from _evaluate([one])


def _forward(batch: Batch) -> tuple[Tensor, ...]:
    """The logits of each request, float32 [wanted nodes, vocab]."""
    segments = [request.segment(nodes) for request, nodes in batch]
    backend = batch[0][0].backend
    start = time.perf_counter()
    logits = backend.forward(segments)
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)
    seconds = time.perf_counter() - start
    together = sum(len(s.tokens) for s in segments)
    for request, nodes in batch:
        request.spend(seconds * len(nodes) / together)
    return torch.split(logits, [len(s.wanted) for s in segments])


@contextmanager
def _one_torch_thread(wanted: bool) -> Iterator[None]:
    """Keep PyTorch's threads out of the way of a backend's own: idle, they would spin on its cores."""
    before = torch.get_num_threads()
    if not wanted or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
