"""The engine: requests share passes, and no request changes the result of another."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import specbeam
from specbeam import Engine, Options, SpecbeamError
from specbeam.backends.torch.cache import Kept, KeyValues
from specbeam.cache.slots import Slots
from specbeam.core.strategy import Evaluate, Hypothesis
from specbeam.core.tree import Tree
from specbeam.engine import CostTable
from tests.conftest import random_model, run_alone
from tests.engine.conftest import ended, in_use


@pytest.mark.parametrize(
    ("raised", "error", "says"),
    [
        (torch.OutOfMemoryError("the long one does not fit"), SpecbeamError, "out of memory"),
        (RuntimeError("broken"), RuntimeError, "broken"),
    ],
)
def test_a_request_that_fails_in_a_pass_disturbs_nobody_and_lets_go_of_all_memory(lm, watch, raised, error, says):
    options = Options(max_new_tokens=3)
    expected = run_alone(lm, [1, 1], options).token_ids

    def fail(segments):
        if any(len(s.tokens) > 30 for s in segments):
            raise raised

    before = in_use(lm)
    watch(lm, fail)
    engine = Engine(lm)
    bad, good = (engine.submit([i] * n, options) for i, n in enumerate((40, 2)))
    engine.run()
    assert good.result().token_ids == expected
    assert engine.cache_tokens == 0
    assert in_use(lm) == before + 4  # the prompt of the good one, and two of its new tokens
    del engine
    assert in_use(lm) == before
    with pytest.raises(error, match=says) as caught:
        bad.result()
    if error is RuntimeError:
        assert "in fail" in caught.value.__notes__[0]  # the error still says where it happened


def strategy_that(*yields, returns=()):
    def strategy(setup, drafter):
        seen.clear()
        for nodes in yields:
            seen.append((yield Evaluate(nodes)))
        return list(returns)

    seen = []
    strategy.seen = seen
    return strategy


def mistaken(setup, drafter):
    yield Evaluate([setup.tree.tip])
    raise RuntimeError("a strategy's mistake")


@pytest.mark.parametrize(
    ("strategy", "error", "says"),
    [
        (
            mistaken,
            SpecbeamError,
            r"test_engine:mistaken .* failed: RuntimeError: a strategy's mistake \(.*test_engine.py",
        ),
        (strategy_that([]), ValueError, None),
        (strategy_that([0], returns=[]), ValueError, None),
        (strategy_that([99]), SpecbeamError, "asked for the node 99, and the tree has the nodes 0 to 1"),
        (None, RuntimeError, "draft is broken"),
    ],
)
def test_a_strategy_or_a_draft_that_fails_ends_its_request_alone(lm, tiny, monkeypatch, strategy, error, says):
    def failing(segments):
        raise RuntimeError("the draft is broken")

    draft = tiny("qwen2", seed=5)[1]
    monkeypatch.setattr(draft.backend, "forward", failing)
    engine = Engine(lm)
    good = engine.submit([1], Options(max_new_tokens=5))
    bad = engine.submit([2, 3], {"num_draft_tokens": 2}, draft=draft, strategy=strategy)
    engine.run()
    assert good.result().token_ids == run_alone(lm, [1], Options(max_new_tokens=5)).token_ids
    with pytest.raises(error, match=says):
        bad.result()


@pytest.mark.parametrize("chunk", [1, 2, 512])
def test_logits_come_in_the_order_they_were_asked_for(lm, chunk):
    asked = [3, 0, 0, 2]
    strategy = strategy_that(asked, [1], returns=[Hypothesis(3, 0.0, "length")])
    ended(Engine(lm, max_batch_tokens=chunk), [5, 6, 7, 8], strategy=strategy)
    slots = Slots(Tree([5, 6, 7, 8]), lm.backend)
    expected = lm.backend.forward([slots.tree_batch(slots.missing([3]), np.arange(4))])
    torch.testing.assert_close(torch.from_numpy(strategy.seen[0]), expected[asked], atol=2e-4, rtol=0)
    torch.testing.assert_close(torch.from_numpy(strategy.seen[1]), expected[[1]], atol=2e-4, rtol=0)


def test_slots_are_used_again(save, monkeypatch):
    """The KV cache grows to the maximum number of slots that are needed at once, not with every request."""
    lm = specbeam.load(save(random_model("llama")), backend="torch")  # no other engine shares its slots
    reserve, most = lm.backend.reserve, []
    monkeypatch.setattr(lm.backend, "reserve", lambda slots, rows: most.append(slots) or reserve(slots))
    engine = Engine(lm, max_cache_tokens=400)
    for n in range(8):
        ended(engine, [n] * 130, Options(max_new_tokens=20, min_new_tokens=20, num_beams=4))
        if n < 3:
            before = len(most)
    assert len(most) == before > 0


def test_making_room_can_be_tried_again(monkeypatch):
    """Memory runs out half way through the layers, once. Nothing that was stored is lost."""
    new_zeros, left = torch.Tensor.new_zeros, {"allocations": 3}

    def scarce(tensor, *size, **how):
        if not left["allocations"]:
            raise torch.OutOfMemoryError("full")
        left["allocations"] -= 1
        return new_zeros(tensor, *size, **how)

    store = KeyValues([[Kept(3, 4)] * 2] * 2, torch.float32, "cpu")
    store.reserve(64)
    stored, one = torch.randn(2, 2, 64, 3, 4), torch.ones(1, 3, 4)  # keys and values by layer
    for layer, both in enumerate(stored):
        store.store(layer, slice(0, 64), *both)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_zeros", scarce)
        with pytest.raises(torch.OutOfMemoryError):
            store.reserve(65)
    assert left["allocations"] == 0
    store.reserve(65)
    assert store.capacity >= 65
    for layer, both in enumerate(stored):
        got = torch.stack(store.store(layer, slice(64, 65), one, one))
        assert torch.equal(got[:, :, :64], both.transpose(1, 2))


def test_without_a_seed_texts_differ(lm):
    assert len({specbeam.generate(lm, [3], max_new_tokens=12, temperature=1.5).text for _ in range(5)}) > 1


def test_a_list_of_prompts_gives_a_list_of_results(lm):
    prompts = ["one", [2, 3], [{"role": "user", "content": "three"}]]
    results = specbeam.generate(lm, prompts, max_new_tokens=6)
    assert [r.token_ids for r in results] == [specbeam.generate(lm, p, max_new_tokens=6).token_ids for p in prompts]


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ("", {}, "prompt is empty"),
        ([], {}, "prompt is empty"),
        (["a", ""], {}, "prompt 1: the prompt is empty"),
        ([1] * 256, {}, "context of 256"),
        ([1, 999], {}, "999 is not in the model's vocabulary"),
        ([1, "a"], {}, "mixes kinds"),
        ([{"role": "user"}], {}, "content"),
        ("a", {"eos_token_id": 4000}, "4000"),
    ],
)
def test_what_cannot_be_done_is_refused(lm, prompt, options, says):
    with pytest.raises(SpecbeamError, match=says):
        specbeam.generate(lm, prompt, **options)


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        *(({name: 0}, name) for name in ("max_requests", "max_batch_tokens", "max_cache_tokens")),
        *(({"max_pass_seconds": seconds}, "max_pass_seconds") for seconds in (-1, math.nan, math.inf, "0.1")),
        *(({"max_waiting": n}, f"max_waiting={n!r} is not allowed: give at least 0") for n in (-1, True, 1.0)),
        # A draft model has another table than the target.
        ({"costs": CostTable(lambda nodes: 1.0)}, "give a function such as lambda backend"),
    ],
)
def test_limits_are_checked(lm, limits, says):
    with pytest.raises(SpecbeamError, match=says):
        Engine(lm, **limits)


def test_what_is_no_loaded_model_is_refused():
    with pytest.raises(SpecbeamError, match=r"str is no loaded model: give what specbeam\.load returned"):
        specbeam.generate("smollm2-135m-instruct", "hi")


def test_a_draft_with_a_shorter_context_stops_drafting_there(tiny, save):
    _, lm = tiny("llama")
    draft = specbeam.load(save(random_model("llama", max_position_embeddings=16)), device="cpu", dtype="float32")
    options = {"max_new_tokens": 40, "min_new_tokens": 40}
    plain = specbeam.generate(lm, [1, 2, 3], **options)
    result = specbeam.generate(lm, [1, 2, 3], draft=draft, num_draft_tokens=4, draft_width=1, **options)
    assert result.token_ids == plain.token_ids
    assert 0 < result.stats.draft_passes < 16


def test_pytorch_uses_one_thread_beside_a_target_with_its_own(lm):
    """Also after a pass of a draft on PyTorch's threads: idle, they would spin on the cores of the target.

    Threads that begin meanwhile keep their number: the calling thread alone is limited.
    """
    threads = set()

    def count(ids, scores):
        with ThreadPoolExecutor(1) as pool:
            threads.add((torch.get_num_threads(), pool.submit(torch.get_num_threads).result()))
        return scores

    target = specbeam.load(lm.source, backend="cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        specbeam.generate(target, [1, 2, 3], draft=lm, num_draft_tokens=2, max_new_tokens=8, logits_processor=count)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert threads == {(1, 2)}


def test_a_draft_elsewhere_is_refused(lm, tiny, monkeypatch):
    draft = tiny("qwen2", seed=5)[1]
    monkeypatch.setattr(draft.backend, "device", "meta")
    with pytest.raises(SpecbeamError, match="on meta, but the model on cpu"):
        specbeam.generate(lm, [1], draft=draft)


# Requests as they finish.

LENGTHS = [5, 2, 9, 1, 4, 4, 7, 3]


def of_length(length):
    return Options(max_new_tokens=length, min_new_tokens=length)


def test_requests_come_back_as_they_finish_and_as_many_as_share_a_pass_are_submitted(lm):
    engine, finished, unfinished = Engine(lm, max_requests=3), {}, []

    def submissions():
        for i, length in enumerate(LENGTHS):
            unfinished.append(i + 1 - len(finished))
            yield i, engine.submit([i + 1], of_length(length))

    for number, request in engine.as_completed(submissions()):
        assert request.done
        finished[number] = request.result().token_ids
    assert finished == {i: specbeam.generate(lm, [i + 1], of_length(n)).token_ids for i, n in enumerate(LENGTHS)}
    # Three at a time, a token per iteration: the order follows from the lengths, then from the order of submission.
    assert [*finished] == [1, 3, 0, 4, 2, 5, 7, 6]
    assert unfinished == [1, 2, 3, 3, 3, 3, 3, 2]  # when the last is submitted, two have finished at once
    assert engine.cache_tokens == 0


def test_what_is_refused_is_raised_and_a_request_that_fails_is_yielded(lm):
    engine = Engine(lm)

    def fail(*_):
        raise RuntimeError("it broke")

    kinds = [Options(max_new_tokens=4, logits_processor=[fail]), of_length(2), of_length(2), {"max_new_tokens": 0}]
    with pytest.raises(SpecbeamError, match="max_new_tokens=0"):
        dict(engine.as_completed((i, engine.submit([1], kind)) for i, kind in enumerate(kinds)))
    found = dict(engine.as_completed((i, engine.submit([1], kind)) for i, kind in enumerate(kinds[:3])))
    with pytest.raises(RuntimeError, match="it broke"):
        found[0].result()
    assert [len(found[i].result().token_ids) for i in (1, 2)] == [2, 2]
    assert [*engine.as_completed([])] == []
    with pytest.raises(SpecbeamError, match="submitted to another engine"):
        dict(engine.as_completed([(0, Engine(lm).submit([1]))]))
