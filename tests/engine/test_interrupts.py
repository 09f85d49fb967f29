"""Ctrl-C at any moment: the handler that was there before is called, the engine goes on, and no text changes."""

import asyncio
import contextlib
import signal
from concurrent.futures import ThreadPoolExecutor
from signal import SIGINT

import pytest

import specbeam
from specbeam import Engine
from specbeam.api import scoring
from specbeam.cache.pool import pool_of
from specbeam.engine.scheduler import Passing, Scheduler
from specbeam.system.interrupts import HeldInterrupts
from tests.calls import check_interrupts, press_within
from tests.conftest import in_thorough_mode
from tests.engine.conftest import in_use

KINDS = [
    ({"max_new_tokens": 9}, None),
    ({"max_new_tokens": 7, "num_beams": 3, "num_return_sequences": 2}, None),
    ({"max_new_tokens": 8, "do_sample": True, "seed": 5}, None),
    ({"max_new_tokens": 6, "num_beams": 2}, "ngram"),
]
PROMPTS = [[1, 2, 3], [7, 8] * 9, [4], [5, 6, 5, 6, 5]]


def press():
    signal.raise_signal(SIGINT)


def hang():
    """A caller's function that hangs, until Ctrl-C is pressed a second time."""
    press()
    press()


HOLDING = [specbeam.system.interrupts, contextlib, Scheduler.passing, *filter(callable, vars(Passing).values())]
"""What holds interrupts, and lets them come."""


class Catastrophe(BaseException):
    """Raised into a thread."""


def submit_all(engine, function=None):
    """Submit a request of each kind. The first one calls a function at each of its steps."""
    requests = []
    for prompt, (options, draft) in zip(PROMPTS, KINDS, strict=True):
        if function is not None and not requests:
            options = options | {"logits_processor": lambda ids, scores: (function(), scores)[1]}
        requests.append(engine.submit(prompt, options, draft=draft))
    return requests


def texts(requests):
    return [[s.token_ids for s in request.result().sequences] for request in requests]


@pytest.fixture(scope="module")
def expected(lm):
    engine = Engine(lm)
    requests = submit_all(engine)
    engine.run()
    return texts(requests)


@pytest.fixture
def handle():
    """Sets what happens on Ctrl-C, until the end of the test."""
    before = signal.getsignal(SIGINT)
    yield lambda handler: signal.signal(SIGINT, handler)
    signal.signal(SIGINT, before)


@pytest.fixture
def pressed(handle):
    """The calls of a handler that raises KeyboardInterrupt, as a notebook's does."""
    calls = []

    def raise_interrupt(number, frame):
        calls.append((number, frame))
        raise KeyboardInterrupt

    handle(raise_interrupt)
    return calls


class Once:
    """Calls a function the n-th time that it is called itself."""

    def __init__(self, function, n=2):
        self.function, self.left = function, n
        self.returned = False

    def __call__(self, *_):
        self.left -= 1
        if not self.left:
            self.function()
            self.returned = True


def test_in_a_pass_an_interrupt_comes_at_once(lm, expected, pressed, watch):
    before = signal.getsignal(SIGINT)

    def interrupt(segments):
        assert signal.getsignal(SIGINT) is before
        if len(passes) in (2, 5, 6):
            press()
            raise AssertionError("the interrupt came later")

    engine = Engine(lm, max_batch_tokens=8)
    requests = submit_all(engine)
    passes = watch(lm, interrupt)
    for calls in (1, 2, 3):
        with pytest.raises(KeyboardInterrupt):
            engine.run()
        assert len(pressed) == calls
    engine.run()
    assert texts(requests) == expected
    assert engine.cache_tokens == 0


