"""Requests that arrive together are submitted together, so that their prompts share passes.

Otherwise a pass would begin with the first request of a crowd, and the others would wait for its end.
"""

from __future__ import annotations

import asyncio
import time

QUIET_TURNS = 3
"""Turns of the event loop. In one of them a request is read, and in the next one its task begins."""
MAX_SECONDS = 0.01
"""A request waits at most about this time for further ones. A single one waits for the quiet turns only: 0.1 ms."""


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
        end = time.monotonic() + MAX_SECONDS
        seen = 0
        while self._count > seen and time.monotonic() < end:
            seen = self._count
            for _ in range(QUIET_TURNS):
                await asyncio.sleep(0)
        self._count, self._pause = 0, None
