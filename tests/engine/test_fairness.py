"""Every live request advances within a stated number of iterations, and no crowd or long prompt keeps it waiting."""

import gc
import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specbeam
from specbeam import Engine, SpecbeamError
from specbeam.cache import budget
from specbeam.core.strategy import Evaluate, Hypothesis
from specbeam.engine.costs import PassTimes
from specbeam.models import prompts
from tests.calls import calls_made
from tests.conftest import examples, table_of_costs


class CountingEngine(Engine):
    iteration = -1

    def step(self):
        self.iteration += 1
        return super().step()


def watched(engine, length, token=1, tokens=1000):
    """The iterations in which a request gets its logits. It never ends by itself, unless it gets as many tokens."""
    iterations = []

    def strategy(setup, drafter):
        tree = setup.tree
        for _ in range(tokens):
            yield Evaluate([tree.tip])
            iterations.append(engine.iteration)
            tree.keep(tree.add(tree.tip, 1))
        return [Hypothesis(tree.tip, 0.0, "length")]

    engine.submit([token] * length, {"max_new_tokens": 60}, strategy=strategy)
    return iterations


def run(engine, count):
    for _ in range(count):
        engine.step()


@pytest.mark.parametrize(
    ("places", "tokens", "length", "length_of_others", "first", "least"),
    [(4, 16, 64, 8, 64 / (16 / 2 / 4), 1), (2, 1, 1, 1, 1, 40)],
    ids=["a long prompt gets its share", "new requests do not go before live ones"],
)
def test_a_request_advances_while_others_keep_coming(lm, places, tokens, length, length_of_others, first, least):
    engine = CountingEngine(lm, max_requests=places, max_batch_tokens=tokens)
    iterations = watched(engine, length, token=2)
    for _ in range(100):
        for _ in range(places - 1):
            engine.submit([1] * length_of_others, {"max_new_tokens": 1})
        engine.step()
    assert iterations[0] <= first
    assert len(iterations) >= least


