"""Helpers of the engine's tests."""

import gc

import numpy as np
import pytest

from specbeam.cache.places import NOWHERE
from specbeam.cache.pool import pool_of
from tests.conftest import never_ahead


@pytest.fixture(scope="session")
def lm(tiny):
    """A tiny model on a backend that never goes ahead, so that a test may count passes."""
    return never_ahead(tiny("llama")[1].source)


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


def assert_memory_is_within_its_limit(engine):
    """Live requests hold no more than the engine may hold, and cached prefixes take no slot beside that."""
    budget, target = engine._budget, engine._budget.target
    pool = target.pool
    owned = pool.owners == target.number
    taken = np.count_nonzero(((pool.references > 0) | pool.cached) & owned) * target.slot_bytes
    for rows in pool.rows:
        taken += np.count_nonzero(((rows.needed > 0) | (rows.kept > 0)) & owned) * rows.lifetime.row_bytes
    assert budget.held <= budget.cache_bytes
    assert target.used_bytes <= taken <= budget.cache_bytes


def assert_nothing_is_held(engine):
    """All requests have ended: only cached prefixes are left. Without these, no slot belongs to the engine."""
    caches = [*engine._budget._caches.values()]
    for cache in caches:
        pool = cache.pool
        owned = pool.owners == cache.number
        assert cache.used == 0
        assert not pool.references[owned].any()
        assert cache.kept == np.count_nonzero(owned) == np.count_nonzero(pool.cached & owned)
        for own in cache.rows:
            has_row = own.rows.of != NOWHERE
            assert own.used == 0
            assert not own.rows.needed[owned].any()
            assert own.kept == np.count_nonzero(own.rows.owners == cache.number) == np.count_nonzero(has_row & owned)
        assert sorted(cache.prefixes.slots().tolist()) == np.flatnonzero(owned).tolist()
    engine._budget.evict()
    for cache in caches:
        assert cache.kept == 0
        assert not any((one.owners == cache.number).any() for one in (cache.pool, *cache.pool.rows))
    assert engine._budget.held == engine.kept_bytes == 0
