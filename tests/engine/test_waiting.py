"""An engine in a thread of its own, and the ways to wait for its requests: threads, tasks of asyncio, callbacks."""

import asyncio
import random
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import specbeam
from specbeam import Engine, SpecbeamError
from specbeam.engine import engine_thread
from specbeam.engine.passes import run_pass
from specbeam.engine.scheduler import Scheduler
from tests.conftest import in_thorough_mode
from tests.engine.test_interrupts import Catastrophe

LONG_WAIT = 60.0  # seconds; only a test that fails waits for it
OPTIONS = {"max_new_tokens": 12, "min_new_tokens": 12}
ENDLESS = {"max_new_tokens": 240, "min_new_tokens": 240}


class Gate:
    """A logits processor that holds the engine at a token, until the test lets it go on."""

    def __init__(self, at=0):
        self.reached, self.open = threading.Event(), threading.Event()
        self._left = at

    def __call__(self, ids, scores):
        self._left -= 1
        if self._left < 0:
            self.reached.set()
            assert self.open.wait(LONG_WAIT)
        return scores


def gated(gate):
    return ENDLESS | {"logits_processor": [gate]}


@pytest.fixture(scope="module")
def expected(lm):
    """The texts of ten prompts, by a call without threads."""
    return [specbeam.generate(lm, [i + 1], **OPTIONS).token_ids for i in range(10)]


def tokens_of(pieces):
    return [token for piece in pieces for token in piece.token_ids]


def in_threads(*functions):
    with ThreadPoolExecutor(len(functions)) as pool:
        return [one.result(LONG_WAIT) for one in [pool.submit(function) for function in functions]]


