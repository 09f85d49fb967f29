"""Admission follows what requests use. Preemption corrects a wrong estimate, and no text changes."""

import weakref

import numpy as np
import pytest
import torch

from specbeam import Engine, SpecbeamError
from specbeam.cache.pool import pool_of
from specbeam.cache.slots import Slots
from specbeam.core.tree import Tree
from tests.conftest import needs_torch, run_alone
from tests.engine.conftest import ended, in_use

LONG = {"max_new_tokens": 30, "min_new_tokens": 30}


def assert_same(result, expected):
    assert [one.token_ids for one in result.sequences] == [one.token_ids for one in expected.sequences]
    assert [one.score for one in result.sequences] == pytest.approx([one.score for one in expected.sequences], abs=1e-4)


def test_a_paused_request_goes_on_with_the_same_text_or_can_be_cancelled(lm):
    options = {"max_new_tokens": 40, "min_new_tokens": 40}
    for is_cancelled in (False, True):
        engine = Engine(lm, max_cache_tokens=70)
        old, young = (engine.submit([n] * 10, options) for n in (1, 2))
        while not (young.pieces and not young.used_slots):
            engine.step()
        if is_cancelled:
            young.cancel()
            engine.step()
        else:
            engine.run()
            assert young.result().stats.nodes_evaluated > 49  # it was recomputed
        assert young.result().finish_reason == ("cancelled" if is_cancelled else "length")
        expected = run_alone(lm, [2] * 10, options).token_ids
        assert young.result().token_ids == expected[: len(young.result().token_ids)]
        engine.run()
        assert old.result().token_ids == run_alone(lm, [1] * 10, options).token_ids
        assert old.result().stats.nodes_evaluated == 49


def test_a_request_that_cannot_advance_fails_and_holds_up_nobody(lm):
    """Slots that no request holds: a fault of the engine's own, and none of the request's."""
    engine = Engine(lm, max_cache_tokens=200)
    lost = Slots(Tree([7] * 100), lm.backend, engine._budget.target)
    lost.tree_batch(lost.prepare(np.array([99])), np.array([0]))
    large, small = (engine.submit([1] * n, {"max_new_tokens": 5}) for n in (190, 20))
    for _ in range(100):
        if not engine.step():
            break
    with pytest.raises(SpecbeamError, match="100 of the engine's 200 cache slots are held by no request"):
        large.result()
    assert small.result().token_ids == run_alone(lm, [1] * 20, {"max_new_tokens": 5}).token_ids


def test_an_error_says_where_the_default_limit_comes_from(lm, monkeypatch):
    monkeypatch.setattr(lm.backend, "memory_for_caches", lambda: 60 * lm.backend.slot_bytes)
    origin = r"\([\d.e-]+ GB, by default a part of the memory that was free\)"
    with pytest.raises(SpecbeamError, match=rf"the engine has 60 {origin}: ask for fewer new tokens"):
        Engine(lm).submit([1] * 10, {"max_new_tokens": 200})
    with pytest.raises(SpecbeamError, match=r"the engine has 60: ask for fewer new tokens"):
        Engine(lm, max_cache_tokens=60).submit([1] * 10, {"max_new_tokens": 200})


def test_when_memory_runs_out_in_a_pass_cached_prefixes_are_evicted_and_the_newest_waits(lm, watch, monkeypatch):
    """The machine has less than the engine was allowed to use."""
    before, engine = in_use(lm), Engine(lm, max_batch_tokens=4)

    def fail(segments):
        if pool_of(lm.backend).in_use > before + 60:
            raise MemoryError("full")

    ended(engine, [9] * 25, LONG)
    watch(lm, fail)
    requests = [engine.submit([n] * 25, LONG) for n in range(1, 5)]
    engine.run()
    monkeypatch.undo()
    for n, request in enumerate(requests, 1):
        assert request.result().token_ids == run_alone(lm, [n] * 25, LONG).token_ids


