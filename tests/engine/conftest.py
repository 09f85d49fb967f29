"""Helpers of the engine's tests."""

import gc

import pytest

from specbeam.cache.pool import pool_of


@pytest.fixture
def watch(monkeypatch):
    """``watch(lm, look)`` returns the number of nodes of each pass from now on.

    ``look(segments)`` is called before the pass. It may raise an error in its place.
    """

    def watch(lm, look=lambda segments: None):
        forward, nodes = lm.backend.forward, []

        def watched(segments):
            nodes.append(sum(len(segment.tokens) for segment in segments))
            look(segments)
            return forward(segments)

        monkeypatch.setattr(lm.backend, "forward", watched)
        return nodes

    return watch


def in_use(lm):
    """Slots that engines hold or cache, without the slots of engines that are gone."""
    gc.collect()
    return pool_of(lm.backend).in_use


def ended(engine, prompt, options=None, **how):
    """The result of a request, for which the engine runs."""
    request = engine.submit(prompt, options, **how)
    engine.run()
    return request.result()
