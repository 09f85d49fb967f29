"""Which requests are live, and which of their nodes the next passes evaluate."""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import count, islice
from operator import attrgetter
from typing import cast

from specbeam.backends.contract import AheadBackend, Backend, Encoder
from specbeam.cache.budget import Budget
from specbeam.core.tree import Nodes
from specbeam.engine.clients import Clients
from specbeam.engine.costs import TILE_NODES, Costs
from specbeam.engine.request_state import RequestState
from specbeam.engine.shared_source import together
from specbeam.errors import QueueFull
from specbeam.system.fork_guard import fork_guard
from specbeam.system.interrupts import HeldInterrupts, ReleasedInterrupts

Batch = list[tuple[RequestState, Nodes]]
"""Pending nodes of live requests, all of them for the same model."""

EQUAL_SHARE = 0.5
"""This share of a pass is divided equally. The rest goes first to requests with few pending nodes."""
MIN_PREFILL_SHARE = 0.5
"""Prefill gets at least this share of a pass's time, where a pass without it takes long."""
MAX_OVERTAKING_REQUESTS = 32
"""At most this many requests start before one that came first and waits for memory."""
MAX_SECONDS_AT_ONCE = 0.1
"""When the backend goes on by itself, tokens come several at a time. This is a limit for that."""
MAX_SECONDS_UNSEEN = 0.02
"""While a text is streamed, a token waits at most this long for later ones. It reaches its reader within 25 ms."""
PASSES_BEFORE_LARGER = 64
"""After a batch that was too large, this many passes succeed before larger ones are tried again."""
NUMBER = attrgetter("number")
STARTS_PER_OLDEST = 8
"""One start in this many belongs to the request that has waited longest, whatever its priority."""


