"""The engine: requests share passes, and no request changes the result of another."""

import gc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import specbeam
from specbeam import Engine, Options, SpecbeamError
from specbeam.backends.torch.cache import KeyValues
from specbeam.cache.pool import pool_of
from specbeam.cache.slots import Slots
from specbeam.decoding import Evaluate, Hypothesis
from specbeam.tree import Tree
from tests.conftest import EOS, random_model, run_alone

MIXED = [
    ([1, 2, 3], Options(max_new_tokens=20)),
    (list(range(100)), Options(max_new_tokens=5)),
    ([9], Options(max_new_tokens=30, do_sample=True, seed=1)),
    ([9], Options(max_new_tokens=30, do_sample=True, seed=2)),
    ([7] * 40, Options(max_new_tokens=25, temperature=0.7, top_k=20, seed=3)),
    ([200, 100], Options(max_new_tokens=40, repetition_penalty=1.4)),
    ([5, 6], Options(max_new_tokens=60)),  # the one that is cancelled
    (list(range(50, 90)), Options(max_new_tokens=12, top_p=0.8, seed=4, min_new_tokens=12)),
]
CANCELLED = 6


@pytest.mark.parametrize("limits", [{}, {"max_requests": 3}, {"max_batch_tokens": 7}, {"max_cache_tokens": 150}])
def test_a_mixed_batch_gives_each_what_it_gets_alone(lm, limits):
    engine = Engine(lm, **limits)
    requests = [engine.submit(prompt, options) for prompt, options in MIXED]
    cancelled = requests[CANCELLED]
    while engine.step():
        if len(cancelled.pieces) >= 10:
            cancelled.cancel()
    for number, (request, (prompt, options)) in enumerate(zip(requests, MIXED, strict=True)):
        result, expected = request.result(), run_alone(lm, prompt, options)
        if number == CANCELLED:
            assert result.finish_reason == "cancelled"
            assert 5 < len(result.token_ids) < 60
            assert result.token_ids == expected.token_ids[: len(result.token_ids)]
            assert expected.text.startswith(result.text)
        else:
            assert (result.token_ids, result.text, result.finish_reason) == (
                expected.token_ids,
                expected.text,
                expected.finish_reason,
            )
            assert result.sequences[0].score == pytest.approx(expected.sequences[0].score, abs=1e-3)
    assert engine.cache_tokens == 0


def test_requests_share_passes(lm, monkeypatch):
    sizes = count_nodes(lm, monkeypatch)
    engine = Engine(lm)
    requests = [engine.submit([i + 1], Options(max_new_tokens=10, eos_token_id=EOS)) for i in range(8)]
    engine.run()
    assert sizes == [8] * max(len(r.result().token_ids) for r in requests)


def count_nodes(lm, monkeypatch):
    sizes = []
    forward = lm.backend.forward

    def counted(segments):
        sizes.append(sum(len(s.tokens) for s in segments))
        return forward(segments)

    monkeypatch.setattr(lm.backend, "forward", counted)
    return sizes


def test_a_long_prompt_is_prefilled_in_chunks_beside_the_others(lm, monkeypatch):
    sizes = count_nodes(lm, monkeypatch)
    engine = Engine(lm, max_batch_tokens=16)
    short = engine.submit([1], Options(max_new_tokens=20, min_new_tokens=20))
    long = engine.submit([2] * 150, Options(max_new_tokens=3))
    while not long.done:
        engine.step()
    engine.run()
    assert max(sizes) == 16
    assert long.result().token_ids == run_alone(lm, [2] * 150, Options(max_new_tokens=3)).token_ids
    assert short.result().stats.forward_passes == 20  # it was in every pass, not behind the prompt


def test_no_more_requests_are_live_than_allowed(lm):
    engine = Engine(lm, max_requests=2, max_cache_tokens=1000)
    requests = [engine.submit([1], Options(max_new_tokens=4, min_new_tokens=4)) for _ in range(6)]
    engine.step()
    assert [r.used_slots > 0 for r in requests] == [True, True, False, False, False, False]
    engine.run()
    assert all(r.done for r in requests)


def test_memory_is_bounded_by_what_the_live_requests_may_need(lm):
    engine = Engine(lm, max_cache_tokens=60)
    requests = [engine.submit([1] * 10, Options(max_new_tokens=15, min_new_tokens=15)) for _ in range(5)]
    most = 0
    while engine.step():
        most = max(most, engine.cache_tokens)
    assert 25 < most <= 60
    assert all(len(r.result().token_ids) == 15 for r in requests)
    with pytest.raises(SpecbeamError, match="61 cache slots, the engine has 60"):
        engine.submit([1] * 10, Options(max_new_tokens=51))


