"""Which requests are live, and which of their nodes the next pass evaluates."""

from __future__ import annotations

from collections import deque

from specbeam.engine.request import Request
from specbeam.tree import Nodes

Batch = list[tuple[Request, Nodes]]
"""Pending nodes of live requests, all of them for the same model."""


class Scheduler:
    """Admits requests first come, first served, and fills passes with the smallest wishes first.

    Args:
        max_requests, max_batch_tokens, max_cache_tokens: as for :class:`specbeam.Engine`.
    """

    def __init__(self, max_requests: int, max_batch_tokens: int, max_cache_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_batch_tokens = max_batch_tokens
        self.max_cache_tokens = max_cache_tokens
        self._waiting: deque[Request] = deque()
        self._live: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request. May be called from any thread."""
        self._waiting.append(request)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing left to do."""
        return not (self._live or self._waiting)

    @property
    def used_slots(self) -> int:
        """Slots in use by live requests."""
        return sum(request.used_slots for request in self._live)

    def end_cancelled(self) -> None:
        """Give cancelled requests their result."""
        for request in [*self._live, *self._waiting.copy()]:
            request.end_if_cancelled()

    def admit(self) -> None:
        """Start waiting requests while there is room.

        Every request counts with the most slots it may need, so a live request never runs out of room.
        """
        self.drop_done()
        room = self.max_cache_tokens - sum(request.most_slots for request in self._live)
        while self._waiting and len(self._live) < self.max_requests:
            request = self._waiting[0]
            if not request.done and request.most_slots > room:
                return
            self._waiting.popleft()
            if not request.done:
                room -= request.most_slots
                self._live.append(request)
                request.start()

    def gather(self) -> Batch:
        """The nodes of the next pass. Requests with few pending nodes come first, so a long prompt delays nobody.

        While any request waits for a draft model, draft passes come first: then one pass of the target serves all.
        """
        waiting = [request for request in self._live if not request.done]
        if any(request.drafting for request in waiting):
            waiting = [request for request in waiting if request.drafting]
        batch: Batch = []
        room = self.max_batch_tokens
        for request in sorted(waiting, key=lambda r: len(r.pending)):
            nodes = request.pending[:room]
            if not len(nodes):
                break
            if batch and request.backend is not batch[0][0].backend:  # another draft model, whose turn comes later
                continue
            room -= len(nodes)
            batch.append((request, nodes))
        return batch

    def drop_done(self) -> None:
        """Forget live requests that are done."""
        self._live = [request for request in self._live if not request.done]