class Scheduler:
    """Admits requests, divides passes among them, and keeps their slots within memory.

    Every live request advances: it gets nodes in each pass of the model that it waits for. Only if more requests wait
    for a model than ``max_batch_tokens``, they take turns: one node in ``ceil(waiting / max_batch_tokens)`` passes.
    While some requests write, the encoder reads the sources of one group per iteration, or some of its layers do: a
    long source, or short ones that it reads :func:`together`.

    Args:
        max_requests, max_batch_tokens, max_waiting, max_pass_seconds: as for :class:`specbeam.Engine`.

    Attributes:
        interrupts: wait while an iteration in the main thread is not in a pass.
        is_changing: an iteration is not in a pass. An error that leaves it then ends the engine.
    """

    def __init__(
        self,
        max_requests: int,
        max_batch_tokens: int,
        max_waiting: int | None,
        max_pass_seconds: float | None,
        budget: Budget,
        costs: Costs,
        clients: Clients[RequestState],
    ) -> None:
        self.max_requests = max_requests
        self.max_batch_tokens = max_batch_tokens
        self.max_waiting = max_waiting
        self.max_pass_seconds = max_pass_seconds
        self.budget = budget
        self.costs = costs
        self.clients = clients
        self.interrupts = HeldInterrupts()
        self.is_changing = False
        self._queue = Queue()
        self._unfinished: dict[RequestState, None] = {}
        self._next_deadline = math.inf
        self._numbers = count()
        self._live: dict[RequestState, None] = {}
        self._is_full = False  # admit nobody until a live request ends
        self._awaited: set[RequestState] = set()  # requests whose drafts the target waits for
        self._turns = 0  # nodes were chosen this many times for some request
        self._pass_tokens = max_batch_tokens  # the maximum number of nodes per pass, for now
        self._good_passes = 0  # since the last batch that was too large

    def add(self, request: RequestState) -> None:
        """Queue a request, if the queue has capacity for it. May be called from any thread, but by one at a time."""
        self.check_capacity()
        request.number = next(self._numbers)
        self._unfinished[request] = None
        self._queue.add(request)
        self.clients.halt[0] = 1

    def check_capacity(self) -> None:
        """Refuse a further request if the queue is full."""
        if self.max_waiting is not None and len(self._unfinished) >= self.max_requests + self.max_waiting:
            raise QueueFull(
                f"{len(self._unfinished)} requests are unfinished, which is all that max_requests={self.max_requests} "
                f"and max_waiting={self.max_waiting} allow: submit the request again later"
            )

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing left to do."""
        return not (self._live or self._queue)

    @property
    def live(self) -> int:
        """Requests that share passes."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return max(0, len(self._unfinished) - len(self._live))  # in an iteration, live requests may have ended

    def take_new(self) -> None:
        """Give the requests that were submitted since the last iteration their positions in the queue."""
        self.clients.halt[0] = 0
        for request in self._queue.take_new():
            self._next_deadline = min(self._next_deadline, request.deadline)

    def end_requests(self) -> None:
        """End requests that were cancelled, or whose time is over."""
        while self.clients.cancelled:
            self._end_early(self.clients.cancelled.popleft(), "cancelled")
        if (now := time.monotonic()) >= self._next_deadline:
            for request in list(self._unfinished):  # a copy: any thread may submit another
                if request.deadline <= now:
                    self._end_early(request, "timeout")
            self._next_deadline = min((request.deadline for request in list(self._unfinished)), default=math.inf)

    @fork_guard
    def cancel_all(self) -> None:
        """End all requests with the text so far."""
        for request in list(self._unfinished):
            self._end_early(request, "cancelled")

    def fail_all(self, failure: str) -> None:
        """End all requests with an error of their own, and free all slots, whatever state they are in."""
        self.budget.clear()
        for request in self._unfinished:
            if not request.done:
                request.fail(RuntimeError(failure))
        self._queue = Queue()
        self._unfinished.clear()
        self._live.clear()
        self.is_changing = False

    def _end_early(self, request: RequestState, finish_reason: str) -> None:
        request.end_early(finish_reason)
        self._unfinished.pop(request, None)

    def drop_done(self) -> None:
        """Drop live requests that are done."""
        for request in (done := [request for request in self._live if request.done]):
            del self._live[request]
            self._unfinished.pop(request, None)
        if done or not self._live:
            self._is_full = False
        self._count_sources()

    def admit(self) -> None:
        """Start waiting requests while there is room. While the first does not fit, a few smaller ones may overtake."""
        self.drop_done()
        if self._is_full or not self._queue:
            return
        needed = self.budget.held + sum(live.next_bytes for live in self._live)
        rows = [live.max_rows for live in self._live]
        index = 0
        while not self._is_full and len(self._live) < self.max_requests:
            request = self._queue.at(index)
            if request is None:
                break
            if request.done:  # ended early, or when it was preempted
                self._queue.remove(request)
                self._unfinished.pop(request, None)
            elif self._fits(request, needed, rows):
                needed += request.next_bytes + request.source_bytes + request.probe_bytes
                rows.append(request.max_rows)
                self._turns += 1
                request.last_turn = self._turns  # behind the requests that are live already
                for overtaken in islice(self._queue, index):
                    overtaken.overtaken += 1
                self._live[request] = None
                self._queue.start(request)
                request.open()
            elif max(index, request.overtaken) < MAX_OVERTAKING_REQUESTS:
                index += 1
            else:
                break
        self._count_sources()

    def _fits(self, request: RequestState, needed: int, rows: list[int]) -> bool:
        """Whether there is memory for an iteration of the live requests and this one. A request alone always tries.

        Args:
            needed, rows: bytes and rows of logits that the live requests need.
        """
        if not rows:
            return True
        if not self.budget.holds_logits([*rows, request.max_rows]):
            return False
        lacking = needed + request.next_bytes + request.source_bytes + request.probe_bytes - self.budget.capacity
        return lacking <= 0 or lacking <= request.shareable_bytes()

    def gather(self) -> list[Batch]:
        """The passes of the next iteration: of each draft model, then of the target.

        The target waits for drafts, so that one pass serves all.
        """
        by_model: defaultdict[tuple[bool, int], list[RequestState]] = defaultdict(list)
        live = [request for request in self._live if not request.done]
        waiting = self._wait_to_read(live)
        for index, request in enumerate(live):
            waits = request.model.slots.is_fresh and request.await_prefix(live[:index])
            if not (request.done or waits or request in waiting):
                by_model[not request.step.drafting, id(request.model.backend)].append(request)
        is_alone = sum(map(len, by_model.values())) == 1
        batches: list[Batch] = []
        for (for_target, _), requests in sorted(by_model.items()):
            if not for_target or not self._waits_for(batches):
                batches.append(self._divide(requests, is_alone))
        return self._make_room(batches)

    def _wait_to_read(self, live: list[RequestState]) -> set[RequestState]:
        """The requests whose sources are not read next: an encoder may take long, and the requests that write wait."""
        unread = {request: source for request in live if (source := request.model.unread_source) is not None}
        if not unread or len(unread) == len(live):
            return set()
        backend = next(iter(unread)).model.backend
        of_backend = [source for request, source in unread.items() if request.model.backend is backend]
        (group,) = (group for group in together(cast(Encoder, backend), of_backend) if of_backend[0] in group)
        return {one for one, source in unread.items() if one.model.backend is not backend or source not in group}

    def _waits_for(self, drafts: list[Batch]) -> bool:
        """Whether the target waits for these passes of draft models.

        It does not wait for a draft model that prefills a long prompt or reads a source, nor for requests that began to
        draft later than the wait. So it waits for at most as many iterations as the longest draft has tokens, whatever
        requests come and go.
        """
        parts = (part for batch in drafts for part in batch if part[0].model.unread_source is None)
        drafting = {request for request, nodes in parts if len(nodes) == len(request.pending)}
        if self._awaited:
            drafting &= self._awaited
        self._awaited = drafting
        return bool(drafting)

    def _divide(self, requests: list[RequestState], is_alone: bool) -> Batch:
        """Divide a pass among requests, so that no long prompt and no crowd keeps others from advancing.

        Args:
            is_alone: no other request waits for this pass.
        """
        capacity = self._pass_tokens
        if len(requests) > capacity:  # they take turns
            requests = sorted(requests, key=lambda request: request.last_turn)[:capacity]
        wanted = [len(request.pending) for request in requests]
        if self.max_pass_seconds is not None and not is_alone:
            prefilling = [index for index, request in enumerate(requests) if request.model.is_prefilling]
            others = sum(wanted) - sum(wanted[index] for index in prefilling)
            in_time = max(self._prefill_nodes(requests[0].model.backend, others), len(prefilling))
            shares = _share_out([wanted[index] for index in prefilling], in_time)
            for index, count in zip(prefilling, shares, strict=True):
                wanted[index] = count
        counts = _share_out(wanted, capacity)
        for request in requests:
            self._turns += 1
            request.last_turn = self._turns
        return [(request, request.pending[:count]) for request, count in zip(requests, counts, strict=True) if count]

    def _prefill_nodes(self, backend: Backend, others: int) -> int:
        """The maximum number of prompt nodes for a pass beside other nodes, so that these do not wait for long."""
        assert self.max_pass_seconds is not None
        times = self.costs(backend, ahead=True)
        expected = times.expected(max(1, others)) if times.knows(others) else 0.0
        seconds = max(self.max_pass_seconds, expected / (1 - MIN_PREFILL_SHARE))
        return max(TILE_NODES, self.costs(backend).nodes_within(seconds) - others)

    def max_encoder_seconds(self) -> float:
        """About how long a part of an encoder's pass may take: as long as it wants while all wait for it."""
        waiting = sum(request.model.unread_source is not None for request in self._live)
        return math.inf if self.max_pass_seconds is None or waiting == len(self._live) else self.max_pass_seconds

    def passing(self) -> Passing:
        """A pass runs in this block. As it can be repeated, it may be left at any moment."""
        return Passing(self)

    def passes_at_once(self, batch: Batch) -> int:
        """How many passes the backend may run by itself. Each is over the tokens that the one before has chosen.

        More than one only if all live requests take part, and can go on without a look at their tokens. Once
        ``Clients.halt`` is set, the pass that runs is the last.
        """
        backend = batch[0][0].model.backend
        if len(batch) < len(self._live) or not hasattr(backend, "forward_ahead"):
            return 1
        at_once = cast(AheadBackend, backend).passes_at_once
        passes = min(at_once, *(1 + request.max_ahead(nodes) for request, nodes in batch))
        if passes > 1:
            seconds = min(MAX_SECONDS_AT_ONCE, self._next_deadline - time.monotonic())
            nodes = sum(len(nodes) for _, nodes in batch)
            passes = min(passes, int(seconds / self.costs(backend, ahead=True).expected(nodes)))
            if any(request.request.is_read for request, _ in batch):
                times = self.costs(backend, ahead=True)
                passes = min(passes, 1 + int(MAX_SECONDS_UNSEEN / times.expected(nodes)) if times.knows(nodes) else 1)
            free_bytes = (self.budget.capacity if len(batch) > 1 else self.budget.cache_bytes) - self.budget.held
            while (needed := self._growth_bytes(batch, max(0, passes - 1))) > free_bytes and passes > 1:
                passes -= 1
            self.budget.evict(free_bytes - needed)
        return max(1, passes)

    @staticmethod
    def _growth_bytes(batch: Batch, ahead: int = 0) -> int:
        """Bytes that a pass over a batch takes, and further passes, beside the bytes that its requests hold."""
        return sum(request.growth_bytes(nodes, ahead) for request, nodes in batch)

    def _count_sources(self) -> None:
        self.budget.source_bytes = sum(request.source_bytes for request in self._live)
        if len(self._live) > 1:  # a request alone holds its scores of attention beside the cache, as it does logits
            self.budget.source_bytes += sum(request.probe_bytes for request in self._live)

    def _make_room(self, batches: list[Batch]) -> list[Batch]:
        """Evict prefixes, then preempt the newest requests, while slots would outgrow the memory.

        Preempted requests are left out of the passes.
        """
        while True:
            free_bytes = self.budget.capacity if len(self._live) > 1 else self.budget.cache_bytes
            free_bytes -= self.budget.held
            free_bytes -= sum(map(self._growth_bytes, batches))
            self.budget.evict(free_bytes)
            if free_bytes >= 0:
                return [batch for batch in batches if batch]
            if not self.preempt_newest():
                (request,) = self._live
                request.make_do(self.budget)
                return []
            batches = [self.still_live(batch) for batch in batches]

    def preempt_newest(self) -> bool:
        """Take the slots of the newest request. It goes on once another has ended.

        Its cache is then recomputed, with the same results. It waits at its old position in the queue, so the oldest
        request is never preempted, and ends.

        Returns:
            Whether a request was preempted: there must be another.
        """
        self._is_full = len(self._live) > 1
        if self._is_full:
            newest = max(self._live, key=lambda one: one.number)
            newest.preempt()
            self._queue.put_back(newest)
            del self._live[newest]
            self._count_sources()
        return self._is_full

    def still_live(self, batch: Batch) -> Batch:
        """A batch without the requests that were preempted."""
        return [(request, nodes) for request, nodes in batch if request in self._live]

    def succeeded(self) -> None:
        """A pass went well. After many of them, larger passes are tried again."""
        self._good_passes += 1
        if self._good_passes % PASSES_BEFORE_LARGER == 0:
            self._pass_tokens = min(2 * self._pass_tokens, self.max_batch_tokens)

    def was_too_large(self, batch: Batch) -> None:
        """A pass failed over this batch, and went well over its parts."""
        self._pass_tokens = min(self._pass_tokens, max(1, sum(len(nodes) for _, nodes in batch) // 2))
        self._good_passes = 0


class Passing(ReleasedInterrupts):
    """The block of :meth:`Scheduler.passing`. Between passes the engine changes, and interrupts wait."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler.interrupts)
        self._scheduler = scheduler

    def __enter__(self) -> None:
        self._scheduler.is_changing = False
        super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        super().__exit__(kind)
        if kind is None or issubclass(kind, Exception):  # an error goes to the requests
            self._scheduler.is_changing = True


def _share_out(counts: list[int], capacity: int) -> list[int]:
    """How many nodes each request gets of a pass. Its capacity is at least one node for each request."""
    if sum(counts) <= capacity:
        return counts
    equal = max(1, int(capacity * EQUAL_SHARE) // len(counts))
    shares = [min(equal, count) for count in counts]
    capacity -= sum(shares)
    for index in sorted(range(len(counts)), key=counts.__getitem__):
        more = min(capacity, counts[index] - shares[index])
        shares[index] += more
        capacity -= more
    return shares


class Queue:
    """Waiting requests. Lower priorities start first, and equal ones in the order of submission.

    Urgent requests do not starve the others. A request starts after at most ``STARTS_PER_OLDEST`` starts for itself and
    for each request that was submitted earlier and still waits.
    """

    def __init__(self) -> None:
        self._new: deque[RequestState] = deque()  # any thread appends
        self._lines: dict[int, deque[RequestState]] = {}  # by priority, in the order of submission
        self._starts = 0  # since the request that had waited longest started

    def __len__(self) -> int:
        return len(self._new) + sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[RequestState]:
        """The requests in the order of their turns."""
        oldest = self._oldest if self._starts >= STARTS_PER_OLDEST - 1 else None
        if oldest is not None:
            yield oldest
        for priority in sorted(self._lines):
            yield from (request for request in self._lines[priority] if request is not oldest)

    def at(self, index: int) -> RequestState | None:
        """The request at an index in the order of turns."""
        return next(islice(self, index, None), None)

    def add(self, request: RequestState) -> None:
        """Queue a new request, whose number is the highest so far. May be called from any thread."""
        self._new.append(request)

    def take_new(self) -> Iterator[RequestState]:
        """Give new requests their positions in the queue, and yield them."""
        while self._new:
            request = self._new.popleft()
            self._lines.setdefault(request.priority, deque()).append(request)
            yield request

    def put_back(self, request: RequestState) -> None:
        """Queue a preempted request again, at its old position."""
        insort(self._lines.setdefault(request.priority, deque()), request, key=NUMBER)

    def start(self, request: RequestState) -> None:
        """Remove a request that starts."""
        self._starts = 0 if request is self._oldest else self._starts + 1
        self.remove(request)

    def remove(self, request: RequestState) -> None:
        """Remove a request that ended while it waited."""
        line = self._lines[request.priority]
        line.remove(request)
        if not line:
            del self._lines[request.priority]

    @property
    def _oldest(self) -> RequestState | None:
        return min((line[0] for line in self._lines.values()), key=NUMBER, default=None)
