"""The server's state of one request: what the log and the counts need of it, and its turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from specbeam.engine import Request
from specbeam.server.call import Call
from specbeam.server.metrics import Tally

KEY = "specbeam"
"""The key of a request's scope that has its notes."""


@dataclass(eq=False)
class Notes:
    """Notes on a request, in its scope from the guard's check on.

    With replicas, the front and the replica have notes of their own. At the end the replica's go to the front.

    Attributes:
        id: in the log and in the answer's headers.
        status: of the answer. An answer that never begins is a failure of the server.
        outcome: None if the status says it.
        endpoint: the path of its route, for the counts; empty until :meth:`settle`.
        turn: lets the next request begin when it is closed. It is empty but in the process of the client's connection.
        call: its requests to the engine, until :meth:`settle`; None if there are none.
        prompts: for the log; None if the log has no prompts.
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
    def of(scope: Scope) -> Notes:
        notes: Notes = scope[KEY]
        return notes

    def take(self, theirs: Notes) -> None:
        """Add what a replica's notes have at the end. The status and the turn are the front's own."""
        self.endpoint, self.outcome = theirs.endpoint, theirs.outcome
        self.prompts, self.tally = theirs.prompts, theirs.tally

    def settle(self, scope: Scope, take_later: Callable[[Tally], object]) -> bool:
        """Make the notes of a request that has ended plain data, which another process can read.

        Args:
            take_later: is given the cost that is not in the tally. If the client went away, requests to the engine may
                be left, and end later.

        Returns:
            Whether nothing is left.
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