def test_a_request_that_fails_in_its_strategy_disturbs_nobody(lm):
    def broken(setup, drafter):
        yield Evaluate([setup.tree.tip])
        raise RuntimeError("a strategy's mistake")

    engine = Engine(lm)
    good = [engine.submit([i], Options(max_new_tokens=15)) for i in range(3)]
    bad = engine.submit([9], Options(max_new_tokens=15), strategy=broken)
    engine.run()
    with pytest.raises(RuntimeError, match="mistake"):
        bad.result()
    for i, request in enumerate(good):
        assert request.result().token_ids == run_alone(lm, [i], Options(max_new_tokens=15)).token_ids


def test_a_request_that_fails_in_a_pass_disturbs_nobody(lm, monkeypatch):
    forward = lm.backend.forward

    def out_of_memory(segments):
        if any(len(s.tokens) > 30 for s in segments):
            raise torch.OutOfMemoryError("the long one does not fit")
        return forward(segments)

    monkeypatch.setattr(lm.backend, "forward", out_of_memory)
    engine = Engine(lm)
    requests = [engine.submit([i] * (40 if i == 1 else 2), Options(max_new_tokens=10)) for i in range(3)]
    engine.run()
    with pytest.raises(SpecbeamError, match="out of memory"):
        requests[1].result()
    monkeypatch.undo()
    for i in (0, 2):
        assert requests[i].result().token_ids == run_alone(lm, [i] * 2, Options(max_new_tokens=10)).token_ids
    assert engine.cache_tokens == 0


def test_a_failed_request_lets_go_of_all_memory(lm, monkeypatch):
    forward = lm.backend.forward

    def failing(segments):
        if any(len(s.tokens) > 30 for s in segments):
            raise RuntimeError("broken")
        return forward(segments)

    gc.collect()  # engines of other tests
    before = pool_of(lm.backend).in_use
    monkeypatch.setattr(lm.backend, "forward", failing)
    engine = Engine(lm)
    handles = [engine.submit([i] * n, Options(max_new_tokens=3)) for i, n in enumerate((40, 2))]
    engine.run()
    assert engine.cache_tokens == 0
    assert pool_of(lm.backend).in_use == before + 4  # the prompt of the good one, and two of its new tokens
    del engine
    assert pool_of(lm.backend).in_use == before
    with pytest.raises(RuntimeError, match="broken") as error:
        handles[0].result()
    assert "failing" in error.value.__notes__[0]  # the error still says where it happened


def strategy_that(*yields, returns=()):
    def strategy(setup, drafter):
        seen.clear()
        for nodes in yields:
            seen.append((yield Evaluate(nodes)))
        return list(returns)

    seen = []
    strategy.seen = seen
    return strategy


@pytest.mark.parametrize("strategy", [strategy_that([]), strategy_that([0], returns=[]), strategy_that([99])])
def test_a_strategy_that_asks_for_nonsense_disturbs_nobody(lm, strategy):
    engine = Engine(lm)
    good = engine.submit([1], Options(max_new_tokens=5))
    bad = engine.submit([2, 3], strategy=strategy)
    engine.run()
    assert len(good.result().token_ids) == 5
    with pytest.raises((ValueError, IndexError)):
        bad.result()


@pytest.mark.parametrize("chunk", [1, 2, 512])
def test_logits_come_in_the_order_they_were_asked_for(lm, chunk):
    asked = [3, 0, 0, 2]
    strategy = strategy_that(asked, [1], returns=[Hypothesis(3, 0.0, "length")])
    engine = Engine(lm, max_batch_tokens=chunk)
    request = engine.submit([5, 6, 7, 8], strategy=strategy)
    engine.run()
    request.result()
    tree = Tree([5, 6, 7, 8])
    slots = Slots(tree, lm.backend)
    expected = lm.backend.forward([slots.segment(slots.missing([3]), np.arange(4))])
    torch.testing.assert_close(strategy.seen[0], expected[asked], atol=2e-4, rtol=0)
    torch.testing.assert_close(strategy.seen[1], expected[[1]], atol=2e-4, rtol=0)


@pytest.mark.parametrize("beams", [1, 4])
def test_slots_are_used_again(lm, monkeypatch, beams):
    """The KV cache grows to the most slots that are needed at once, not with every request."""
    reserve, most = lm.backend.reserve, []
    monkeypatch.setattr(lm.backend, "reserve", lambda slots: most.append(slots) or reserve(slots))
    engine = Engine(lm, max_cache_tokens=400)
    options = Options(max_new_tokens=20, min_new_tokens=20, num_beams=beams)
    for n in range(3):
        engine.submit([n] * 130, options)
        engine.run()
    before = len(most)
    for n in range(20):
        engine.submit([n] * 130, options)
        engine.run()
    assert len(most) == before