def test_logits_beyond_the_memory_are_refused(lm, monkeypatch):
    row = 4 * lm.backend.vocab_size
    monkeypatch.setattr(lm.backend, "memory_for_caches", lambda: 2 * 6 * row * 10)
    engine = Engine(lm, max_cache_tokens=1000)
    engine.submit([1], {"num_beams": 10, "max_new_tokens": 2}).cancel()
    with pytest.raises(SpecbeamError, match=r"logits of 11 nodes.*ask for fewer beams or samples"):
        engine.submit([1], {"num_beams": 11, "max_new_tokens": 2})
    # Two of them wait for each other, as the second would need more than there is.
    requests = [engine.submit([n], {"num_beams": 10, "max_new_tokens": 5, "min_new_tokens": 5}) for n in (1, 2)]
    engine.step()
    assert [request.used_slots > 0 for request in requests] == [True, False]
    engine.run()
    assert all(request.done for request in requests)


@pytest.mark.parametrize("draft", ["ngram", "a model"])
@pytest.mark.parametrize(
    ("rows", "how"),
    [
        (16, {}),  # room for the beams alone
        (20, {}),  # less than a level of draft tokens
        (60, {}),
        (60, {"bound_rule": False}),
        (32, {"num_draft_tokens": 1}),
        (60, {"num_draft_tokens": 2, "num_beams": 8}),
    ],
)
def test_drafts_adapt_to_the_memory_for_logits(lm, watch, monkeypatch, rows, how, draft):
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "num_beams": 16} | how
    prompt, wanted = [7, 8, 9] * 4, []
    plain = run_alone(lm, prompt, options | {"num_draft_tokens": "auto"})
    monkeypatch.setattr(lm.backend, "memory_for_caches", lambda: 2 * 6 * 4 * lm.backend.vocab_size * rows)
    watch(lm, lambda segments: wanted.append(sum(len(segment.wanted) for segment in segments)))
    got = run_alone(lm, prompt, options, lm if draft == "a model" else draft, max_cache_tokens=10_000)
    assert_same(got, plain)
    assert max(wanted) <= rows
    if "num_draft_tokens" in how:
        assert got.stats.drafted > 0


@pytest.mark.parametrize("sizes", [{"draft_width": 45}, {"num_draft_tokens": 3}, {"draft_budget": 45}])
def test_sizes_that_were_asked_for_do_not_adapt_to_memory(lm, monkeypatch, sizes):
    monkeypatch.setattr(lm.backend, "memory_for_caches", lambda: 2 * 6 * 4 * lm.backend.vocab_size * 60)
    engine, options = Engine(lm, max_cache_tokens=10_000), {"num_beams": 16, "max_new_tokens": 20}
    with pytest.raises(SpecbeamError, match=r"logits of 6\d nodes.*shorter drafts"):
        engine.submit([1], options | sizes, draft=lm)
    # A draft model needs the logits of one level at once.
    sizes = {"num_draft_tokens": 12, "draft_width": 8, "draft_budget": 44}
    engine.submit([1], options | sizes, draft=lm)


def test_engines_of_one_process_share_the_memory_for_caches(lm, monkeypatch):
    monkeypatch.setattr(lm.backend, "memory_for_caches", lambda: 100 * lm.backend.slot_bytes)
    engines = [Engine(lm) for _ in range(3)]
    requests = [[engine.submit([n] * 30, LONG) for n in (1, 2)] for engine in engines]
    most = 0
    while sum(engine.step() for engine in engines):
        most = max(most, sum(engine.cache_tokens for engine in engines))
    # One request per engine always runs, so that no engine waits for another for ever.
    assert most <= 3 * 60
    assert all(len(one.result().token_ids) == 30 for pair in requests for one in pair)
    for engine, pair in zip(engines, requests, strict=True):
        assert engine.cache_tokens == 0
        assert [one.result().token_ids for one in pair] == [one.result().token_ids for one in requests[0]]


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 4}, {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}]
)
@needs_torch
def test_no_request_keeps_the_logits_of_an_earlier_pass(lm, monkeypatch, options):
    forward, passes = lm.backend.forward, []

    def watched(segments):
        array = forward(segments).numpy().copy()  # the tensor that shares its memory keeps it alive
        passes.append(weakref.ref(array))
        return torch.from_numpy(array)

    monkeypatch.setattr(lm.backend, "forward", watched)
    engine = Engine(lm, max_batch_tokens=12)
    options = {"max_new_tokens": 30, "eos_token_id": [], "num_draft_tokens": 3, **options}
    requests = [engine.submit([5, 6, 7, 8, 5, 6, n], options, draft="ngram") for n in range(4)]
    while engine.step():
        assert sum(array() is not None for array in passes) <= 1
    assert any(request.result().stats.drafted for request in requests)
