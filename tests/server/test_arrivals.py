"""Requests that come together are submitted together."""

import asyncio

from specbeam.server import arrivals
from specbeam.server.arrivals import Arrivals


async def crowd(size):
    """The acts of the requests of a crowd. Each request comes a turn of the event loop after the one before."""
    together, done = Arrivals(), []

    async def request(number):
        for _ in range(number):
            await asyncio.sleep(0)
        done.append("comes")
        await together.pause()
        done.append("goes on")

    await asyncio.gather(*map(request, range(size)))
    return done


def test_requests_that_come_one_after_the_other_go_on_together(monkeypatch):
    monkeypatch.setattr(arrivals, "MAX_SECONDS", 60)
    assert asyncio.run(crowd(8)) == ["comes"] * 8 + ["goes on"] * 8


def test_requests_that_never_end_to_come_hold_up_nobody(monkeypatch):
    monkeypatch.setattr(arrivals, "MAX_SECONDS", 0)
    assert asyncio.run(crowd(100)).index("goes on") < 100