def test_making_room_can_be_tried_again(monkeypatch):
    """Memory runs out half way through the layers, once. Nothing that was stored is lost."""
    new_zeros, left = torch.Tensor.new_zeros, {"allocations": 3}

    def scarce(tensor, *size, **how):
        if not left["allocations"]:
            raise torch.OutOfMemoryError("full")
        left["allocations"] -= 1
        return new_zeros(tensor, *size, **how)

    store = KeyValues(2, 3, 4, torch.float32, torch.device("cpu"))
    store.reserve(64)
    stored = [torch.randn(2, 64, 3, 4) for _ in range(2)]  # keys and values by layer
    for layer in range(2):
        store.store(layer, slice(0, 64), stored[0][layer], stored[1][layer], slice(0, 64))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_zeros", scarce)
        with pytest.raises(torch.OutOfMemoryError):
            store.reserve(65)
    assert left["allocations"] == 0
    store.reserve(65)
    assert store.capacity >= 65
    one = torch.ones(1, 3, 4)
    for layer in range(2):
        for got, expected in zip(store.store(layer, slice(64, 65), one, one, slice(0, 65)), stored, strict=True):
            assert torch.equal(got[:, :64], expected[layer].transpose(0, 1))


def test_cancelled_before_it_began(lm):
    engine = Engine(lm, max_requests=1)
    first, second = engine.submit([1], Options(max_new_tokens=5)), engine.submit([2])
    second.cancel()
    engine.run()
    assert first.done
    assert (second.result().token_ids, second.result().finish_reason) == ([], "cancelled")


@given(seed=st.integers(0, 2**63 - 1), others=st.lists(st.lists(st.integers(0, 255), min_size=1), max_size=4))
def test_a_seed_gives_the_same_text_in_any_company(lm, seed, others):
    options = Options(max_new_tokens=12, do_sample=True, seed=seed)
    engine = Engine(lm)
    for other in others:
        engine.submit(other, Options(max_new_tokens=6, do_sample=True))
    request = engine.submit([3, 4], options)
    engine.run()
    assert request.result().token_ids == run_alone(lm, [3, 4], options).token_ids


def test_without_a_seed_texts_differ(lm):
    texts = {specbeam.generate(lm, [3], max_new_tokens=12, temperature=1.5).text for _ in range(5)}
    assert len(texts) > 1


def test_a_list_of_prompts_gives_a_list_of_results(lm):
    prompts = ["one", [2, 3], [{"role": "user", "content": "three"}]]
    results = specbeam.generate(lm, prompts, max_new_tokens=6)
    assert [r.token_ids for r in results] == [specbeam.generate(lm, p, max_new_tokens=6).token_ids for p in prompts]


def test_all_prompts_of_a_list_are_checked_before_the_first_pass(lm, monkeypatch):
    passes = []
    monkeypatch.setattr(lm.backend, "forward", passes.append)
    for bad, says in {"b" * 256: "prompt 12: the prompt has 256 tokens", "\ud800": "prompt 12: .*surrogate"}.items():
        with pytest.raises(SpecbeamError, match=says):
            specbeam.generate(lm, [*"a" * 12, bad, "c"], max_new_tokens=2)
    assert not passes


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ("", {}, "prompt is empty"),
        ([], {}, "prompt is empty"),
        (["a", ""], {}, "prompt 1: the prompt is empty"),
        ([1] * 256, {}, "context of 256"),
        ([1, 999], {}, "999 is not in the model's vocabulary"),
        (3.5, {}, "not float"),
        ([1, "a"], {}, "mixes kinds"),
        ([{"role": "user"}], {}, "content"),
        ("a", {"eos_token_id": 4000}, "4000"),
        ("a", {"max_tokens": 5}, "did you mean 'max_new_tokens'"),
    ],
)
def test_what_cannot_be_done_is_refused(lm, prompt, options, says):
    with pytest.raises(SpecbeamError, match=says):
        specbeam.generate(lm, prompt, **options)


@pytest.mark.parametrize("limit", ["max_requests", "max_batch_tokens", "max_cache_tokens"])
def test_limits_are_checked(lm, limit):
    with pytest.raises(SpecbeamError, match=limit):
        Engine(lm, **{limit: 0})


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "0.1"])
def test_a_time_for_passes_is_checked(lm, seconds):
    with pytest.raises(SpecbeamError, match="max_pass_seconds"):
        Engine(lm, max_pass_seconds=seconds)


