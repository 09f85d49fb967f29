"""Ctrl-C at any moment: the engine goes on afterwards, and no text changes."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import specbeam
from specbeam import Engine, SpecbeamError
from tests.conftest import interrupt

KINDS = [
    {"max_new_tokens": 9},
    {"max_new_tokens": 7, "num_beams": 3, "num_return_sequences": 2},
    {"max_new_tokens": 8, "do_sample": True, "seed": 5},
    {"max_new_tokens": 6, "num_beams": 2, "draft": "ngram"},
]
PROMPTS = [[1, 2, 3], [7, 8] * 9, [4], [5, 6, 5, 6, 5]]


def submit_all(engine):
    return [
        engine.submit(prompt, {k: v for k, v in kind.items() if k != "draft"}, draft=kind.get("draft"))
        for prompt, kind in zip(PROMPTS, KINDS, strict=True)
    ]


@pytest.fixture(scope="module")
def expected(lm):
    engine = Engine(lm)
    requests = submit_all(engine)
    lines = run_until(engine, None)
    return [[s.token_ids for s in request.result().sequences] for request in requests], lines


def run_until(engine, interrupted_line):
    """Run the engine, with a KeyboardInterrupt before a line of specbeam; return the number of lines run."""
    return interrupt(engine.run, interrupted_line)


def run_to_the_end(engine, requests):
    """Run an engine that may be wedged: each request ends within the rounds that its tokens can need."""
    for _ in range(200):
        if not engine.step():
            break
    assert all(request.done for request in requests)


@given(share=st.floats(0, 1))
def test_after_an_interrupt_at_any_line_the_engine_goes_on(lm, expected, share):
    texts, lines = expected
    engine = Engine(lm, max_batch_tokens=8)
    requests = submit_all(engine)
    run_until(engine, 1 + int(share * lines))
    requests.append(engine.submit(PROMPTS[0], KINDS[0]))
    run_to_the_end(engine, requests)
    interrupted = 0
    for request, text in zip(requests, [*texts, texts[0]], strict=True):
        try:
            sequences = request.result().sequences
        except SpecbeamError:
            interrupted += 1
        else:
            assert [s.token_ids for s in sequences] == text
    assert interrupted <= 1  # only a request that was at work itself is lost
    assert requests[-1].result().token_ids
    assert engine.cache_tokens == 0


def test_an_interrupt_during_a_pass_costs_no_request(lm, monkeypatch):
    forward, passes = lm.backend.forward, []

    def interrupted(segments):
        passes.append(len(segments))
        if len(passes) in (2, 5, 6):
            raise KeyboardInterrupt
        return forward(segments)

    engine = Engine(lm, max_batch_tokens=8)
    requests = submit_all(engine)
    monkeypatch.setattr(lm.backend, "forward", interrupted)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            engine.run()
    run_to_the_end(engine, requests)
    monkeypatch.undo()
    plain = Engine(lm)
    alone = submit_all(plain)
    plain.run()
    assert [r.result().token_ids for r in requests] == [r.result().token_ids for r in alone]


def test_a_request_that_is_interrupted_at_its_own_work_says_so(lm):
    def interrupt(ids, scores):
        raise KeyboardInterrupt

    engine = Engine(lm)
    other = engine.submit([1, 2], {"max_new_tokens": 5})
    request = engine.submit([3], {"max_new_tokens": 5, "logits_processor": [interrupt]})
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    run_to_the_end(engine, [request, other])
    with pytest.raises(SpecbeamError, match="interrupted while it chose its tokens: submit it again"):
        request.result()
    assert len(other.result().token_ids) == 5


def test_threads_that_begin_meanwhile_keep_their_number_of_threads(lm):
    """While an engine runs, the calling thread alone is limited to one thread of PyTorch."""
    seen = []

    def look(ids, scores):
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return scores

    target = specbeam.load(lm.source, backend="cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        specbeam.generate(target, [1, 2, 3], max_new_tokens=2, logits_processor=look)
    finally:
        torch.set_num_threads(before)
    assert seen == [2, 2]
