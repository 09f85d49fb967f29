"""The order in which waiting requests start: by priority, then first come, first served."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter

from specbeam.engine.request_state import RequestState

NUMBER = attrgetter("number")
STARTS_PER_OLDEST = 8
"""One start in this many belongs to the request that has waited longest, whatever its priority."""


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

    def at(self, place: int) -> RequestState | None:
        """The request at a place in the order of turns."""
        return next(islice(self, place, None), None)

    def add(self, request: RequestState) -> None:
        """Queue a new request, whose number is the highest so far. May be called from any thread."""
        self._new.append(request)

    def take_new(self) -> Iterator[RequestState]:
        """Give new requests their places, and yield them."""
        while self._new:
            request = self._new.popleft()
            self._lines.setdefault(request.priority, deque()).append(request)
            yield request

    def put_back(self, request: RequestState) -> None:
        """Queue a preempted request again, at its old place."""
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