@pytest.mark.parametrize("place", ["processor", "constraint", "piece callback", "done callback", "slots"])
def test_elsewhere_it_comes_once_after_the_step(lm, expected, pressed, monkeypatch, place):
    once = Once(press, 1 if place == "done callback" else 2)
    before = signal.getsignal(SIGINT)
    engine = Engine(lm, max_batch_tokens=8)
    requests = submit_all(engine, once if place == "processor" else None)
    if place == "constraint":
        options = {"max_new_tokens": 9, "prefix_allowed_tokens_fn": lambda *_: once() or range(lm.backend.vocab_size)}
        requests[0].cancel()
        requests[0] = engine.submit(PROMPTS[0], options)
    elif place == "piece callback":
        requests[0].add_piece_callback(once)
    elif place == "done callback":
        requests[0].add_done_callback(once)
    elif place == "slots":
        lend = pool_of(lm.backend).lend
        monkeypatch.setattr(pool_of(lm.backend), "lend", lambda *args: (once(), lend(*args))[1])
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert once.returned
    assert [number for number, _ in pressed] == [SIGINT]
    assert pressed[0][1] is not None
    assert signal.getsignal(SIGINT) is before
    engine.run()
    assert len(pressed) == 1
    assert texts(requests) == expected
    assert engine.cache_tokens == 0


def test_in_another_thread_and_beside_handlers_that_are_no_functions_nothing_is_installed(lm, expected, handle):
    def handlers():
        found, engine = set(), Engine(lm)
        requests = submit_all(engine, lambda: found.add(signal.getsignal(SIGINT)))
        engine.run()
        assert texts(requests) == expected
        return found

    for handler in (signal.SIG_IGN, signal.SIG_DFL):
        handle(handler)
        assert handlers() == {handler}
    handle(signal.default_int_handler)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(handlers).result() == {signal.default_int_handler}


def test_a_handler_of_asyncio_is_called(lm, expected):
    """By default it cancels the main task. A program may set its own."""
    engine = Engine(lm)
    requests = submit_all(engine, Once(press))
    steps = []

    async def work():
        while engine.step():
            steps.append(1)
            await asyncio.sleep(0)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(work())
    assert 0 < len(steps) < 9

    async def work_with_a_handler():
        asyncio.get_running_loop().add_signal_handler(SIGINT, called.set)
        press()
        await work()
        await called.wait()

    called = asyncio.Event()
    asyncio.run(work_with_a_handler())
    assert texts(requests) == expected


@pytest.mark.parametrize("place", ["processor", "thread"])
def test_an_error_raised_into_a_change_ends_the_engine_and_no_other(lm, expected, handle, place):
    """A second Ctrl-C while a caller's function hangs, or what a debugger raises in a thread."""

    def explode():
        raise Catastrophe

    handle(signal.default_int_handler)
    before, other = in_use(lm), Engine(lm)
    others = submit_all(other)
    other.step()
    engine = Engine(lm)
    once = Once(hang if place == "processor" else explode)
    requests = submit_all(engine, once)
    if place == "processor":
        with pytest.raises(KeyboardInterrupt):
            engine.run()
    else:
        with ThreadPoolExecutor(1) as pool, pytest.raises(Catastrophe):
            pool.submit(engine.run).result()
    assert not once.returned
    for request in requests:
        with pytest.raises(RuntimeError, match="ended the engine in the middle of its own work: make a new Engine"):
            request.result()
    with pytest.raises(RuntimeError, match="make a new Engine"):
        engine.submit([1])
    assert not engine.step()
    other.run()
    assert texts(others) == expected
    assert (engine.cache_tokens, engine.kept_tokens) == (0, 0)
    assert in_use(lm) == before + other.kept_tokens
    for one in (Engine(lm), engine):  # as after an error in its own thread
        with one:
            again = submit_all(one)
        assert texts(again) == expected


def test_a_second_interrupt_ends_a_callback_that_hangs(lm, expected, handle):
    handle(signal.default_int_handler)
    engine = Engine(lm)
    requests = submit_all(engine)
    once, others = Once(hang), []
    requests[0].add_piece_callback(once)
    requests[2].add_piece_callback(others.append)  # called in the same iteration
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert not once.returned
    engine.run()
    assert texts(requests) == expected
    assert [token for piece in others for token in piece.token_ids] == expected[2][0]