@pytest.fixture
def impatient():
    """Threads that fight for the interpreter: a wake-up that can be lost is lost."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


# Threads.


def test_threads_wait_for_results_and_pieces(lm, expected, impatient):
    with Engine(lm) as engine:

        def result(i):
            return engine.submit([i + 1], OPTIONS).result(LONG_WAIT).token_ids

        def pieces(i):
            found = [*engine.submit([i + 1], OPTIONS)]
            assert [piece.result is None for piece in found] == [True] * (len(found) - 1) + [False]
            return tokens_of(found)

        def wait(i):
            request = engine.submit([i + 1], OPTIONS)
            assert request.wait(LONG_WAIT)
            return tokens_of(request.pieces)

        found = in_threads(*(lambda i=i, do=do: do(i) for do in (result, pieces, wait) for i in range(10)))
    assert found == 3 * expected
    assert engine.cache_tokens == 0


def test_a_wait_may_end_before_the_request(lm):
    gate = Gate()
    with Engine(lm) as engine:
        request = engine.submit([1], gated(gate))
        assert gate.reached.wait(LONG_WAIT)
        assert not request.wait(0)
        with pytest.raises(TimeoutError, match="not finished within 0"):
            request.result(0)
        request.cancel()
        gate.open.set()
        assert request.result(LONG_WAIT).finish_reason == "cancelled"


def test_without_a_thread_of_the_engine_nobody_waits_in_vain(lm, expected):
    engine = Engine(lm)
    request = engine.submit([1], OPTIONS)
    for wait in (request.result, request.wait, lambda: next(iter(request)), lambda: asyncio.run(first(request))):
        with pytest.raises(SpecbeamError, match=r"call Engine.run\(\) or step\(\) .* \(Engine.start\)"):
            wait()
    engine.step()
    engine.step()
    assert next(request).token_ids == expected[0][:1]  # it is there already
    engine.run()
    assert request.wait()
    assert tokens_of(request) == expected[0][1:]
    assert asyncio.run(result_of(request)).token_ids == expected[0]


async def first(request):
    return await anext(aiter(request))


async def result_of(request):
    return await request


def test_the_engine_is_not_run_by_hand_meanwhile(lm):
    engine = Engine(lm)
    with engine:
        for run in (engine.step, engine.run, lambda: [*engine.as_completed([(0, engine.submit([1], OPTIONS))])]):
            with pytest.raises(SpecbeamError, match="runs in a thread of its own: wait for its requests"):
                run()
        with pytest.raises(SpecbeamError, match="runs in a thread of its own already"):
            engine.start()
    request = engine.submit([1], OPTIONS)
    engine.run()
    assert request.done


def test_an_error_of_a_request_reaches_whoever_waits(lm):
    def fail(*_):
        raise LookupError("it broke")

    async def iterate(request):
        return [piece async for piece in request]

    with Engine(lm) as engine:
        for wait in (
            lambda request: request.result(),
            lambda request: [*request],
            lambda request: asyncio.run(result_of(request)),
            lambda request: asyncio.run(iterate(request)),
        ):
            with pytest.raises(LookupError, match="it broke"):
                wait(engine.submit([1], OPTIONS | {"logits_processor": [fail]}))


# Tasks of asyncio.


def test_a_task_that_is_cancelled_cancels_its_request(lm):
    async def main():
        gate = Gate(at=1)
        awaited, iterated, held = (engine.submit([1], ENDLESS) for _ in range(3))

        async def iterate():
            async for _ in iterated:
                pass

        async def leave():
            with held:
                await asyncio.Event().wait()

        engine.submit([1], gated(gate))
        tasks = [asyncio.ensure_future(awaited), asyncio.create_task(iterate()), asyncio.create_task(leave())]
        await asyncio.to_thread(gate.reached.wait)
        for task in tasks:
            task.cancel()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in errors] == [asyncio.CancelledError] * 3
        gate.open.set()
        return [await request for request in (awaited, iterated, held)]

    with Engine(lm) as engine:
        results = asyncio.run(main())
        engine.stop(grace=0)
    assert [result.finish_reason for result in results] == ["cancelled"] * 3
    assert all(len(result.token_ids) < 10 for result in results)


# Callbacks.


def test_callbacks_get_each_piece_and_the_end(lm, expected):
    pieces, ended, wrong = [], threading.Event(), []
    with Engine(lm) as engine:
        request = engine.submit([1], OPTIONS)
        request.add_piece_callback(pieces.append)
        request.add_done_callback(lambda one: wrong.append(one.unknown))  # its error is logged
        request.add_done_callback(lambda one: ended.set() if one is request else wrong.append(one))
        assert ended.wait(LONG_WAIT)
    assert tokens_of(pieces) == expected[0]
    assert pieces[-1].result is request.result()
    assert wrong == []
    request.add_done_callback(wrong.append)  # at once
    assert wrong == [request]


def test_a_loop_is_called_once_per_iteration_in_its_own_thread(lm, expected):
    calls, threads = [], set()

    async def main():
        loop, left = asyncio.get_running_loop(), asyncio.Event()

        def call_soon(function, *args):
            calls.append(function)
            loop.call_soon_threadsafe(function, *args)

        def take(i, piece):
            threads.add(threading.current_thread())
            texts[i] += piece.token_ids
            if all(len(text) == 12 for text in texts):
                left.set()

        texts = [[] for _ in range(10)]
        requests = [engine.submit([i + 1], OPTIONS) for i in range(10)]
        for i, request in enumerate(requests):
            request.add_piece_callback(lambda piece, i=i: take(i, piece), call_soon)
        with engine:
            await left.wait()
        return texts

    engine = Engine(lm, max_requests=10)
    assert asyncio.run(main()) == expected
    assert threads == {threading.main_thread()}
    assert len(calls) <= 15  # of 130 pieces


def test_a_callback_for_a_loop_that_was_closed_hurts_nobody(lm):
    loop = asyncio.new_event_loop()
    with Engine(lm) as engine:
        gate = Gate()
        request = engine.submit([1], gated(gate))
        request.add_done_callback(lambda _: None, loop.call_soon_threadsafe)
        loop.close()
        request.cancel()
        gate.open.set()
        assert request.wait(LONG_WAIT)
        assert len(engine.submit([1], OPTIONS).result(LONG_WAIT).token_ids) == 12


# The end of the thread.


def test_stop_finishes_all_or_cancels_with_the_text_so_far(lm, expected):
    engine = Engine(lm, max_requests=2).start()
    requests = [engine.submit([i + 1], OPTIONS) for i in range(10)]
    engine.stop()
    assert [request.result().token_ids for request in requests] == expected
    gate = Gate(at=3)
    engine.start()
    requests = [engine.submit([1], gated(gate)), *(engine.submit([1], ENDLESS) for _ in range(5))]
    assert gate.reached.wait(LONG_WAIT)
    stopping = threading.Thread(target=engine.stop, args=[0])
    stopping.start()
    with pytest.raises(SpecbeamError, match="is stopping"):
        list(iter(lambda: engine.submit([1], OPTIONS), None))  # for ever
    gate.open.set()
    stopping.join(LONG_WAIT)
    results = [request.result() for request in requests]
    assert [result.finish_reason for result in results] == ["cancelled"] * 6
    lengths = [len(result.token_ids) for result in results]
    assert 3 <= lengths[0] <= 5
    assert lengths[2:] == [0] * 4  # they waited
    assert engine.cache_tokens == 0
    engine.stop()  # it has stopped


def test_ctrl_c_ends_a_wait_and_the_thread(lm):
    waits, pressed = threading.Event(), []

    def press(ids, scores):
        assert waits.wait(LONG_WAIT)
        if not pressed:
            pressed.append(signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
        return scores

    def wait():
        with engine:
            waits.set()
            request.wait(LONG_WAIT)

    engine = Engine(lm)
    request = engine.submit([1], ENDLESS | {"logits_processor": [press]})
    with pytest.raises(KeyboardInterrupt):
        wait()
    assert request.result().finish_reason == "cancelled"


def test_when_the_thread_ends_with_an_error_everybody_is_woken(lm, expected, caplog):
    def explode(ids, scores):
        gate(ids, scores)
        raise Catastrophe("at once")

    async def wait(*requests):
        return await asyncio.gather(*requests, return_exceptions=True)

    gate = Gate()
    engine = Engine(lm, max_requests=2).start()
    options = [OPTIONS | {"logits_processor": [explode]}, *[ENDLESS] * 5]
    requests = [engine.submit([1], one) for one in options]
    with ThreadPoolExecutor(3) as pool:
        waits = [
            pool.submit(requests[0].wait, LONG_WAIT),
            pool.submit(lambda: [*requests[3]]),
            pool.submit(asyncio.run, wait(*requests)),
        ]
        assert gate.reached.wait(LONG_WAIT)
        gate.open.set()
        errors = waits[2].result(LONG_WAIT)
        assert waits[0].result(LONG_WAIT)
        assert isinstance(waits[1].exception(LONG_WAIT), RuntimeError)
    for error in errors:
        assert isinstance(error, RuntimeError)
        assert "thread ended with Catastrophe: at once. Start the engine again" in str(error)
    assert "Catastrophe" in caplog.text
    with pytest.raises(RuntimeError, match="Catastrophe"):
        engine.submit([1], OPTIONS)
    with engine:
        assert engine.submit([1], OPTIONS).result(LONG_WAIT).token_ids == expected[0]
    assert engine.cache_tokens == 0


@pytest.mark.parametrize(("forbidden", "says"), [("stop", "cannot stop it"), ("wait", "cannot wait for a request")])
def test_a_callback_cannot_stop_or_wait_in_the_thread_that_calls_it(lm, caplog, forbidden, says):
    gate = Gate()
    with Engine(lm) as engine:
        longer = engine.submit([2], gated(gate))
        assert gate.reached.wait(LONG_WAIT)
        call = engine.stop if forbidden == "stop" else lambda: longer.result(LONG_WAIT)
        engine.submit([1], OPTIONS).add_done_callback(lambda _: call())
        gate.open.set()
    assert says in caplog.text


# Everything at once.


def test_a_thousand_clients_of_which_many_leave(lm, expected):
    """Tasks of two event loops, and threads. Some are cancelled, by themselves or by others, at random moments."""
    count = 500 if in_thorough_mode() else 75
    rng = random.Random(0)

    async def client(i):
        with engine.submit([i % 10 + 1], OPTIONS, priority=i % 3) as request:
            if i % 4 == 0:
                return tokens_of([piece async for piece in request])
            return (await request).token_ids

    async def clients():
        tasks = [asyncio.create_task(client(i)) for i in range(count)]
        await asyncio.sleep(0)
        for i in range(0, count, 3):
            tasks[i].cancel()
            await asyncio.sleep(0)
        return await asyncio.gather(*tasks, return_exceptions=True)

    def leave():
        requests = [engine.submit([i % 10 + 1], OPTIONS) for i in range(count // 2)]
        for request in rng.sample(requests, len(requests)):
            request.cancel()
        return [request.result(LONG_WAIT).token_ids for request in requests]

    with Engine(lm, max_requests=64) as engine:
        *tasks, early, later = in_threads(*[lambda: asyncio.run(clients())] * 2, leave, leave)
    for i, outcome in [*enumerate(tasks[0]), *enumerate(tasks[1])]:
        assert outcome == expected[i % 10] or (i % 3 == 0 and isinstance(outcome, asyncio.CancelledError))
    for i, tokens in [*enumerate(early), *enumerate(later)]:
        assert tokens == expected[i % 10][: len(tokens)]
    assert engine.cache_tokens == 0


def test_many_starts_and_stops(lm, expected):
    engine = Engine(lm)
    before = threading.active_count()
    for i in range(20):
        engine.start()
        request = engine.submit([1], OPTIONS)
        if i % 2:
            engine.stop(0)
            assert not engine.is_running
            assert request.result().token_ids == expected[0][: len(request.result().token_ids)]
        else:
            in_threads(*[engine.stop] * 3)
            assert request.result().token_ids == expected[0]
    assert threading.active_count() == before


def test_requests_that_come_together_share_their_first_pass(lm, monkeypatch):
    """While the engine waits for others, three more requests come, each as it looks how many there are."""
    passes, engine, waiting = [], Engine(lm), Scheduler.waiting.fget

    def look(scheduler):
        count = waiting(scheduler)
        if len(requests) < 4:
            requests.append(engine.submit([2, 3, 4], OPTIONS))
        return count

    def watched(batch, *how, **options):
        passes.append(len(batch))
        return run_pass(batch, *how, **options)

    monkeypatch.setattr(Scheduler, "waiting", property(look))
    monkeypatch.setattr(engine_thread, "MAX_WINDOW_SECONDS", LONG_WAIT)
    monkeypatch.setattr("specbeam.engine.engine.run_pass", watched)
    requests = [engine.submit([1, 2, 3], OPTIONS)]
    with engine:
        requests[0].result(LONG_WAIT)
    assert len(requests) == passes[0] == 4
