"""Requests that arrive together are submitted together. The event loop knows that more are about to come."""

from __future__ import annotations

import asyncio

from specbeam.engine.engine_thread import batching_window

QUIET_TURNS = 3
"""Turns of the event loop: in one of them a request is read, and in the next one its task begins. They take 0.1 ms."""


class Arrivals:
    """The requests that have come, and that were not submitted yet."""

    def __init__(self) -> None:
        self._count = 0
        self._pause: asyncio.Future[None] | None = None

    async def pause(self) -> None:
        """Wait until no further request comes at once."""
        self._count += 1
        if self._pause is None:
            self._pause = asyncio.ensure_future(self._quiet())
        await asyncio.shield(self._pause)

    async def _quiet(self) -> None:
        for _ in batching_window(lambda: self._count):
            for _ in range(QUIET_TURNS):
                await asyncio.sleep(0)
        self._count, self._pause = 0, None