def test_a_result_is_not_there_before_it_is_done(lm):
    request = Engine(lm).submit([1])
    with pytest.raises(SpecbeamError, match="not finished"):
        request.result()


def test_all_kinds_of_requests_with_drafts_share_passes_and_nothing_else(tiny):
    _, lm = tiny("llama")
    draft = tiny("qwen2", seed=5)[1]
    trie = specbeam.TokenTrie([[1, 2, 3], [1, 2, 4, 5], [9, 9]])
    sizes = {"num_draft_tokens": 3, "draft_width": 4}
    kinds = [
        ({"num_beams": 4, **sizes}, draft),
        ({"num_beams": 3, "num_return_sequences": 3}, "suffix"),
        (sizes, draft),
        ({"temperature": 1.0, "seed": 4, **sizes}, draft),
        ({"temperature": 0.8, "seed": 5}, "ngram"),
        ({"num_beams": 2}, None),
        ({}, None),
        ({"constraint": trie, "num_beams": 2, **sizes}, draft),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, **sizes}, lm),
    ]
    prompts = [[1, 2, 3, 1, 2], [7] * 20, *([n, 3, n, 3] for n in range(7))]

    def submit(engine, i):
        options, drafts = kinds[i]
        return engine.submit(prompts[i], {"max_new_tokens": 12 + i, "repetition_penalty": 1.1, **options}, draft=drafts)

    engine = Engine(lm, max_batch_tokens=64)
    together = [submit(engine, i) for i in range(len(kinds))]
    passes = 0
    while engine.step():
        passes += 1
    for i, request in enumerate(together):
        alone = Engine(lm)
        expected = submit(alone, i)
        alone.run()
        got, want = request.result().sequences, expected.result().sequences
        assert [s.token_ids for s in got] == [s.token_ids for s in want]
        assert [s.score for s in got] == pytest.approx([s.score for s in want], abs=1e-4)
    assert passes < sum(request.result().stats.forward_passes for request in together) / 2
    assert engine.cache_tokens == 0


def test_a_draft_that_fails_ends_its_request_alone(tiny, monkeypatch):
    _, lm = tiny("llama")
    draft = tiny("qwen2", seed=5)[1]

    def failing(segments):
        raise RuntimeError("the draft is broken")

    monkeypatch.setattr(draft.backend, "forward", failing)
    engine = Engine(lm)
    broken = engine.submit([1, 2], {"max_new_tokens": 4, "num_draft_tokens": 2}, draft=draft)
    fine = engine.submit([1, 2], {"max_new_tokens": 4})
    engine.run()
    assert len(fine.result().token_ids) == 4
    with pytest.raises(RuntimeError, match="draft is broken"):
        broken.result()


def test_a_draft_with_a_shorter_context_stops_drafting_there(tiny, save):
    _, lm = tiny("llama")
    draft = specbeam.load(save(random_model("llama", max_position_embeddings=16)), device="cpu", dtype="float32")
    options = {"max_new_tokens": 40, "min_new_tokens": 40}
    plain = specbeam.generate(lm, [1, 2, 3], **options)
    result = specbeam.generate(lm, [1, 2, 3], draft=draft, num_draft_tokens=4, draft_width=1, **options)
    assert result.token_ids == plain.token_ids
    assert 0 < result.stats.draft_passes < 16


def test_a_draft_elsewhere_is_refused(lm, tiny, monkeypatch):
    draft = tiny("qwen2", seed=5)[1]
    monkeypatch.setattr(draft.backend, "device", torch.device("meta"))
    with pytest.raises(SpecbeamError, match="on meta, but the model on cpu"):
        specbeam.generate(lm, [1], draft=draft)


def test_pytorch_uses_one_thread_beside_a_target_with_its_own(lm):
    """Also after a pass of a draft on PyTorch's threads: idle, they would spin on the cores of the target."""
    threads = []

    def count(ids, scores):
        threads.append(torch.get_num_threads())
        return scores

    target = specbeam.load(lm.source, backend="cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        specbeam.generate(target, [1, 2, 3], draft=lm, num_draft_tokens=2, max_new_tokens=8, logits_processor=count)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(threads) == {1}


@pytest.mark.parametrize("given", ["smollm2-135m-instruct", [1, 2], None])
def test_what_is_no_loaded_model_is_refused(given):
    with pytest.raises(SpecbeamError, match=r"is no loaded model: give what specbeam\.load returned"):
        specbeam.generate(given, "hi")
