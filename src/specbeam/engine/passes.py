"""Forward passes over the nodes of several requests. A failure ends only the request that causes it."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from functools import cache
from itertools import accumulate, chain, islice, pairwise
from operator import attrgetter
from typing import Any, cast

import numpy as np

from specbeam.backends.contract import AheadBackend, Encoder
from specbeam.core.selection import Logits, Selection
from specbeam.engine.model_state import ModelState
from specbeam.engine.scheduler import Batch, Scheduler
from specbeam.engine.shared_source import SharedSource, encode, together
from specbeam.errors import forget_frames, is_out_of_memory

NO_LOGITS = np.empty((0, 0), np.float32)
NORMALIZERS = attrgetter("normalizers")


def run_pass(batch: Batch, scheduler: Scheduler, one_torch_thread: bool) -> bool:
    """Evaluate the requests of a batch that are still live in one pass, and let each go on with its logits.

    If the pass fails, its halves are tried, and a request that fails alone is ended. If it fails for lack of memory,
    cached prefixes are evicted instead, and then the newest of several live requests is preempted.

    A request whose logits are not finite is tried alone: where one mask is over all trees, another tree's NaN may have
    come in, since 0 times NaN is NaN.

    Args:
        scheduler: learns which batches are too large.
        one_torch_thread: let the requests use one thread of PyTorch, because the target's passes have their own.

    Returns:
        Whether every request got its logits.
    """
    if not (batch := scheduler.still_live(batch)):
        return True
    backend = batch[0][0].model.backend  # a request that goes on may ask its other model
    failure, retries = None, list[Batch]()
    try:
        batch = _read_sources(batch, scheduler)
        if not batch:
            return True
        start = time.perf_counter()
        logits, parts, selections, passes = _forward(batch, scheduler)
    except Exception as error:
        failure = forget_frames(error)
    else:
        with _one_thread() if one_torch_thread and "torch" in sys.modules else nullcontext():
            if _are_finite(selections):
                for (request, nodes), rows, own in zip(batch, parts, selections, strict=True):
                    request.receive(nodes, logits, rows, own, passes - 1)
            else:
                retries = [[entry] for entry in _receive_finite(batch, logits, parts, selections, passes - 1)]
        # The time includes the use of the logits by the requests: the selections have a cost, too.
        seconds = (time.perf_counter() - start) / passes
        scheduler.costs(backend, ahead=passes > 1).add(sum(len(nodes) for _, nodes in batch), seconds)
        scheduler.succeeded()
    # Outside of the except block: inside it, Python would hold on to the memory of the failed pass.
    if failure is not None:
        if len(batch) == 1:
            if not (is_out_of_memory(failure) and (scheduler.budget.evict() or scheduler.preempt_newest())):
                batch[0][0].fail(failure)
            return False
        retries = [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
    all_evaluated = True
    for part in retries:
        all_evaluated &= run_pass(part, scheduler, one_torch_thread)
    if failure is not None and all_evaluated:
        scheduler.was_too_large(batch)
    return all_evaluated


def _read_sources(batch: Batch, scheduler: Scheduler) -> Batch:
    """Let the encoder read the sources that requests lack. Its time depends on these, so no pass's cost counts it.

    Returns:
        The batch without requests whose sources take a further pass of the encoder.
    """
    readers: dict[SharedSource, list[ModelState]] = {}
    for request, _ in batch:
        if (source := request.model.unread_source) is not None:
            readers.setdefault(source, []).append(request.model)
    if not readers:
        return batch
    encoder = cast(Encoder, batch[0][0].model.backend)
    for group in together(encoder, readers):
        _encode(encoder, {source: readers[source] for source in group}, scheduler)
    return [(request, nodes) for request, nodes in batch if request.model.unread_source is None]


def _encode(encoder: Encoder, readers: dict[SharedSource, list[ModelState]], scheduler: Scheduler) -> None:
    """Let the encoder read sources together, or some of its layers where others wait, and place what it gives."""
    start = time.perf_counter()
    with scheduler.passing():
        encode(encoder, [*readers], scheduler.max_encoder_seconds())
    models = [model for some in readers.values() for model in some]
    if next(iter(readers)).is_read(encoder):  # then all are
        states = [source.read(encoder)[1] for source, some in readers.items() for _ in some]
        slots = [model.place_source() for model in models]
        with scheduler.passing():
            placed = encoder.place(states, slots)
        for model, source in zip(models, placed, strict=True):
            model.source = source
    for model in models:
        model.seconds += (time.perf_counter() - start) / len(models)


def _forward(batch: Batch, scheduler: Scheduler) -> tuple[Logits, list[slice], list[list[Selection]], int]:
    """Run a pass, or several where the backend goes on by itself.

    Returns:
        The logits, [n, vocab], each request's rows of them, and the selections that it asked for. Last, the
        number of passes. If several were allowed, there are no logits, and selections have rows for each pass.
    """
    backend = batch[0][0].model.backend
    start = time.perf_counter()
    passes = scheduler.passes_at_once(batch)
    segments = [request.tree_batch(nodes, passes - 1) for request, nodes in batch]
    parts = [slice(*ends) for ends in pairwise(accumulate((len(s.wanted) for s in segments), initial=0))]
    requested = [request.selection_requests(nodes) for request, nodes in batch]
    asked = [(part, one) for part, some in zip(parts, requested, strict=True) for one in some]
    if passes > 1:
        ends = frozenset[int]().union(*(request.step.ends for request, _ in batch))
        about_nodes, beams = [one for _, one in asked], [request.step.beams for request, _ in batch]
        with scheduler.passing():
            found = cast(AheadBackend, backend).forward_ahead(
                segments, about_nodes, beams, passes, ends, scheduler.clients.halt
            )
        logits, passes = NO_LOGITS, len(found[0].tokens) // len(segments[0].tokens)
    else:
        with scheduler.passing():
            logits = backend.forward(segments)
            found = backend.choose(logits, asked)
    selections = iter(found)
    seconds = time.perf_counter() - start
    together = sum(len(s.tokens) for s in segments)
    ahead = [max(1, len(s.wanted)) for s in segments]  # nodes of the next pass, roughly: one in prefill
    for (request, nodes), own in zip(batch, ahead, strict=True):
        request.spend(seconds * len(nodes) / together, sum(ahead) - own, len(batch))
    return logits, parts, [[*islice(selections, len(some))] for some in requested], passes


def _are_finite(selections: list[list[Selection]]) -> bool:
    """Whether all requests have selections, all from finite logits. Checked together: one by one is slow in Python."""
    return all(selections) and bool(
        np.isfinite(np.concatenate([*map(NORMALIZERS, chain.from_iterable(selections))])).all()
    )


def _receive_finite(
    batch: Batch, logits: Logits, parts: list[slice], selections: list[list[Selection]], ahead: int
) -> Batch:
    """Let the requests go on whose logits are finite. Returns the part of the batch that has to be tried alone."""
    received, retries = list(zip(batch, parts, selections, strict=True)), Batch()
    all_finite = all(request.is_finite(logits, rows, own) for (request, _), rows, own in received)
    for (request, nodes), rows, own in received:  # without rows, nobody can tell
        if all_finite or (rows.start < rows.stop and request.is_finite(logits, rows, own)):
            request.receive(nodes, logits, rows, own, ahead)
        elif len(batch) == 1:
            request.refuse(nodes, logits, rows, own)
        else:
            retries.append((request, nodes))
    return retries


def _one_thread() -> Any:
    """Keep PyTorch's threads out of the way of a backend's own: idle, they would spin on its cores.

    Only the calling thread is limited. ``torch.set_num_threads`` would limit threads that begin meanwhile, too.
    """
    pools = _openmp()
    return nullcontext() if pools is None else pools.limit(limits=1)


@cache
def _openmp() -> Any:
    """The thread pools of OpenMP; None without threadpoolctl, where PyTorch is there for another package."""
    try:
        from threadpoolctl import ThreadpoolController
    except ModuleNotFoundError:
        return None
    return ThreadpoolController().select(user_api="openmp")
