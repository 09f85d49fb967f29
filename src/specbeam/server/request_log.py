"""What the server knows of one request: what its line of the log and the counts need, and its turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from specbeam.engine import Request
from specbeam.server.call import Call
from specbeam.server.usage import Tally

KEY = "specbeam"
"""The key of a request's scope that has its log."""


@dataclass(eq=False)
class RequestLog:
    """In the scope of a request from the middleware's check on.

    With replicas, the front and the replica have one each. At the end the front takes the replica's values.

    Attributes:
        id: in the log and in the answer's headers.
        status: of the answer. An answer that never begins is a failure of the server.
        outcome: None if it follows from the status.
        endpoint: the path of its route, for the counts; empty until :meth:`settle`.
        turn: lets the next request begin when it is closed. It is empty but in the process of the client's connection.
        call: its requests to the engine, until :meth:`settle`; None if there are none.
        prompts: None if the log has no prompts.
        tally: the cost of the call, from :meth:`settle` on.
    """

    id: str
    status: int = 500
    outcome: str | None = None
    endpoint: str = ""
    turn: ExitStack = field(default_factory=ExitStack)
    call: Call | None = None
    prompts: Sequence[Any] | None = None
    tally: Tally | None = None

    @staticmethod
    def of(scope: Scope) -> RequestLog:
        log: RequestLog = scope[KEY]
        return log

    def take(self, replica: RequestLog) -> None:
        """Add what a replica logged. It keeps its status and its turn."""
        self.endpoint, self.outcome = replica.endpoint, replica.outcome
        self.prompts, self.tally = replica.prompts, replica.tally

    def settle(self, scope: Scope, take_later: Callable[[Tally], object]) -> bool:
        """Replace the call by its cost, so that another process can read this log. Returns whether the cost is final.

        Args:
            take_later: is given the cost that is not in the tally. If the client went away, requests to the engine may
                end later.
        """
        self.endpoint = self.endpoint or getattr(scope.get("route"), "path", "other")
        if (call := self.call) is None:
            return True
        self.call = None
        left = [request for request in call.requests if request.outcome is None]
        self.tally = Tally.of(call, [request for request in call.requests if request not in left])
        unfinished = {*left}

        def end(request: Request) -> None:
            unfinished.remove(request)
            if not unfinished:
                take_later(Tally.of(call, left))

        for request in left:
            request.add_done_callback(end, asyncio.get_running_loop().call_soon_threadsafe)
        return not left