def test_generate_and_scores_give_back_what_they_held(lm, pressed, watch):
    before, once = in_use(lm), Once(press)
    watch(lm, once)
    for work in (
        lambda: specbeam.generate(lm, [1, 2, 3], max_new_tokens=5),
        lambda: [*scoring.score(lm, [([1, 2], [3]), ([4, 5], [6])], max_contexts=1)],
    ):
        once.left = 2
        with pytest.raises(KeyboardInterrupt):
            work()
        assert len(pressed) == 1
        pressed.clear()  # the frame keeps all alive
        assert in_use(lm) == before


def test_an_engine_in_a_function_of_another_lets_its_interrupts_wait(lm, expected, pressed, monkeypatch):
    forward, inner = lm.backend.forward, []
    in_pass = Once(press)

    def work():
        with monkeypatch.context() as patch:
            patch.setattr(lm.backend, "forward", lambda segments: (in_pass(), forward(segments))[1])
            inner.append(specbeam.generate(lm, PROMPTS[0], KINDS[0][0]).token_ids)

    engine = Engine(lm)
    requests = submit_all(engine, Once(work))
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert in_pass.returned
    engine.run()
    assert texts(requests) == expected
    assert inner == expected[0]
    assert len(pressed) == 1


def test_a_handler_that_is_set_meanwhile_stays(handle):
    def ignore(*_):
        pass

    handle(signal.default_int_handler)
    with HeldInterrupts():
        handle(ignore)
        press()
    assert signal.getsignal(SIGINT) is ignore
    handle(signal.default_int_handler)
    held = HeldInterrupts()
    with held:
        with held.released():
            handle(ignore)
            press()
        assert signal.getsignal(SIGINT) is held
    assert signal.getsignal(SIGINT) is ignore


def test_an_error_in_a_block_does_not_stop_an_interrupt(pressed):
    def fail():
        with HeldInterrupts(), HeldInterrupts():
            press()
            raise ValueError

    def open_up():
        held = HeldInterrupts()
        with held:
            press()
            with held.released():
                raise AssertionError("it waited for the end of the block")

    before = signal.getsignal(SIGINT)
    with pytest.raises(KeyboardInterrupt) as caught:
        fail()
    assert isinstance(caught.value.__context__, ValueError)
    with pytest.raises(KeyboardInterrupt):
        open_up()
    assert signal.getsignal(SIGINT) is before
    assert len(pressed) == 2


@pytest.mark.parametrize("apart", [None, 0, 1, 4, 20])
def test_at_each_moment_the_handler_comes_back(lm, handle, apart):
    """One Ctrl-C at each bytecode of code that holds interrupts and runs a pass, or two of them."""

    def work():
        with scheduler.interrupts:
            scheduler.is_changing = True
            with HeldInterrupts():
                pass
            with scheduler.passing():
                pass
            scheduler.is_changing = False

    handle(signal.default_int_handler)
    scheduler, places = Engine(lm)._scheduler, [*HOLDING, work]
    for moment in range(press_within(places, work)[0]):
        error = press_within(places, work, [moment] if apart is None else [moment, moment + apart])[1]
        assert error is KeyboardInterrupt
        assert apart is not None or not scheduler.is_changing
        check_interrupts()


def test_after_one_interrupt_around_a_pass_the_engine_goes_on(folder, handle):
    handle(signal.default_int_handler)
    lm = specbeam.load(folder, backend="cpu", threads=1)

    def run(*at):
        engine = Engine(lm)
        request = engine.submit(PROMPTS[0], {"max_new_tokens": 3})
        moments, error = press_within([*HOLDING, Engine.step], engine.run, at)
        check_interrupts()
        engine.run()
        assert engine.cache_tokens == 0
        return moments, error, request.result().token_ids

    moments, _, expected = run()
    for moment in range(0, moments, 1 if in_thorough_mode() else moments // 50):
        assert run(moment)[1:] == (KeyboardInterrupt, expected)