@given(prompts=st.lists(st.integers(1, 60), min_size=1, max_size=12), tokens=st.integers(1, 40))
def test_each_request_advances_within_the_promised_iterations(lm, prompts, tokens):
    """``ceil(requests / tokens)`` passes per node, and an equal share of half of each pass where that is more."""
    engine = CountingEngine(lm, max_requests=12, max_batch_tokens=tokens)
    iterations = [watched(engine, length) for length in prompts]
    per_node = math.ceil(len(prompts) / tokens)
    share = max(1, tokens // 2 // len(prompts))
    bounds = [math.ceil(length / share) * per_node for length in prompts]
    run(engine, max(bounds) + 2 * per_node + 1)
    for one, bound in zip(iterations, bounds, strict=True):
        assert one[0] <= bound
        assert all(after - before <= per_node for before, after in pairwise(one))


@settings(max_examples=examples(0.3))
@given(data=st.data())
def test_requests_of_all_kinds_that_come_and_go_keep_nobody_waiting(tiny, data):
    """Priorities, time limits, cancellations, drafts and long prompts beside two requests that generate."""
    _, lm = tiny("llama")
    draft = tiny("qwen2", seed=5)[1]
    kinds = [
        ([2] * 80, {"max_new_tokens": 2}, None),
        ([2] * 120, {"max_new_tokens": 4, "num_draft_tokens": 2}, draft),
        ([2, 3], {"max_new_tokens": 3, "num_beams": 2}, "ngram"),
        ([2] * 5, {"max_new_tokens": 5, "num_draft_tokens": 3}, draft),
    ]
    tokens, places, others = data.draw(st.integers(8, 40)), 6, []
    engine = CountingEngine(lm, max_requests=places, max_batch_tokens=tokens)
    lengths = data.draw(st.tuples(st.integers(1, 60), st.integers(1, 60)))
    iterations = [watched(engine, length) for length in lengths]
    for _ in range(40):
        if data.draw(st.booleans()):
            prompt, options, how = data.draw(st.sampled_from(kinds))
            priority, timeout = data.draw(st.integers(-2, 2)), data.draw(st.sampled_from([None, 0, 3600]))
            others.append(engine.submit(prompt, options, draft=how, priority=priority, timeout=timeout))
        if others and data.draw(st.booleans()):
            data.draw(st.sampled_from(others)).cancel()
        engine.step()
    read_per_pass = max(1, tokens // 2 // places)
    for length, one in zip(lengths, iterations, strict=True):
        waits = 1 + 3  # iterations per pass: the longest draft, and the pass itself
        assert [*one, 40][0] < math.ceil(length / read_per_pass) * waits
        assert all(after - before <= waits for before, after in pairwise(one))


@pytest.fixture
def passes(monkeypatch):
    """The nodes of each pass. A pass takes the seconds that ``passes.cost`` gives for its nodes."""

    class Passes(list):
        cost = staticmethod(lambda nodes: 0.005 * nodes)

    passes = Passes()

    class Noted(PassTimes):
        def add(self, nodes, seconds):
            passes.append(nodes)
            super().add(nodes, passes.cost(nodes))

    single = Noted()
    several = Noted(single)
    monkeypatch.setattr("specbeam.engine.engine.pass_times", lambda backend, ahead=False: several if ahead else single)
    return passes


def test_a_prompt_is_prefilled_in_chunks_by_time_while_others_wait(lm, passes):
    alone = specbeam.generate(lm, [2] * 240, max_new_tokens=4)
    engine = CountingEngine(lm, max_batch_tokens=64, max_pass_seconds=0.1)
    passes.clear()
    request = engine.submit([2] * 240, {"max_new_tokens": 4})
    engine.step()
    watched(engine, 1, tokens=9)
    engine.run()
    assert request.result().token_ids == alone.token_ids
    assert passes[0] == 64  # alone
    assert passes[1:10] == [16] * 9  # whole tiles in 0.1 s
    assert passes[10] == 240 - 64 - 9 * 15  # alone again


def fast(nodes):
    return 0.005 * nodes


def very_slow(nodes):
    return 50.0


def slow_to_begin(nodes):
    """Weights that take long to read."""
    return 0.4 + 0.01 * nodes


CHUNKS = {
    "it grows from a tile, and never gets smaller: at first nothing is known": (
        {"max_batch_tokens": 64, "max_pass_seconds": 0.1},
        [60, 60],
        [(fast, 2), (lambda nodes: 5.0 * nodes, 4)],
        [8, 16, 16, 9, 9, 9],  # a tile of prompts, and the other request's node
    ),
    "prompts share one chunk": ({}, [100] * 6, [(fast, 5)], [8, 40, 40, 40, 40]),
    "one slow pass halves it at most": ({}, [200], [(fast, 2), (very_slow, 1), (fast, 3)], [8, 40, 40, 16, 40, 40]),
    "prompts get half of the time of passes that are slow without them: from a tile on to 0.8 s": (
        {"max_pass_seconds": 0.1},
        [250],
        [(slow_to_begin, 6)],
        [9, 16, 24, 32, 40, 40],
    ),
}


@pytest.mark.parametrize(("limits", "prompts", "costs", "nodes"), CHUNKS.values(), ids=CHUNKS)
def test_a_chunk_beside_a_stream_follows_the_time_of_passes(lm, passes, limits, prompts, costs, nodes):
    engine = CountingEngine(lm, **{"max_batch_tokens": 128, "max_pass_seconds": 0.2} | limits)
    iterations = watched(engine, 1)
    if costs[0][0] is slow_to_begin:
        passes.cost = slow_to_begin
        run(engine, 3)
        passes.clear()
    for number, length in enumerate(prompts):
        engine.submit([2 + number] * length, {"max_new_tokens": 1})
    for passes.cost, count in costs:
        run(engine, count)
    assert passes == nodes
    assert iterations == [*range(engine.iteration + 1)]


def test_only_prompts_are_prefilled_in_chunks_by_time(lm, passes):
    """The nodes of a step stay together, and no request misses a pass."""

    def wide(setup, drafter):
        tree = setup.tree
        yield Evaluate([tree.tip])
        while True:
            nodes = tree.add([tree.tip] * 20, range(20))
            yield Evaluate(nodes)
            tree.keep(nodes[0])

    passes.cost = lambda nodes: 1.0 * nodes
    engine = CountingEngine(lm, max_requests=12, max_pass_seconds=0.0)
    crowd = [watched(engine, 1) for _ in range(10)]
    engine.submit([3], {"max_new_tokens": 100}, strategy=wide)
    run(engine, 2)
    engine.submit([2] * 100, {"max_new_tokens": 1})
    run(engine, 4)
    assert all(one == list(range(6)) for one in crowd)
    assert passes == [11, 30, 30 + 8, 30 + 34, 30 + 34, 30 + 24]  # after two passes over about 30 their time is known


def test_the_first_token_beside_32_requests_comes_within_its_share_of_passes(lm, passes):
    engine = CountingEngine(lm, max_requests=33, max_batch_tokens=128)
    crowd = [watched(engine, 1) for _ in range(32)]
    run(engine, 3)
    iterations = watched(engine, 192, token=2)
    run(engine, 10)
    assert max(passes) == 128
    assert iterations[0] - 3 < 192 / (128 - 32)  # the crowd needs 32 nodes, and the prompt gets the others
    assert all(after - before == 1 for one in crowd for before, after in pairwise(one))


def test_a_small_request_overtakes_one_that_does_not_fit(lm):
    engine = CountingEngine(lm, max_cache_tokens=200)
    watched(engine, 1, tokens=100)
    large = engine.submit([2] * 190, {"max_new_tokens": 5})
    small = engine.submit([3], {"max_new_tokens": 1})
    run(engine, 3)
    assert small.done
    assert not large.done
    others = [engine.submit([3], {"max_new_tokens": 1}) for _ in range(80)]
    while not large.done:
        engine.step()
    assert sum(one.done for one in others) < 40  # it is not overtaken for ever
    engine.run()
    assert all(one.done for one in others)


def test_a_batch_that_is_too_large_is_not_tried_again_each_round(lm, watch):
    def fail(segments):
        if len(segments) > 3:
            raise RuntimeError("too large")

    nodes, engine = watch(lm, fail), Engine(lm)
    requests = [engine.submit([i + 1], {"max_new_tokens": 60, "min_new_tokens": 60}) for i in range(8)]
    engine.run()
    assert all(len(request.result().token_ids) == 60 for request in requests)
    assert sum(count > 3 for count in nodes) < 12  # a node per request


def test_a_step_costs_no_more_when_many_wait(lm):
    def calls(waiting):
        engine = Engine(lm, max_requests=1)
        engine.submit([1], {"max_new_tokens": 9, "min_new_tokens": 9})
        for _ in range(waiting):
            engine.submit([2], {"max_new_tokens": 1}).add_done_callback(print)
        run(engine, 2)
        return calls_made(engine.step)

    assert calls(300) < 1.1 * calls(3)


def test_a_step_costs_the_same_however_long_the_sequences_are(tiny):
    engine = Engine(tiny("llama")[1], max_requests=10)
    for options in (
        {},
        {"temperature": 1.0, "seed": 1},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.2, "presence_penalty": 0.2},
        {"no_repeat_ngram_size": 3},
        {"bad_words_ids": [[1], [2, 3, 4]]},
        {"stop_strings": "never said"},
        {"top_logprobs": 2},
        {"trace": True},
        {"num_beams": 2},
        {"num_beams": 2, "temperature": 1.0, "seed": 1, "no_repeat_ngram_size": 3, "repetition_penalty": 1.2},
    ):
        engine.submit([1], {"max_new_tokens": 150, "eos_token_id": [], **options})
    counted = (*range(24, 32), *range(136, 144))
    work = [calls_made(engine.step) if step in counted else engine.step() for step in range(144)]
    assert sum(work[136:]) <= 1.1 * sum(work[24:32])


def test_a_list_of_prompts_is_checked_first_and_holds_tokens_only_when_it_is_their_turn(lm, monkeypatch):
    texts, read, tokenize = [], [], prompts.tokenize
    monkeypatch.setattr(prompts, "tokenize", lambda *text, **how: (texts.append(text), tokenize(*text, **how))[1])
    options = {"max_new_tokens": 1, "logits_processor": lambda ids, scores: (read.append(len(texts)), scores)[1]}
    assert len(specbeam.generate(lm, ["a"] * 40, options)) == 40
    assert read == [40 + 1 + 8 * (1 + n // 8) for n in range(40)]  # all, the longest once more, then each at its turn
    read.clear()
    for bad, says in {"a" * 300: "prompt 39: the prompt has 300 tokens", "\ud800": "prompt 39: .*surrogate"}.items():
        with pytest.raises(SpecbeamError, match=says):
            specbeam.generate(lm, [*["a"] * 39, bad], options)
    assert not read


def test_a_request_costs_no_more_in_a_crowd(lm, monkeypatch):
    monkeypatch.setattr(budget, "_sharing", {})  # engines of other tests would add calls

    def calls(count):
        engine = Engine(lm, max_requests=64, max_batch_tokens=1024, costs=table_of_costs(lambda nodes: 1e-3))
        for n in range(count):
            engine.submit([n, 1], {"max_new_tokens": 24, "eos_token_id": []})
        run(engine, 2)
        return calls_made(engine.step)

    assert calls(64) <= 64 * calls(1)


def test_a_step_looks_at_each_other_engine_of_the_process_once(lm, monkeypatch):
    monkeypatch.setattr(budget, "_sharing", {})

    def calls_beside(count):
        gc.collect()  # the slots of engines that are gone are freed in the next step, which would be counted
        others = [Engine(lm) for _ in range(count)]
        engine = Engine(lm, costs=table_of_costs(lambda nodes: 1e-3))  # each step goes ahead by the same passes
        engine.submit([1], {"max_new_tokens": 9, "min_new_tokens": 9})
        run(engine, 3)
        calls = calls_made(engine.step)
        assert len(others) == count  # they lived until now
        return calls

    alone, beside_10, beside_20 = map(calls_beside, (0, 10, 20))
    assert (beside_20 - beside_10) / 1.5 <= beside_10 - alone <= 10 * 10
